"""Solves a reduced problem whose cheapest choice exceeds the memory limit.

Dual ascent (`dual`) gives the lower bound and a stream of priced choices; each is repaired and
polished (`repair`) and the best feasible one is kept.  If no repair succeeds, the peak itself is
minimized, which gives either a feasible choice or the amount of memory that is missing.

`least_memory` minimizes the peak alone, regardless of the limit and the cost.

Complexity: at most 40 eliminations for the cost and 40 for the peak.
Paper: Fisher, "The Lagrangian relaxation method for solving integer programming problems",
Management Science 27, 1981.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.exact.reduction import ReducedProblem, reduce_problem
from planner.search.exact.solver import Eliminator
from planner.search.local.memory import MemoryTimeline
from planner.search.local.moves import MoveState
from planner.search.local.repair import pairs_are_cheap, polish, repair
from planner.search.problem import Array, Edge, Problem, evaluate, fits
from planner.search.progress import time_is_up
from planner.search.relax.dual import ascend, least_peak

_PEAK_WORK = 1e7
"""Joined entries of one elimination if only the peak is minimized."""


@dataclass(frozen=True, eq=False)
class Limited:
    """The best choice under the limit (or with the least peak), a lower bound, and the reason.

    The bound is infinite if it is proved that nothing fits.
    """

    choice: tuple[int, ...]
    lower_s: float
    reason: str


@dataclass(frozen=True)
class LeastMemory:
    """The choice with the lowest peak found, and a proved bound on all peaks.

    Attributes:
        choice: one strategy per node; avoids forbidden entries.
        peak_bytes: its peak.
        peak_moment: the first moment of the peak.
        lower_bytes: no choice that avoids forbidden entries has a lower peak.
    """

    choice: tuple[int, ...]
    peak_bytes: float
    peak_moment: int
    lower_bytes: float

    @property
    def proved(self) -> bool:
        """Whether no choice has a lower peak, to a relative 1e-9."""
        return self.peak_bytes <= self.lower_bytes * (1 + 1e-9)


def least_memory(problem: Problem, *, time_limit_s: float = 10.0) -> LeastMemory:
    """Minimize the memory peak.

    Args:
        problem: the problem; its limit is ignored.
        time_limit_s: seconds to stop after; one elimination is never cut short.

    Returns:
        The choice with the lowest peak found, and a lower bound of every peak.

    Raises:
        ValueError: when no choice avoids the forbidden entries.
    """
    deadline = time.monotonic() + time_limit_s
    free = dataclasses.replace(problem, limit_bytes=0.0)
    reduction = reduce_problem(free, keep_memory=True, dead_ends=False)
    if reduction.dead is not None:
        raise ValueError(f"no choice avoids the forbidden costs: {reduction.dead} has none")
    timeline = MemoryTimeline(reduction.problem)
    if not timeline.node.size:
        choice = reduction.decode(Eliminator(_hard_part(reduction), work=_PEAK_WORK).solve()[1])
        return LeastMemory(choice, *evaluate(problem, choice)[1:], 0.0)
    best = _Best(
        MoveState(reduction.problem, timeline, [0] * len(reduction.problem.cost_s)), deadline
    )
    dual = _minimise_peak(reduction, timeline, best, _PEAK_WORK, deadline)
    assert best.choice is not None
    choice = reduction.decode(best.choice)
    _, peak, moment = evaluate(problem, choice)
    least = np.minimum.reduceat(timeline.flat_bytes, timeline.flat_at)
    lower = max(dual, float(timeline.accumulate(least).max()))
    return LeastMemory(choice, peak, moment, min(lower, peak))


def polished_at(
    problem: Problem, choice: Sequence[int], time_limit_s: float = 10.0
) -> tuple[int, ...]:
    """Make a choice within the memory limit cheaper by moves that stay within the limit.

    Args:
        problem: the problem.
        choice: a choice that respects the limit and the forbidden entries.
        time_limit_s: seconds to stop after.

    Returns:
        A choice that is no more expensive and also respects both.
    """
    state = MoveState(problem, MemoryTimeline(problem), choice)
    polish(state, time.monotonic() + time_limit_s, pairs=pairs_are_cheap(problem))
    return tuple(int(s) for s in state.choice)


class _Best:
    """The best feasible choice, or the one with the least peak, seen so far."""

    def __init__(self, state: MoveState, deadline: float) -> None:
        self.state, self.deadline = state, deadline
        self.cost, self.peak = math.inf, math.inf
        self.choice: tuple[int, ...] | None = None
        self.seen: set[bytes] = set()

    def offer(self, choice: Sequence[int] | Array, prices: Array | None = None) -> float:
        """Repair and polish a choice, keep it if it is better; returns the best feasible cost."""
        key = np.asarray(choice, dtype=np.int64).tobytes()
        if key in self.seen:
            return self.cost
        self.seen.add(key)
        state = self.state
        state.reset(choice)
        self.note()
        if repair(state, self.deadline):
            polish(state, self.deadline, pairs=len(state.problem.edges) <= 600)
        self.note()
        return self.cost

    def note(self) -> None:
        """Keep the current state if it is better."""
        state = self.state
        if state.feasible():
            cost = state.cost()
            if cost < self.cost:
                self.cost, self.peak = cost, state.peak()
                self.choice = tuple(int(s) for s in state.choice)
        elif math.isinf(self.cost) and state.peak() < self.peak:
            self.peak = state.peak()
            self.choice = tuple(int(s) for s in state.choice)


def solve_limited(
    reduction: ReducedProblem, work: float, deadline: float, rounds: int = 40
) -> Limited:
    """Minimize the cost under the memory limit.

    Args:
        reduction: a problem reduced with ``keep_memory=True``.
        work: maximum joined entries of one elimination.
        deadline: monotonic time to stop at.
        rounds: maximum number of eliminations that price memory.

    Returns:
        The choice of the reduced problem, its lower bound and the reason.
    """
    problem = reduction.problem
    timeline = MemoryTimeline(problem)
    state = MoveState(problem, timeline, [0] * len(problem.cost_s))
    best = _Best(state, deadline)
    solver = Eliminator(reduction, work=work)
    start = solver.solve()
    best.offer(start[1])
    if math.isinf(best.cost):
        needed = _minimise_peak(reduction, timeline, best, work, deadline)
        if math.isinf(best.cost):
            reason = _missing(problem.limit_bytes, best, needed)
            proved = not fits(needed, problem.limit_bytes)
            lower = math.inf if proved else start[0]
            return Limited(best.choice or tuple(start[1]), lower, reason)

    def cost_of(choice: Sequence[int] | Array) -> float:
        state.reset(choice)
        return state.cost()

    limit = problem.limit_bytes
    dual = ascend(solver.solve, cost_of, best.offer, timeline, limit, start, deadline, rounds)
    assert best.choice is not None
    reason = dual.reason
    if time_is_up(deadline):
        reason = "out of time under the memory limit"
    return Limited(best.choice, dual.value, reason)


def _minimise_peak(
    reduction: ReducedProblem, timeline: MemoryTimeline, best: _Best, work: float, deadline: float
) -> float:
    """Search for the lowest peak; returns a lower bound of it."""
    problem = reduction.problem
    solver = Eliminator(_hard_part(reduction), work=work)

    def note(choice: Sequence[int] | Array) -> None:
        best.offer(choice)

    if best.choice is None:
        best.offer(solver.solve()[1])
    assert best.choice is not None
    start = best.choice
    return least_peak(solver.solve, note, timeline, start, deadline, problem.limit_bytes)


def _hard_part(reduction: ReducedProblem) -> ReducedProblem:
    """The problem with zero costs: only the forbidden entries of its edges are kept."""
    problem, pool = reduction.problem, reduction.pool
    pairs: dict[tuple[int, int], int] = {}
    for pair, index in reduction.pairs.items():
        forbidden = np.isinf(pool.tables[index])
        if forbidden.any():
            pairs[pair] = pool.intern(np.where(forbidden, np.inf, 0.0))
    unary = [pool.intern(np.zeros(cost.size)) for cost in problem.cost_s]
    free = dataclasses.replace(
        problem,
        cost_s=tuple(pool.tables[index] for index in unary),
        edges=tuple(Edge(i, j, pool.tables[index]) for (i, j), index in pairs.items()),
    )
    return dataclasses.replace(reduction, problem=free, unary=unary, pairs=pairs)


def proved_infeasible(limit: float, needed: float, least: float) -> str:
    """The reason if a bound of every peak, ``needed``, exceeds the limit; all in bytes."""
    return (
        f"proved infeasible: every choice needs at least {needed:.6g} bytes at some moment, "
        f"{needed - limit:.6g} more than the limit of {limit:.6g}; the lowest peak is "
        f"{least:.6g}"
    )


def _missing(limit: float, best: _Best, needed: float) -> str:
    """Why nothing feasible was found."""
    if not fits(needed, limit):
        return proved_infeasible(limit, needed, best.peak)
    return (
        f"nothing fits the memory limit: the lowest peak is {best.peak:.6g} bytes, "
        f"{best.peak - limit:.6g} more than the limit of {limit:.6g}"
    )
