"""The planner's optimization problem, in numbers only, and its evaluator.

Every node i takes one strategy x_i.  The cost of a choice x is

    cost(x) = sum_i c_i[x_i] + sum_(a,b) E_ab[x_a, x_b],

and the memory at a moment t is the sum of ``bytes[x_node]`` over the usages live at t.  A choice is
feasible if its cost is finite (no forbidden entry is used) and the memory never exceeds the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""An array; the element type follows from its name and its documentation."""

FORBIDDEN = 1e18
"""Costs from here on (infinity included) mark a forbidden entry."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A memory with a separate limit, such as a device's or its host's.

    The pools of a problem stand side by side in time (`planner.search.pools`): the moments of a
    pool are shifted by ``first`` and its bytes are multiplied by ``scale``, so that the limit of
    the problem is the limit of every pool.  A search handles one memory, without regard to pools.
    """

    name: str
    limit_bytes: float
    first: int = 0
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Usage:
    """Memory of a node: ``bytes[s]`` bytes under strategy s, live in the moments [start, end) of
    ``pool``, an index into the problem's pools."""

    node: int
    start: int
    end: int
    bytes: Array
    pool: int = 0


@dataclass(frozen=True, eq=False)
class Edge:
    """Cost in seconds between two nodes: ``cost_s[s, u]`` for strategy s of a and u of b."""

    a: int
    b: int
    cost_s: Array


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes, pairwise costs, memory usages and a memory limit (infinity: none).

    ``levels`` holds, per node, a small integer per strategy and mesh axis; 0 means that the
    strategy does not use the axis.  Only the axis-by-axis search reads it.

    ``counts`` marks a quotient (`folding`): how many equal nodes of a larger problem each node
    stands for.  Its costs are totals over them.  Only reparametrization bounds of a quotient hold
    for the larger problem.

    ``pools`` are the memories that the usages occupy; empty: one, as in IOPDDL.
    """

    names: tuple[str, ...]
    cost_s: tuple[Array, ...]
    edges: tuple[Edge, ...]
    usages: tuple[Usage, ...]
    limit_bytes: float
    levels: tuple[Array, ...] | None = None
    counts: tuple[int, ...] | None = None
    pools: tuple[Pool, ...] = ()


class Verdict(StrEnum):
    """What is proved about a solution's choice."""

    OPTIMAL = "optimal"
    """Feasible, and its cost meets the bound to a relative 1e-9."""
    FEASIBLE = "feasible"
    """Feasible; a better choice is not ruled out."""
    NOT_FOUND = "not found"
    """Not feasible; a feasible choice is not ruled out."""
    IMPOSSIBLE = "impossible"
    """Not feasible, and it is proved that no choice is."""


@dataclass(frozen=True)
class Solution:
    """A choice, its cost, and the bounds that are known.

    ``lower_bound_s`` bounds the cost of every feasible choice from below.  An infeasible solution
    holds the choice with the lowest memory peak found, and ``reason`` says what is missing.
    """

    choice: tuple[int, ...]
    cost_s: float
    lower_bound_s: float
    peak_bytes: float
    peak_moment: int
    feasible: bool
    search: str
    reason: str
    wall_s: float

    @property
    def gap(self) -> float:
        """Relative distance (cost - lower bound) / cost; infinite when the cost is."""
        if not math.isfinite(self.cost_s):
            return math.inf
        return (self.cost_s - self.lower_bound_s) / max(abs(self.cost_s), 1e-300)

    @property
    def verdict(self) -> Verdict:
        """The verdict, derived from the cost and the bound, never from ``reason``."""
        if self.feasible:
            return Verdict.OPTIMAL if self.gap <= 1e-9 else Verdict.FEASIBLE
        return Verdict.IMPOSSIBLE if self.lower_bound_s == math.inf else Verdict.NOT_FOUND

    @property
    def proved(self) -> bool:
        """Whether the choice is feasible and proved optimal to a relative 1e-9."""
        return self.verdict is Verdict.OPTIMAL


def is_forbidden(table: Array) -> Array:
    """Mask of the forbidden entries of a cost table."""
    mask: Array = table >= FORBIDDEN
    return mask


