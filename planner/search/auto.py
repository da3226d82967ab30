"""Picks a search by the size of the problem.

Few combinations: brute force.  Tables of a size that can be bounded: dynamic programming.
Otherwise axis by axis, then block descent with the rest of the time (or, when the memory limit
binds, multipliers), against the better of the diffusion and the mini-bucket bound.

Complexity: that of the search picked, plus one plan.
Paper: Rice, "The algorithm selection problem", Advances in Computers 15, 1976.
"""

from __future__ import annotations

import dataclasses
import time

from planner.search.brute import brute, combinations
from planner.search.conditioning import improve
from planner.search.dynamic_programming import dynamic_programming, work_for
from planner.search.levels import encode
from planner.search.memory import Timeline
from planner.search.problem import Problem, Solution, evaluate, fits, make_solution, verify
from planner.search.recursive_programming import recursive_programming
from planner.search.reduction import reduce_problem
from planner.search.solver import Eliminator

FEW = 50_000
"""Combinations up to which everything is tried."""

MANY = 50_000_000
"""Table entries up to which the whole problem is bounded and eliminated."""


def auto(problem: Problem, *, time_limit_s: float = 10.0) -> Solution:
    """Solve a problem by the search that suits it.

    Args:
        problem: the problem.
        time_limit_s: seconds to stop after.

    Returns:
        The solution; ``search`` names the pick and ``reason`` says why it was picked.

    Raises:
        ValueError: when the problem is malformed.
    """
    verify(problem)
    begun = time.monotonic()
    count = combinations(problem)
    if count <= FEW:
        return _named(brute(problem), f"{count} combinations", begun)
    reduction = reduce_problem(problem, keep_memory=False)
    if reduction.dead is not None:
        return _named(dynamic_programming(problem), "forbidden costs only", begun)
    left = max(0.1, time_limit_s - (time.monotonic() - begun))
    entries = sum(edge.cost_s.size for edge in reduction.problem.edges)
    if entries <= MANY:
        why = f"{entries:.3g} table entries, few enough to bound and eliminate"
        return _named(dynamic_programming(problem, time_limit_s=left), why, begun)
    why = f"{entries:.3g} table entries, more than {MANY:.3g}: axis by axis first"
    first = recursive_programming(problem, time_limit_s=0.2 * left)
    return _named(_improved(problem, first, begun + time_limit_s), why, begun)


def _improved(problem: Problem, first: Solution, deadline: float) -> Solution:
    """Block descent from the better start; multipliers when the memory limit binds."""
    started = time.monotonic()
    reduction = reduce_problem(problem, keep_memory=True)
    if reduction.dead is not None:
        return first
    work = work_for(max(0.1, deadline - started) / 8)
    value, relaxed = Eliminator(reduction, work=work).solve()
    lower = max(first.lower_bound_s, value)
    first = dataclasses.replace(first, lower_bound_s=lower)
    binds = not fits(evaluate(problem, reduction.decode(relaxed))[1], problem.limit_bytes)
    if binds or not first.feasible:
        priced = dynamic_programming(problem, time_limit_s=max(0.1, deadline - time.monotonic()))
        return _better(first, priced)
    timeline = Timeline(reduction.problem)
    start = improve(reduction, timeline, relaxed, deadline, rounds=0)
    second = make_solution(problem, reduction.decode(start), lower, "mini_buckets", "", started)
    if _better(first, second).search == first.search:
        start = tuple(encode(reduction, first.choice))
    found = improve(reduction, timeline, start, deadline)
    reason = first.reason + "; block descent from it or from the mini-buckets' choice"
    full = reduction.decode(found)
    return _better(first, make_solution(problem, full, lower, first.search, reason, started))


def _better(first: Solution, second: Solution) -> Solution:
    """The feasible one, the cheaper one, or the one with the lower peak; with the better bound."""
    lower = max(first.lower_bound_s, second.lower_bound_s)

    def rank(solution: Solution) -> tuple[bool, float, float]:
        cost = solution.cost_s if solution.feasible else 0.0
        return not solution.feasible, cost, solution.peak_bytes

    best = second if rank(second) <= rank(first) else first
    return dataclasses.replace(best, lower_bound_s=min(lower, best.cost_s))


def _named(solution: Solution, why: str, begun: float) -> Solution:
    """The solution under this search's name, with the reason of the pick."""
    return dataclasses.replace(
        solution,
        search=f"auto:{solution.search}",
        reason=f"{why}; {solution.reason}",
        wall_s=time.monotonic() - begun,
    )
