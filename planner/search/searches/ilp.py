"""The exact integer program (`integer`) as a search: the reference for other searches.

If stopped early, it returns the best choice and bound so far.

Complexity: exponential in the worst case; O(edges * S^2) variables.
Paper: Zheng et al., "Alpa: Automating inter- and intra-operator parallelism for distributed deep
learning", OSDI 2022; Huangfu and Hall, "Parallelizing the dual revised simplex method", Math. Prog.
Computation 10, 2018 (HiGHS).
"""

from __future__ import annotations

import math
import time

import numpy as np

from planner.search.anytime.incumbent import Incumbent
from planner.search.anytime.integer import solve_integer
from planner.search.exact.reduction import reduce_problem
from planner.search.local.memory import MemoryTimeline
from planner.search.problem import (
    Array,
    Problem,
    Solution,
    forbidden_solution,
    make_solution,
    verify,
)
from planner.search.progress import current
from planner.search.relax.flat import flatten

NAME = "ilp"


def ilp(problem: Problem, *, time_limit_s: float = 60.0) -> Solution:
    """Solve a problem as an integer linear program.

    Args:
        problem: the problem.
        time_limit_s: HiGHS's time limit.

    Returns:
        The incumbent with HiGHS's dual bound; infeasible, with HiGHS's status, if there is none.
        If HiGHS reports optimal (within its tolerances) and its bound is within 1e-7, the cost
        itself is the bound.  If stopped early, the best so far.

    Raises:
        ValueError: if the problem is malformed.
    """
    verify(problem)
    begun = time.monotonic()
    reduction = reduce_problem(problem, keep_memory=True, dead_ends=False)
    if reduction.dead is not None:
        return forbidden_solution(problem, reduction.dead, NAME, begun)
    part = reduction.problem
    flat = flatten(part)
    best = Incumbent(flat, begun, current())

    def offer(choice: Array) -> None:
        best.offer(choice, "branch and bound")

    stopped = best.monitor.should_stop
    answer = solve_integer(flat, begun + time_limit_s, stopped=stopped, on_choice=offer)
    if answer.choice is not None:
        offer(answer.choice)
    lower, reason = answer.lower_s, answer.message
    if not best.cost < math.inf:
        least = [int(cost.argmin()) for cost in part.cost_s]
        reason = f"no choice; {answer.message}"
        if math.isinf(lower):
            reason += _shortage(MemoryTimeline(part), part.limit_bytes)
        return make_solution(problem, reduction.decode(least), lower, NAME, reason, begun)
    full = reduction.decode(flat.whole(best.choice, len(part.cost_s)))
    if answer.finished and best.cost - lower <= 1e-7 * abs(best.cost):
        lower = math.inf  # HiGHS's tolerances; the cost is the bound
    return make_solution(problem, full, lower, NAME, reason, begun)


def _shortage(line: MemoryTimeline, limit: float) -> str:
    """The memory that is missing even if every usage takes its least, in words."""
    if not line.node.size:
        return ""
    floor = float(line.accumulate(np.minimum.reduceat(line.flat_bytes, line.flat_at)).max())
    text = f"; the usages' least bytes alone peak at {floor:.6g} under a limit of {limit:.6g}"
    return text + (f", {floor - limit:.6g} too many" if floor > limit else "")
