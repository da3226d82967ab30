"""The exact integer program (`integer`) as a search: the referee.

HiGHS can't be interrupted, so it runs in a thread of its own.  Asked to stop, the search leaves it
there (it ends by its time limit or with the process) and answers with the choice of
`recursive_programming`, since HiGHS tells nobody what it has found so far.

Complexity: exponential in the worst case; O(edges * S^2) variables.
Paper: Zheng et al., "Alpa: Automating inter- and intra-operator parallelism for distributed deep
learning", OSDI 2022; Huangfu and Hall, "Parallelizing the dual revised simplex method", Math. Prog.
Computation 10, 2018 (HiGHS).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from planner.search.dynamic_programming import forbidden_solution
from planner.search.flat import flatten
from planner.search.integer import solve_integer
from planner.search.memory import Timeline
from planner.search.problem import Problem, Solution, make_solution, verify
from planner.search.progress import Monitor, current, monitored
from planner.search.recursive_programming import recursive_programming
from planner.search.reduction import reduce_problem

NAME = "ilp"
_POLL_S = 0.05
"""Seconds between two looks at whether to stop."""
_QUICK_S = 10.0
"""Seconds for the choice that is given when asked to stop."""


def ilp(problem: Problem, *, time_limit_s: float = 60.0) -> Solution:
    """Solve a problem as an integer linear program.

    Args:
        problem: the problem.
        time_limit_s: HiGHS's time limit.

    Returns:
        The incumbent with HiGHS's dual bound; infeasible, with HiGHS's words, when there is none.
        When HiGHS says optimal (within its tolerances) and its bound is within 1e-7, the cost
        itself is the bound.  When asked to stop, what `recursive_programming` finds in ten seconds.

    Raises:
        ValueError: when the problem is malformed.
    """
    verify(problem)
    begun = time.monotonic()
    reduction = reduce_problem(problem, keep_memory=True, dead_ends=False)
    if reduction.dead is not None:
        return forbidden_solution(problem, reduction.dead, NAME, begun)
    part = reduction.problem
    flat = flatten(part)
    answer = _unless_stopped(solve_integer, flat, begun + time_limit_s)
    if answer is None:
        return _quick(problem, begun)
    if answer.choice is None:
        least = [int(cost.argmin()) for cost in part.cost_s]
        reason = f"no choice found; {answer.message}"
        if math.isinf(answer.lower_s):
            reason += _shortage(Timeline(part), part.limit_bytes)
        return make_solution(problem, reduction.decode(least), answer.lower_s, NAME, reason, begun)
    full = reduction.decode(flat.whole(answer.choice, len(part.cost_s)))
    solution = make_solution(problem, full, answer.lower_s, NAME, "", begun)
    lower = answer.lower_s
    if answer.finished and solution.feasible and solution.gap < 1e-7:
        lower = solution.cost_s
    return make_solution(problem, full, lower, NAME, answer.message, begun)


def _unless_stopped(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a function that can't be interrupted returns, or None once asked to stop."""
    results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def call() -> None:
        try:
            results.put((function(*args, **options), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=call, name="HiGHS", daemon=True).start()
    while not current().should_stop():
        try:
            found, error = results.get(timeout=_POLL_S)
        except Empty:
            continue
        if error is not None:
            raise error
        return found
    return None


def _quick(problem: Problem, begun: float) -> Solution:
    """The answer when HiGHS was not waited for."""
    with monitored(Monitor()):  # or the wish to stop would stop this, too
        found = recursive_programming(problem, time_limit_s=_QUICK_S)
    reason = f"stopped while HiGHS was running; choice of {found.search}: {found.reason}"
    return make_solution(problem, found.choice, found.lower_bound_s, NAME, reason, begun)


def _shortage(line: Timeline, limit: float) -> str:
    """How much memory is missing even when every usage takes its least."""
    if not line.node.size:
        return ""
    floor = float(line.accumulate(np.minimum.reduceat(line.flat_bytes, line.flat_at)).max())
    text = f"; the usages' least bytes alone peak at {floor:.6g} under a limit of {limit:.6g}"
    return text + (f", {floor - limit:.6g} too many" if floor > limit else "")