def memory_profile(problem: Problem, choice: Sequence[int]) -> tuple[Array, Array]:
    """Memory over time, by a difference array over the moments where something starts or ends.

    Complexity: O(U log U) for U usages.

    Args:
        problem: the problem.
        choice: one strategy per node.

    Returns:
        ``(moments, bytes)``: ``bytes[k]`` are live during [moments[k], moments[k + 1]).
    """
    live = [usage for usage in problem.usages if usage.start < usage.end]
    return profile_of(
        [usage.start for usage in live],
        [usage.end for usage in live],
        [float(usage.bytes[choice[usage.node]]) for usage in live],
    )


def profile_of(
    starts: Sequence[int], ends: Sequence[int], nbytes: Sequence[float]
) -> tuple[Array, Array]:
    """Memory over time of intervals [start, end) that hold ``nbytes`` each.

    Args:
        starts: first moments.
        ends: moments after the last.
        nbytes: bytes.

    Returns:
        ``(moments, bytes)`` as in `memory_profile`; one moment without bytes if there is no
        interval.
    """
    if not len(starts):
        return np.zeros(1, dtype=np.int64), np.zeros(1)
    first, last = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
    taken = np.array(nbytes, dtype=np.float64)
    moments = np.unique(np.concatenate([first, last]))
    starts_at, ends_at = np.searchsorted(moments, first), np.searchsorted(moments, last)
    rise, fall = (np.bincount(at, taken, moments.size) for at in (starts_at, ends_at))
    live, gone = (np.bincount(at[taken > 0], minlength=moments.size) for at in (starts_at, ends_at))
    profile = np.cumsum(rise - fall)
    profile[np.cumsum(live - gone) == 0] = 0.0  # removes the rounding error of large arrays
    return moments, profile


def evaluate(problem: Problem, choice: Sequence[int]) -> tuple[float, float, int]:
    """Cost, memory peak and first moment of the peak of a choice: the only evaluator.

    Args:
        problem: the problem.
        choice: one strategy per node.

    Returns:
        ``(cost_s, peak_bytes, peak_moment)``; the cost is infinite if a forbidden entry is used.
        With pools, the peak is that of the fullest pool, in scaled bytes, and the moment counts
        from the start of that pool.
    """
    parts = [float(cost[s]) for cost, s in zip(problem.cost_s, choice, strict=True)]
    parts += [float(edge.cost_s[choice[edge.a], choice[edge.b]]) for edge in problem.edges]
    forbidden = any(part >= FORBIDDEN for part in parts)
    moments, profile = memory_profile(problem, choice)
    at = int(np.argmax(profile))
    cost = math.inf if forbidden else math.fsum(parts)
    moment = int(moments[at])
    first = max((pool.first for pool in problem.pools if pool.first <= moment), default=0)
    return cost, float(profile[at]), moment - first


def fits(peak_bytes: float, limit_bytes: float) -> bool:
    """Whether a peak respects the limit, up to the rounding of a sum of floats."""
    return peak_bytes <= limit_bytes * (1.0 + 1e-12)


def make_solution(
    problem: Problem, choice: Sequence[int], lower_s: float, search: str, reason: str, begun: float
) -> Solution:
    """Evaluate a choice and wrap it.

    Args:
        problem: the problem.
        choice: one strategy per node.
        lower_s: a valid lower bound of the cost.
        search: name of the search.
        reason: why the search stopped.
        begun: ``time.monotonic()`` at the start of the search.

    Returns:
        The solution; its lower bound is never above its cost if it is feasible.
    """
    taken = tuple(int(s) for s in choice)
    cost, peak, moment = evaluate(problem, taken)
    feasible = math.isfinite(cost) and fits(peak, problem.limit_bytes)
    lower = min(lower_s, cost) if feasible else lower_s
    if feasible and cost - lower <= 1e-12 * abs(cost):
        lower = cost
    wall = time.monotonic() - begun
    return Solution(taken, cost, lower, peak, moment, feasible, search, reason, wall)


