"""The exact search, and the anytime search if that is too wide.

The first pass ignores the memory limit: it reduces the problem (`reduction`) and eliminates its
variables (`elimination`).  If that optimum respects the limit, it is the solution.  Otherwise a
memory-safe reduction is used and the limit is priced (`memory_limit`).  If an elimination would be
too wide, or the price of memory leaves a gap, the anytime search (`anytime`) continues until the
gap is closed or the time is up.

Complexity: exponential in the width of the elimination only; O(nodes * S^3) joined entries on a
ladder of S strategies, computed once for repeated layers where their tables coincide.
Papers: Bertele and Brioschi, "Nonserial Dynamic Programming", 1972; Dechter, "Bucket elimination",
AI 113, 1999.

A wide problem with many mesh axes is first shrunk by reduced-cost fixing (`fixing`): given the
bound of the diffusion and a good choice computed axis by axis, most strategies can't be part of a
better choice.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.exact.fixing import fix_by_bound
from planner.search.exact.reduction import ReducedProblem, reduce_problem
from planner.search.exact.solver import Eliminator, choose_route
from planner.search.local.memory import MemoryTimeline
from planner.search.local.memory_limit import (
    least_memory,
    polished_at,
    proved_infeasible,
    solve_limited,
)
from planner.search.problem import (
    Array,
    Problem,
    Solution,
    Verdict,
    evaluate,
    fits,
    forbidden_solution,
    make_solution,
    verify,
)
from planner.search.progress import time_is_up
from planner.search.searches.recursive_programming import recursive_programming

NAME = "dynamic_programming"
EASY_WORK = 3e7
"""Joined entries up to which an elimination runs without fixing first."""
SWEEPS = (4, 8, 16)
"""Diffusion sweeps of the rounds of fixing."""
FEW_NODES = 4000
"""Maximum number of nodes of a problem without levels for an elimination to be planned first."""
FOLDED_SWEEPS = 48
"""Diffusion sweeps on the quotient, where repeated layers cost nothing extra."""
ROUNDS, FEW_ROUNDS = 40, 12
"""Maximum number of eliminations that price the memory limit; the same under a counted effort."""
CLOSED = 1e-6
"""Relative gap at which a choice counts as the optimum (the gap is still reported)."""


def work_for(seconds: float) -> float:
    """Maximum joined entries of one elimination within a time limit (about 2 ns each)."""
    return max(1e6, 1.5e8 * seconds)


def dynamic_programming(
    problem: Problem,
    *,
    time_limit_s: float = 10.0,
    share: bool = True,
    seed: int = 0,
    threads: int = 2,
    effort_s: float | None = None,
) -> Solution:
    """Solve a problem by variable elimination, and by neighborhoods if that is too wide.

    Args:
        problem: the problem.
        time_limit_s: seconds to stop after; one elimination is never cut short, and compiling the
            inner loops (once per installation) does not count.
        share: whether equal tables share their work (repeated layers).
        seed: seed of the random neighborhoods.
        threads: processors to use; the second one runs an integer program.
        effort_s: counted work to stop after, in seconds of one processor of 2020; the solution then
            depends on the time limit only if that is reached first.

    Returns:
        The solution; ``proved`` if the elimination was exact and the memory limit does not bind or
        the bounds close the gap.

    Raises:
        ValueError: if the problem is malformed.
    """
    verify(problem)
    begun = time.monotonic()
    deadline = begun + time_limit_s
    work = work_for(time_limit_s if effort_s is None else effort_s)
    domains: list[Array] | None = None
    limited: Solution | None = None
    if len(problem.cost_s) <= FEW_NODES or problem.levels is not None:
        reduction = reduce_problem(problem, keep_memory=False, share=share)
        if reduction.dead is not None:
            return forbidden_solution(problem, reduction.dead, NAME, begun)
        took = time.monotonic() - begun
        route = choose_route(reduction, work=work)
        if not (route.plan.exact and route.work <= EASY_WORK) and problem.levels is not None:
            shrunk = _shrunk(problem, reduction, deadline, share=share)
            if shrunk.solution is not None:
                return dataclasses.replace(shrunk.solution, wall_s=time.monotonic() - begun)
            reduction, domains = shrunk.reduction, shrunk.domains
            route = choose_route(reduction, work=work)
        if route.plan.exact:
            most = ROUNDS if effort_s is None else FEW_ROUNDS
            limited = _eliminated(problem, reduction, domains, work, begun, deadline, most)
            closed = limited.feasible and limited.gap <= CLOSED
            closed = closed or limited.verdict is Verdict.IMPOSSIBLE
            if closed or time_is_up(deadline - took):
                return limited
    memory_reduction = reduce_problem(problem, keep_memory=True, share=share, domains=domains)
    if memory_reduction.dead is not None:
        return forbidden_solution(problem, memory_reduction.dead, NAME, begun)
    from planner.search.anytime import rounds  # loaded only if it is needed

    if not rounds.load.cache_info().currsize:
        deadline += rounds.load()
    answer = rounds.anytime(
        memory_reduction, deadline, begun, seed=seed, threads=threads, effort_s=effort_s
    )
    reason = f"neighbourhoods and bounds: {answer.reason}"
    choice = memory_reduction.decode(answer.choice)
    solution = make_solution(problem, choice, answer.lower_s, NAME, reason, begun)
    return solution if limited is None else better(limited, solution)


def _eliminated(
    problem: Problem,
    reduction: ReducedProblem,
    domains: list[Array] | None,
    work: float,
    begun: float,
    deadline: float,
    rounds: int,
) -> Solution:
    """The solution of an exact elimination; the memory limit is priced if it binds."""
    lower, choice = Eliminator(reduction, work=work).solve()
    if math.isinf(lower):
        return forbidden_solution(problem, "the whole problem", NAME, begun)
    full = reduction.decode(choice)
    reason = "elimination finished: the optimum, and the memory limit does not bind"
    if not fits(evaluate(problem, full)[1], problem.limit_bytes):
        share = bool(reduction.pool.share)
        memory_reduction = reduce_problem(problem, keep_memory=True, share=share, domains=domains)
        limited = solve_limited(memory_reduction, work, deadline, rounds)
        full = memory_reduction.decode(limited.choice)
        lower, reason = max(lower, limited.lower_s), limited.reason
    return make_solution(problem, full, lower, NAME, reason, begun)


def better(first: Solution, second: Solution) -> Solution:
    """The feasible, cheaper or lower-peak one of two solutions, with the better of their bounds."""
    lower = max(first.lower_bound_s, second.lower_bound_s)

    def rank(solution: Solution) -> tuple[bool, float, float]:
        cost = solution.cost_s if solution.feasible else 0.0
        return not solution.feasible, cost, solution.peak_bytes

    best = second if rank(second) <= rank(first) else first
    bound = min(lower, best.cost_s) if best.feasible else lower
    return dataclasses.replace(best, lower_bound_s=bound, wall_s=second.wall_s)


@dataclass(frozen=True, eq=False)
class _Shrunk:
    """The result of fixing: a smaller problem, or the solution."""

    reduction: ReducedProblem
    domains: list[Array] | None
    solution: Solution | None


def _shrunk(
    problem: Problem, reduction: ReducedProblem, deadline: float, *, share: bool
) -> _Shrunk:
    """Fix strategies by the bound until an exact elimination is easy or the gap is closed.

    The upper bound is the cost of a feasible choice computed axis by axis.  Each round of fixing
    starts from the domains of the previous one.  If the limit can bind, reductions never replace a
    strategy by one with more memory.
    """
    start = recursive_programming(
        problem, time_limit_s=max(0.1, deadline - time.monotonic()), sweeps=FOLDED_SWEEPS
    )
    if not start.feasible:
        start = _within_memory(problem, start, deadline)
    if start.verdict is Verdict.IMPOSSIBLE:
        return _Shrunk(reduction, None, start)
    if not start.feasible:
        return _Shrunk(reduction, None, None)
    choice, upper = start.choice, start.cost_s
    if upper - start.lower_bound_s <= CLOSED * abs(upper):
        return _Shrunk(reduction, None, _closed(problem, choice, start.lower_bound_s))
    binds = float(MemoryTimeline(problem).envelope().max(initial=0.0)) > problem.limit_bytes
    if binds:
        reduction = reduce_problem(problem, keep_memory=True, share=share)
    domains: list[Array] | None = None
    for sweeps in SWEEPS:
        lower, reduced_domains = fix_by_bound(reduction.problem, upper, sweeps=sweeps)
        if upper - lower <= CLOSED * abs(upper):
            return _Shrunk(reduction, None, _closed(problem, choice, lower))
        domains = [np.arange(cost.size) for cost in problem.cost_s]
        for members, left in zip(reduction.members, reduced_domains, strict=True):
            for node, original in members:
                domains[node] = np.sort(original[left])
        reduction = reduce_problem(problem, keep_memory=binds, share=share, domains=domains)
        route = choose_route(reduction, work=EASY_WORK)
        if (route.plan.exact and route.work <= EASY_WORK) or time.monotonic() > deadline:
            break
    return _Shrunk(reduction, domains, None)


def _within_memory(problem: Problem, start: Solution, deadline: float) -> Solution:
    """A choice that fits, from the one with the lowest peak; an infinite bound if none fits."""
    if start.verdict is Verdict.IMPOSSIBLE or time_is_up(deadline):
        return start
    least = least_memory(problem, time_limit_s=deadline - time.monotonic())
    limit, lower, reason = problem.limit_bytes, start.lower_bound_s, start.reason
    if not fits(least.lower_bytes, limit):
        lower = math.inf
        reason = proved_infeasible(limit, least.lower_bytes, least.peak_bytes)
    choice = least.choice
    if fits(least.peak_bytes, limit):
        choice = polished_at(problem, choice, deadline - time.monotonic())
    return make_solution(problem, choice, lower, NAME, reason, 0.0)


def _closed(problem: Problem, choice: Sequence[int], lower: float) -> Solution:
    """The solution if the bound meets a known choice."""
    reason = (
        f"the bound meets a choice made axis by axis within {CLOSED:g} of its cost; "
        "no elimination was needed"
    )
    return make_solution(problem, choice, lower, NAME, reason, 0.0)
