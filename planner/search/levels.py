"""Axis-by-axis decisions: the levels of ``recursive_programming``, also a start for others.

Complexity: per level one narrow elimination, O(nodes * D^3) for D strategies per level.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from planner.search.memory import Timeline
from planner.search.moves import State, descend
from planner.search.problem import Array, Problem
from planner.search.reduction import Reduction, reduce_problem
from planner.search.repair import pairs_are_cheap, polish, repair
from planner.search.solver import Eliminator


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
        found = _solve_level(problem, everything, cap, deadline)
        return found or tuple(int(cost.argmin()) for cost in problem.cost_s)
    choice: tuple[int, ...] | None = None
    for level in range(problem.levels[0].shape[1]):
        if choice is not None and time.monotonic() >= deadline:
            break
        narrow = _domains(problem.levels, level, choice, strict=True)
        found = _solve_level(problem, narrow, cap, deadline)
        if found is None:
            loose = _domains(problem.levels, level, choice, strict=False)
            found = _solve_level(problem, loose, cap, deadline)
        choice = found or choice
    if choice is None:
        choice = _solve_level(problem, everything, cap, deadline)
    return choice or tuple(int(cost.argmin()) for cost in problem.cost_s)


def _domains(
    levels: Sequence[Array], level: int, choice: Sequence[int] | None, *, strict: bool
) -> list[Array]:
    """Per node, the strategies open at a level (loose: later axes are left free)."""
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
    """Solve one level by narrow elimination and single-node moves; None when it is forbidden."""
    reduction = reduce_problem(problem, keep_memory=False, domains=domains)
    if reduction.dead is not None:
        return None
    solver = Eliminator(reduction, cap=cap, work=2e8, sweeps=2)
    value, found = solver.solve()
    if math.isinf(value):
        return None
    if not solver.exact:
        found = _descended(reduction, found, deadline)
    full = reduction.decode(found)
    return full


def _descended(reduction: Reduction, found: Sequence[int], deadline: float) -> list[int]:
    """Single-node moves in index order, the memory limit aside."""
    part = reduction.problem
    free = Problem(part.names, part.cost_s, part.edges, (), math.inf)
    state = State(free, Timeline(free), found)
    descend(state, deadline)
    return [int(s) for s in state.choice]


def polished(whole: Reduction, choice: Sequence[int], deadline: float) -> tuple[int, ...]:
    """Moves over all strategies of a reduction, and memory repair.

    Args:
        whole: a reduction that keeps memory.
        choice: a choice of the original problem.
        deadline: monotonic time to stop at.

    Returns:
        A choice of the reduced problem.
    """
    start = encode(whole, choice)
    problem = whole.problem
    state = State(problem, Timeline(problem), start)
    if not np.isfinite(state.cost()):
        descend(state, deadline)
    if repair(state, deadline):
        polish(state, deadline, pairs=pairs_are_cheap(problem))
    return tuple(int(s) for s in state.choice)


def encode(reduction: Reduction, choice: Sequence[int]) -> list[int]:
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
