"""The exact search: shrink, eliminate, decode; multipliers when memory binds.

First the memory limit is left aside: the problem is shrunk (`reduction`) and its variables are
eliminated (`elimination`).  When that optimum respects the limit it is the answer.  Otherwise the
memory-safe shrinking is taken and the limit is priced (`memory_limit`).  Where an elimination would
be too wide, it becomes a mini-bucket relaxation for the lower bound and block descent
(`conditioning`) for the choice.

Complexity: exponential in the width of the elimination only; O(nodes * S^3) joined entries on a
ladder of S strategies, computed once for repeated layers where their tables coincide.
Papers: Bertele and Brioschi, "Nonserial Dynamic Programming", 1972; Dechter, "Bucket elimination",
AI 113, 1999.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from planner.search.conditioning import improve
from planner.search.memory import Timeline
from planner.search.memory_limit import solve_limited
from planner.search.problem import Problem, Solution, evaluate, fits, make_solution, verify
from planner.search.reduction import Reduction, reduce_problem
from planner.search.solver import Eliminator

NAME = "dynamic_programming"


def work_for(seconds: float) -> float:
    """Joined entries one elimination may cost within a time limit (about 2 ns each)."""
    return max(1e6, 1.5e8 * seconds)


def dynamic_programming(
    problem: Problem, *, time_limit_s: float = 10.0, share: bool = True
) -> Solution:
    """Solve a problem by variable elimination.

    Args:
        problem: the problem.
        time_limit_s: seconds to stop after; one elimination is never cut short.
        share: whether equal tables share their work (repeated layers).

    Returns:
        The solution; ``proved`` when the elimination was exact and the memory limit does not bind
        or the dual closes the gap.

    Raises:
        ValueError: when the problem is malformed.
    """
    verify(problem)
    begun = time.monotonic()
    deadline, work = begun + time_limit_s, work_for(time_limit_s)
    reduction = reduce_problem(problem, keep_memory=False, share=share)
    if reduction.dead is not None:
        return forbidden_solution(problem, reduction.dead, NAME, begun)
    solver = Eliminator(reduction, work=work)
    lower, found = solver.solve()
    if math.isinf(lower):
        return forbidden_solution(problem, "the whole problem", NAME, begun)
    full = reduction.decode(found)
    reason = "elimination finished: the optimum, and the memory limit does not bind"
    if not solver.exact:
        full = _improved(reduction, found, deadline)
        reason = "elimination too wide to be exact: mini-bucket bound and block descent"
    limit = problem.limit_bytes
    if not fits(evaluate(problem, full)[1], limit):
        reduction = reduce_problem(problem, keep_memory=True, share=share)
        limited = solve_limited(reduction, work, deadline)
        full = reduction.decode(limited.choice)
        lower, reason = max(lower, limited.lower_s), limited.reason
    return make_solution(problem, full, lower, NAME, reason, begun)


def forbidden_solution(problem: Problem, where: str, search: str, begun: float) -> Solution:
    """The answer when no choice avoids every forbidden entry.

    Args:
        problem: the problem.
        where: what has no allowed strategy.
        search: name of the search.
        begun: monotonic start.

    Returns:
        An infeasible solution.
    """
    choice = [int(cost.argmin()) for cost in problem.cost_s]
    reason = f"no choice avoids the forbidden costs: {where} has no allowed strategy left"
    return make_solution(problem, choice, math.inf, search, reason, begun)


def _improved(reduction: Reduction, found: Sequence[int], deadline: float) -> tuple[int, ...]:
    """Block descent from a relaxation's choice, the memory limit aside."""
    free = Problem(
        reduction.problem.names, reduction.problem.cost_s, reduction.problem.edges, (), math.inf
    )
    unlimited = Reduction(
        free,
        reduction.members,
        reduction.pool,
        reduction.unary,
        reduction.pairs,
        None,
        reduction.count,
    )
    return reduction.decode(improve(unlimited, Timeline(free), found, deadline))
