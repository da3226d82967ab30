"""Block descent: fix a few nodes at their present values and solve all the others exactly.

A graph whose elimination is too wide becomes easy once some well-connected nodes are fixed.  Each
round picks them at random (heavy neighbourhoods first), eliminates the rest exactly, and keeps the
result when it is cheaper; under a memory limit the result is repaired first.  The cost never rises.

Complexity: per round, one plan and one elimination below the table cap.
Paper: Dechter, "Enhancement schemes for constraint processing: backjumping, learning, and cutset
decomposition", AI 41, 1990.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planner.search.elimination import make_script, run_script
from planner.search.memory import Timeline
from planner.search.moves import State
from planner.search.plan import make_plan
from planner.search.problem import Array
from planner.search.progress import time_is_up
from planner.search.reduction import Reduction
from planner.search.repair import pairs_are_cheap, polish, repair


def improve(
    reduction: Reduction,
    timeline: Timeline,
    choice: Sequence[int],
    deadline: float,
    *,
    cap: int = 50_000,
    rounds: int = 60,
    patience: int = 12,
    prices: Array | None = None,
    seed: int = 0,
) -> tuple[int, ...]:
    """Improve a choice of a reduced problem.

    Args:
        reduction: the reduced problem.
        timeline: its usages.
        choice: the start, feasible unless nothing feasible is known.
        deadline: monotonic time to stop at.
        cap: entries of the largest table in a round.
        rounds: most rounds.
        patience: rounds without gain before it stops.
        prices: flat extra cost per strategy that steers the rounds (memory prices).
        seed: of the random picks.

    Returns:
        The best choice found; never dearer than the start when the start is feasible.
    """
    problem, rng = reduction.problem, np.random.default_rng(seed)
    state = State(problem, timeline, choice)
    if repair(state, deadline):
        polish(state, deadline, pairs=pairs_are_cheap(problem))
    best, best_cost = state.choice.copy(), state.cost() if state.feasible() else math.inf
    unary = list(problem.cost_s)
    if prices is not None:
        parts = np.split(prices, timeline.offsets[1:-1])
        unary = [cost + part for cost, part in zip(unary, parts, strict=True)]
    inputs = [reduction.pool.intern(cost) for cost in unary] + list(reduction.pairs.values())
    sizes, idle = [cost.size for cost in unary], 0
    for _ in range(rounds):
        if idle >= patience or time_is_up(deadline):
            break
        plan = make_plan(sizes, list(reduction.pairs), cap, fix=True, rng=rng)
        script = make_script(plan, inputs, [int(s) for s in best])
        value, found = run_script(plan, script, reduction.pool.tables)
        idle += 1
        if not math.isfinite(value):
            continue
        state.reset(found)
        if repair(state, deadline):
            polish(state, deadline, pairs=False)
            if state.feasible() and state.cost() < best_cost - 1e-12 * abs(best_cost):
                best, best_cost, idle = state.choice.copy(), state.cost(), 0
        if plan.exact:
            break
    return tuple(int(s) for s in best)
