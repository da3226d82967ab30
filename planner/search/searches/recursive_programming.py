"""A cheap search that decides one mesh axis at a time for the whole network.

At level l every node may take the strategies that agree with the decisions on axes before l and
leave the axes after l unused (or, if it has none, those that use the fewest of them).  This small
problem is solved with a narrow elimination, followed by single-node moves in the order of the
network; the codes chosen on axis l are then fixed.  Finally, local moves consider all strategies
and the memory limit is repaired.  Repeated layers are decided once (`folding`), and separately only
if the memory limit can't be met otherwise.  Nodes are never taken in descending order of cost.

Complexity: per level, one narrow elimination: O(nodes * D^3) for D strategies per level, D much
smaller than the full domain.
Paper: Wang, Huang and Li, "Supporting very large models using automatic dataflow graph
partitioning" (Tofu), EuroSys 2019 (recursive partitioning).
"""

from __future__ import annotations

import dataclasses
import math
import time

from planner.search.exact.reduction import reduce_problem
from planner.search.folding.folding import fold
from planner.search.local.levels import decide_levels, polished
from planner.search.problem import (
    Problem,
    Solution,
    evaluate,
    forbidden_solution,
    make_solution,
    verify,
)
from planner.search.relax.bound import diffusion_of, raised
from planner.search.searches.brute import brute, combinations

NAME = "recursive_programming"
FEW = 20_000
"""Maximum number of combinations that are all tried if memory is limited."""
NARROW = 200_000
"""Maximum entries of a table of a level."""
CLOSED = 1e-9
"""Relative gap at which the bound meets the cost."""
PATIENCE, STALE = 4, 1e-3
"""Sweeps between two checks of the bound, and the share of the gap by which it must rise."""


def recursive_programming(
    problem: Problem, *, time_limit_s: float = 10.0, cap: int = NARROW, sweeps: int = 4
) -> Solution:
    """Solve a problem axis by axis.

    Args:
        problem: the problem; without ``levels`` it has one level.
        time_limit_s: seconds to stop after.
        cap: maximum entries of a table of a level.
        sweeps: diffusion sweeps for the lower bound.

    Returns:
        The solution, with the lower bound of `bound.raised`.

    Raises:
        ValueError: if the problem is malformed.
    """
    verify(problem)
    begun = time.monotonic()
    deadline = begun + time_limit_s
    if combinations(problem) <= FEW and not math.isinf(problem.limit_bytes):
        best = dataclasses.replace(brute(problem, time_limit_s=time_limit_s), search=NAME)
        return best if max(problem.counts or (1,)) == 1 else _lifted(problem, best, sweeps)
    folded = fold(problem)
    part = folded.problem
    choice = decide_levels(part, cap, deadline)
    whole = reduce_problem(part, keep_memory=True, dead_ends=False)
    if whole.dead is not None:
        return forbidden_solution(problem, whole.dead, NAME, begun)
    choice = whole.decode(polished(whole, choice, deadline))
    full = folded.unfold(choice)
    cost = evaluate(problem, full)[0]
    lower = raised(
        diffusion_of(part), sweeps, cost - CLOSED * abs(cost), patience=PATIENCE, stale=STALE
    )
    solution = make_solution(problem, full, lower, NAME, "", begun)
    if not solution.feasible and len(part.cost_s) < len(problem.cost_s):
        apart = reduce_problem(problem, keep_memory=True, dead_ends=False)
        full = apart.decode(polished(apart, full, deadline))
        solution = make_solution(problem, full, lower, NAME, "", begun)
    if solution.feasible:
        reason = "all axes decided, then polished over all strategies"
    elif math.isinf(solution.cost_s):
        reason = "local moves did not leave the forbidden costs"
    else:
        excess = solution.peak_bytes - problem.limit_bytes
        reason = (
            f"the lowest peak misses the memory limit of {problem.limit_bytes:.6g} bytes "
            f"by {excess:.6g}"
        )
    return make_solution(problem, full, lower, NAME, reason, begun)


def _lifted(problem: Problem, best: Solution, sweeps: int) -> Solution:
    """The best of all choices of a quotient, with a bound that also holds for the whole problem.

    Equal nodes of the whole problem may differ, so it may have a better choice than the quotient.
    """
    if math.isinf(best.cost_s):
        return best
    enough = best.cost_s - CLOSED * abs(best.cost_s) if best.feasible else math.inf
    lower = raised(diffusion_of(problem), sweeps, enough, patience=PATIENCE, stale=STALE)
    lower = min(lower, best.cost_s) if best.feasible else lower
    if best.feasible and lower >= enough:
        return best
    reason = f"{best.reason}, equal nodes alike"
    return dataclasses.replace(best, lower_bound_s=lower, reason=reason)
