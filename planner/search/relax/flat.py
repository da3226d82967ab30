"""A problem as flat arrays, for compiled code.

Nodes with one strategy are constants: their memory becomes the base of the moments.  Each run of
moments with the same live usages is represented by the moment with the highest base, and only if
some choice could exceed the limit there.

Complexity: O(table entries + usages * strategies).
Paper: Fulkerson and Gross, "Incidence matrices and interval graphs", Pacific J. Math. 15, 1965
(only the maximal sets of an interval graph can be peaks).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.local.memory import live_sums, lived_through
from planner.search.problem import Array, Problem


@dataclass(frozen=True, eq=False)
class FlatProblem:
    """Arrays over the nodes of a problem that still have a choice ("free" nodes).

    Attributes:
        free: [n] the problem's node of each free node.
        at: [n + 1] where each node's strategies begin in ``unary``.
        unary: node costs in seconds, flat.
        ends: [m, 2] free nodes of each edge.
        table_at, table: [m] where each edge's row-major costs begin, and all costs; edges whose
            costs are one object share them.
        near_at, near: [n + 1], [2 m] the edges of each node.
        memory: the usages of the free nodes on the moments that matter.
        constant_s: cost of the nodes without a choice, and of the edges between them.
    """

    free: Array
    at: Array
    unary: Array
    ends: Array
    table_at: Array
    table: Array
    near_at: Array
    near: Array
    memory: FlatMoments
    constant_s: float

    @property
    def nodes(self) -> int:
        """Number of free nodes."""
        return int(self.free.size)

    @functools.cached_property
    def sizes(self) -> Array:
        """[n] strategies per node."""
        sizes: Array = np.diff(self.at)
        return sizes

    @property
    def graph(self) -> tuple[Array, ...]:
        """The costs in the form that `walks` takes."""
        parts = (self.at, self.unary, self.ends, self.table_at, self.table)
        return (*parts, self.near_at, self.near)

    def cost(self, choice: Array) -> float:
        """Cost in seconds of a choice of the free nodes, constants included."""
        a, b = choice[self.ends[:, 0]], choice[self.ends[:, 1]]
        pairs = self.table[self.table_at + a * self.sizes[self.ends[:, 1]] + b]
        node_costs = self.unary[self.at[:-1] + choice]
        return float(node_costs.sum() + pairs.sum()) + self.constant_s

    @functools.cached_property
    def owner(self) -> Array:
        """Node of every strategy in the flat array."""
        owner: Array = np.repeat(np.arange(self.nodes), self.sizes)
        return owner

    def fits(self, choice: Array) -> bool:
        """Whether a choice respects the memory limit."""
        return self.memory.excess(self.memory.profile(choice)) <= 0

    def factors(self) -> tuple[Array, Array, Array, Array]:
        """``(scope_at, scope, data_at, data)`` for `buckets`; the node costs come first in data."""
        n, m = self.nodes, self.table_at.size
        widths = np.repeat([1, 2], [n, m])
        scope_at = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
        scope = np.concatenate([np.arange(n), np.sort(self.ends, axis=1).ravel()])
        data_at = np.concatenate([self.at[:-1], self.unary.size + self.table_at])
        return scope_at, scope.astype(np.int64), data_at, np.concatenate([self.unary, self.table])

    def whole(self, choice: Array, count: int) -> list[int]:
        """The choice of all ``count`` nodes of the problem; constants take their only strategy."""
        full = np.zeros(count, np.int64)
        full[self.free] = choice
        return [int(s) for s in full]


@dataclass(frozen=True, eq=False)
class FlatMoments:
    """Usages of free nodes over the moments that matter.

    Attributes:
        limit: maximum bytes at any moment.
        base: [K] bytes of the constants.
        node, low, high: [U] node and moment range of each usage.
        bytes_at, taken: [U] where each usage's bytes per strategy begin, and all bytes.
        home: position of each entry of ``taken`` in the flat array over all strategies.
        offsets: [n + 1] where each node's strategies begin in that array.
        used_at, used: [n + 1], [U] the usages of each node.
        moments: [K] the moments.
    """

    limit: float
    base: Array
    node: Array
    low: Array
    high: Array
    bytes_at: Array
    taken: Array
    home: Array
    offsets: Array
    used_at: Array
    used: Array
    moments: Array

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array, Array, Array, float]:
        """The usages in the form that `walks` takes."""
        return self.low, self.high, self.bytes_at, self.taken, self.used_at, self.used, self.limit

    def profile(self, choice: Sequence[int] | Array) -> Array:
        """[K] bytes at each moment under a choice of the free nodes."""
        taken = self.taken[self.bytes_at + np.asarray(choice, np.int64)[self.node]]
        return self.base + live_sums(self.low, self.high, taken, self.base.size)

    def excess(self, profile: Array) -> float:
        """Bytes by which a profile exceeds the limit; not positive if it fits."""
        return float(profile.max()) - self.limit * (1 + 1e-12) if profile.size else -1.0

    def prices(self, multipliers: Array) -> Array:
        """Flat price of every strategy under [K] multipliers in seconds per byte."""
        lengths = np.diff(np.append(self.bytes_at, self.taken.size))
        weight = np.repeat(lived_through(self.low, self.high, multipliers), lengths)
        return np.bincount(self.home, weight * self.taken, int(self.offsets[-1]))


def flatten(problem: Problem) -> FlatProblem:
    """Flatten a problem whose edges are merged (at most one between two nodes).

    Args:
        problem: a reduced problem; nodes with one strategy have no edges.

    Returns:
        The arrays.
    """
    sizes = np.array([cost.size for cost in problem.cost_s], np.int64)
    free = np.flatnonzero(sizes > 1)
    number = np.full(sizes.size, -1, np.int64)
    number[free] = np.arange(free.size)
    at = np.concatenate([[0], np.cumsum(sizes[free])]).astype(np.int64)
    ends = np.array([(number[e.a], number[e.b]) for e in problem.edges], np.int64).reshape(-1, 2)
    distinct = {id(edge.cost_s): edge.cost_s for edge in problem.edges}
    tables = [np.asarray(table, np.float64).ravel() for table in distinct.values()]
    begins = np.cumsum([0] + [table.size for table in tables]).tolist()
    table_at = dict(zip(distinct, begins[:-1], strict=True))
    near_at = np.concatenate([[0], np.cumsum(np.bincount(ends.ravel(), minlength=free.size))])
    constant = sum(float(cost[0]) for cost in problem.cost_s if cost.size == 1)
    return FlatProblem(
        free=free,
        at=at,
        unary=_joined([problem.cost_s[node] for node in free]),
        ends=ends,
        table_at=np.array([table_at[id(edge.cost_s)] for edge in problem.edges], np.int64),
        table=_joined(tables),
        near_at=near_at.astype(np.int64),
        near=np.argsort(ends.ravel(), kind="stable") // 2,
        memory=_moments(problem, number, at),
        constant_s=constant,
    )


def _joined(parts: list[Array]) -> Array:
    """Concatenated arrays, as floats."""
    return np.concatenate([np.zeros(0), *parts]).astype(np.float64)


def _moments(problem: Problem, number: Array, offsets: Array) -> FlatMoments:
    """The usages of the free nodes over the moments that can exceed the limit."""
    live = [usage for usage in problem.usages if usage.start < usage.end]
    moments = np.unique(np.array([usage.start for usage in live], np.int64))
    low = np.searchsorted(moments, np.array([usage.start for usage in live], np.int64))
    high = np.searchsorted(moments, np.array([usage.end for usage in live], np.int64))
    least = np.array([usage.bytes.min() for usage in live], np.float64)
    most = np.array([usage.bytes.max() for usage in live], np.float64)
    fixed = least == most
    base = live_sums(low[fixed], high[fixed], least[fixed], moments.size)
    chosen = np.flatnonzero(~fixed)
    low, high = low[chosen], high[chosen]
    heads = _heads(low, high, base)
    tall = base + live_sums(low, high, most[chosen], moments.size) > problem.limit_bytes
    heads = heads[tall[heads]]
    low, high = np.searchsorted(heads, low), np.searchsorted(heads, high)
    inside = low < high
    chosen, low, high = chosen[inside], low[inside], high[inside]
    node = number[np.array([live[u].node for u in chosen], np.int64)]
    lengths = np.diff(offsets)[node]
    bytes_at = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    taken = _joined([live[u].bytes for u in chosen])
    within = np.arange(taken.size) - np.repeat(bytes_at[:-1], lengths)
    counts = np.bincount(node, minlength=offsets.size - 1)
    return FlatMoments(
        limit=float(problem.limit_bytes),
        base=base[heads],
        node=node,
        low=low.astype(np.int64),
        high=high.astype(np.int64),
        bytes_at=bytes_at[:-1],
        taken=taken,
        home=np.repeat(offsets[node], lengths) + within,
        offsets=offsets,
        used_at=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        used=np.argsort(node, kind="stable"),
        moments=moments[heads],
    )


def _heads(low: Array, high: Array, base: Array) -> Array:
    """The moment with the highest base of every run of moments with the same live usages."""
    if not base.size:
        return np.zeros(0, np.int64)
    cuts = np.unique(np.concatenate([[0], low, high]))
    cuts = cuts[cuts < base.size]
    run = np.searchsorted(cuts, np.arange(base.size), side="right") - 1
    order = np.lexsort((-base, run))
    first = np.searchsorted(run[order], np.arange(cuts.size))
    return np.sort(order[first])
