"""Axis-by-axis decisions: the levels of ``recursive_programming``, also a start for other searches.

Complexity: per level one narrow elimination, O(nodes * D^3) for D strategies per level.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from planner.search.exact.reduction import ReducedProblem, reduce_problem
from planner.search.exact.solver import Eliminator
from planner.search.local.memory import MemoryTimeline
from planner.search.local.moves import MoveState, descend
from planner.search.local.repair import pairs_are_cheap, polish, repair
from planner.search.problem import Array, Problem, fits
from planner.search.progress import time_is_up

STEP, RUNGS, MOST = 0.95, 200, 12
"""Ratio between the limits of the ladder, its number of rungs, and the maximum number tried."""


def decide_levels(problem: Problem, cap: int, deadline: float) -> tuple[int, ...]:
    """The choice after the last axis, before any move over the full domains.

    Args:
        problem: the problem.
        cap: entries of the largest table of a level.
        deadline: monotonic time after which remaining levels are skipped.

    Returns:
        One strategy per node.
    """
    everything = [np.arange(cost.size) for cost in problem.cost_s]
    if not problem.levels or problem.levels[0].shape[1] == 0:
        level_choice = _solve_level(problem, everything, cap, deadline)
        return level_choice or tuple(int(cost.argmin()) for cost in problem.cost_s)
    choice: tuple[int, ...] | None = None
    for level in range(problem.levels[0].shape[1]):
        if choice is not None and time.monotonic() >= deadline:
            break
        narrow = _domains(problem.levels, level, choice, strict=True)
        level_choice = _solve_level(problem, narrow, cap, deadline)
        if level_choice is None:
            loose = _domains(problem.levels, level, choice, strict=False)
            level_choice = _solve_level(problem, loose, cap, deadline)
        choice = level_choice or choice
    if choice is None:
        choice = _solve_level(problem, everything, cap, deadline)
    return choice or tuple(int(cost.argmin()) for cost in problem.cost_s)


def _domains(
    levels: Sequence[Array], level: int, choice: Sequence[int] | None, *, strict: bool
) -> list[Array]:
    """Per node, the strategies allowed at a level; unless ``strict``, later axes are free."""
    domains: list[Array] = []
    cache: dict[tuple[int, int], Array] = {}
    for node, codes in enumerate(levels):
        taken = -1 if choice is None else choice[node]
        key = (id(codes), taken)
        if key not in cache:
            mask = np.ones(codes.shape[0], dtype=bool)
            if choice is not None:
                mask = (codes[:, :level] == codes[taken, :level]).all(axis=1)
            if strict:
                later = np.count_nonzero(codes[:, level + 1 :], axis=1)
                mask &= later == later[mask].min()
            cache[key] = np.flatnonzero(mask)
        domains.append(cache[key])
    return domains


def _solve_level(
    problem: Problem, domains: list[Array], cap: int, deadline: float
) -> tuple[int, ...] | None:
    """Solve one level by narrow elimination and single-node moves; None if it is forbidden."""
    reduction = reduce_problem(problem, keep_memory=False, domains=domains)
    if reduction.dead is not None:
        return None
    solver = Eliminator(reduction, cap=cap, work=2e8, sweeps=2)
    value, reduced_choice = solver.solve()
    if math.isinf(value):
        return None
    if not solver.exact:
        reduced_choice = _descended(reduction, reduced_choice, deadline)
    full = reduction.decode(reduced_choice)
    return full


def _descended(reduction: ReducedProblem, start: Sequence[int], deadline: float) -> list[int]:
    """Make single-node moves in index order, ignoring the memory limit."""
    part = reduction.problem
    free = Problem(part.names, part.cost_s, part.edges, (), math.inf)
    state = MoveState(free, MemoryTimeline(free), start)
    descend(state, deadline)
    return [int(s) for s in state.choice]


def polished(whole: ReducedProblem, choice: Sequence[int], deadline: float) -> tuple[int, ...]:
    """Improve a choice by moves over all strategies of a reduction, with memory repair.

    If the best choice exceeds the limit, it is repaired under the limits of a fixed ladder below
    that choice's peak: the first ``MOST`` rungs within this limit. Up to there the rungs of
    a tighter limit are among those of a looser one, and a choice found under the tighter limit is
    found there, too.

    Args:
        whole: a reduction that keeps memory.
        choice: a choice of the original problem.
        deadline: monotonic time to stop at.

    Returns:
        A choice of the reduced problem.
    """
    problem = whole.problem
    state, limit = (
        MoveState(problem, MemoryTimeline(problem), nearest_reduced(whole, choice)),
        problem.limit_bytes,
    )
    if not np.isfinite(state.cost()):
        descend(state, deadline)
    pairs = pairs_are_cheap(problem)
    state.limit = math.inf
    polish(state, deadline, pairs=pairs)
    first, top = state.choice.copy(), state.peak()
    if fits(top, limit):
        return tuple(int(s) for s in first)
    best, cost, rungs = first, math.inf, 0
    for rung in range(1, RUNGS):
        goal = top * STEP**rung
        if goal > limit:
            continue
        state.reset(first)
        state.limit = goal
        if time_is_up(deadline) or rungs == MOST or not repair(state, deadline):
            break
        polish(state, deadline, pairs=pairs)
        rungs += 1
        if state.cost() < cost:
            cost, best = state.cost(), state.choice.copy()
    if math.isinf(cost):  # no rung within the limit was reached
        state.reset(first)
        state.limit = limit
        if repair(state, deadline):
            polish(state, deadline, pairs=pairs)
        best = state.choice.copy()
    return tuple(int(s) for s in best)


def nearest_reduced(reduction: ReducedProblem, choice: Sequence[int]) -> list[int]:
    """The reduced choice nearest to an original one: the first member's strategy, or the cheapest.

    Args:
        reduction: the reduction.
        choice: one strategy per original node.

    Returns:
        One strategy per reduced node.
    """
    start: list[int] = []
    for members, cost in zip(reduction.members, reduction.problem.cost_s, strict=True):
        node, original = members[0]
        at = np.flatnonzero(original == choice[node])
        start.append(int(at[0]) if at.size else int(cost.argmin()))
    return start