def forbidden_solution(problem: Problem, where: str, search: str, begun: float) -> Solution:
    """The solution if no choice avoids every forbidden entry.

    Args:
        problem: the problem.
        where: the node without an allowed strategy, in words.
        search: name of the search.
        begun: monotonic start.

    Returns:
        An infeasible solution.
    """
    choice = [int(cost.argmin()) for cost in problem.cost_s]
    reason = f"no choice avoids the forbidden costs: {where} has no allowed strategy left"
    return make_solution(problem, choice, math.inf, search, reason, begun)


def verify(problem: Problem) -> None:
    """Check that a problem is well formed.

    Args:
        problem: the problem.

    Raises:
        ValueError: naming the node, edge or usage at fault.
    """
    count = len(problem.names)
    if len(problem.cost_s) != count:
        raise ValueError(f"{count} names but {len(problem.cost_s)} node costs")
    if math.isnan(problem.limit_bytes) or problem.limit_bytes < 0:
        raise ValueError(f"the memory limit is {problem.limit_bytes}")
    seen = set[int]()
    for name, cost in zip(problem.names, problem.cost_s, strict=True):
        if id(cost) in seen:
            continue
        seen.add(id(cost))
        if cost.ndim != 1 or cost.size == 0:
            raise ValueError(
                f"node {name}: costs of shape {cost.shape}, expected [strategies >= 1]"
            )
        if not cost.sum() > -math.inf:
            raise ValueError(f"node {name}: a cost is NaN or minus infinity")
    _verify_edges(problem)
    _verify_usages(problem)
    _verify_levels(problem)


def _verify_edges(problem: Problem) -> None:
    """Check shapes, ends and values of the edges (values once per object)."""
    count, seen = len(problem.names), set[int]()
    for edge in problem.edges:
        if not (0 <= edge.a < count and 0 <= edge.b < count) or edge.a == edge.b:
            raise ValueError(f"edge ({edge.a}, {edge.b}): not two different nodes of {count}")
        label = f"edge {problem.names[edge.a]} - {problem.names[edge.b]}"
        shape = (problem.cost_s[edge.a].size, problem.cost_s[edge.b].size)
        if edge.cost_s.shape != shape:
            raise ValueError(f"{label}: costs of shape {edge.cost_s.shape}, expected {shape}")
        if id(edge.cost_s) not in seen and not edge.cost_s.sum() > -math.inf:
            raise ValueError(f"{label}: a cost is NaN or minus infinity")
        seen.add(id(edge.cost_s))


def _verify_usages(problem: Problem) -> None:
    """Check the usages: node, interval, shape, finite and not negative (once per object)."""
    seen = set[int]()
    for usage in problem.usages:
        if not 0 <= usage.node < len(problem.names):
            raise ValueError(f"a usage names node {usage.node} of {len(problem.names)}")
        label = f"usage of node {problem.names[usage.node]}"
        if usage.end < usage.start:
            raise ValueError(f"{label}: ends at {usage.end} before its start {usage.start}")
        if usage.bytes.shape != problem.cost_s[usage.node].shape:
            raise ValueError(f"{label}: bytes of shape {usage.bytes.shape}")
        if id(usage.bytes) in seen:
            continue
        seen.add(id(usage.bytes))
        least, most = float(usage.bytes.min()), float(usage.bytes.max())
        if not (least >= 0 and most < math.inf):
            worst = most if least >= 0 else least
            raise ValueError(f"{label}: {worst:g} bytes, expected finite and not negative")


def _verify_levels(problem: Problem) -> None:
    """Check that the axis codes, when given, match nodes and strategies."""
    if problem.levels is None:
        return
    if len(problem.levels) != len(problem.names):
        raise ValueError(f"{len(problem.names)} nodes but {len(problem.levels)} level tables")
    for name, codes, cost in zip(problem.names, problem.levels, problem.cost_s, strict=True):
        if codes.ndim != 2 or codes.shape[0] != cost.size:
            raise ValueError(f"node {name}: levels of shape {codes.shape}")
        if codes.shape[1] != problem.levels[0].shape[1]:
            raise ValueError(f"node {name}: levels name {codes.shape[1]} axes")
