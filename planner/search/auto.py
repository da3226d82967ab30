"""Picks a search by the size of the problem and the work its elimination would be.

Few combinations: brute force.  An exact elimination within the time: dynamic programming.  Otherwise
axis by axis, then block descent with the rest of the time, against the better of the diffusion and the
mini-bucket bound.

Complexity: that of the search picked, plus one plan.
Paper: Rice, "The algorithm selection problem", Advances in Computers 15, 1976.
"""

from __future__ import annotations

import dataclasses
import time

from planner.search.brute import brute, combinations
from planner.search.conditioning import improve
from planner.search.dynamic_programming import dynamic_programming, work_for
from planner.search.memory import Timeline
from planner.search.problem import Problem, Solution, make_solution, verify
from planner.search.recursive_programming import encode, recursive_programming
from planner.search.reduction import reduce_problem
from planner.search.solver import Eliminator, choose_route

FEW = 50_000
"""Combinations up to which everything is tried."""


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
    work = work_for(time_limit_s)
    route = choose_route(reduction, work=work)
    left = max(0.1, time_limit_s - (time.monotonic() - begun))
    if route.plan.exact and route.work <= work:
        why = f"an exact elimination joins {route.work:.3g} entries, within {work:.3g}"
        return _named(dynamic_programming(problem, time_limit_s=left), why, begun)
    why = "an exact elimination is too wide"
    first = recursive_programming(problem, time_limit_s=0.4 * left)
    return _named(_improved(problem, first, begun + time_limit_s), why, begun)


def _improved(problem: Problem, first: Solution, deadline: float) -> Solution:
    """Block descent from a first solution; mini-buckets and multipliers when nothing is feasible."""
    started = time.monotonic()
    if not first.feasible:
        other = dynamic_programming(problem, time_limit_s=max(0.1, deadline - started))
        better = other.feasible or other.peak_bytes < first.peak_bytes
        return other if better else first
    reduction = reduce_problem(problem, keep_memory=True)
    if reduction.dead is not None:
        return first
    timeline = Timeline(reduction.problem)
    work = work_for(max(0.1, deadline - started) / 4)
    value, relaxed = Eliminator(reduction, work=work).solve()
    lower = max(first.lower_bound_s, value)
    second = improve(reduction, timeline, relaxed, deadline, rounds=0)
    other = make_solution(problem, reduction.decode(second), lower, "", "", started)
    begin = encode(reduction, first.choice)
    if other.feasible and other.cost_s < first.cost_s:
        begin = list(second)
    found = improve(reduction, timeline, begin, deadline)
    again = make_solution(
        problem,
        reduction.decode(found),
        lower,
        first.search,
        first.reason + "; block descent",
        started,
    )
    if again.feasible and again.cost_s <= first.cost_s:
        return again
    return dataclasses.replace(first, lower_bound_s=min(lower, first.cost_s))


def _named(solution: Solution, why: str, begun: float) -> Solution:
    """The solution under this search's name, with the reason of the pick."""
    return dataclasses.replace(
        solution,
        search=f"auto:{solution.search}",
        reason=f"{why}; {solution.reason}",
        wall_s=time.monotonic() - begun,
    )
