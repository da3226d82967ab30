"""Brings a choice under the memory limit with greedy moves, then improves it there.

At the moment of the peak, every move of a live node that frees memory there is priced at

    (extra cost) / min(bytes saved, bytes in excess),

and the cheapest is taken, provided no other moment rises above the old peak.  If no single move is
left, pairs of neighboring nodes are tried.  Once the choice is feasible, single and pair moves that
stay feasible lower the cost (`moves`).

Complexity: O(all strategies) per move for the pricing, vectorized.
Paper: the greedy ratio rule of Dantzig, "Discrete-variable extremum problems", Operations Research
5, 1957, on the multiple-choice knapsack of the peak moment.
"""

from __future__ import annotations

import numpy as np

from planner.search.local.moves import MoveState, descend, descend_pairs, pair_costs
from planner.search.problem import Array, Problem, fits
from planner.search.progress import time_is_up

_PAIRS = 400
"""Maximum number of edges tried per pair move."""


def repair(state: MoveState, deadline: float, target: float | None = None) -> bool:
    """Make moves until the peak is within the limit.

    Args:
        state: the state, changed in place.
        deadline: monotonic time to stop at.
        target: peak to reach; None: the state's limit.

    Returns:
        Whether the peak is within the target.
    """
    goal = state.limit if target is None else target
    while not fits(state.peak(), goal):
        if time_is_up(deadline):
            return False
        if not _single(state, goal) and not _pair(state, goal, deadline):
            return False
    return True


def polish(state: MoveState, deadline: float, *, pairs: bool = True) -> None:
    """Lower the cost with moves that keep the memory within the limit.

    Args:
        state: a feasible state, changed in place.
        deadline: monotonic time to stop at.
        pairs: whether to try pairs of neighbors after single nodes.
    """
    descend(state, deadline)
    for _ in range(20):
        if not pairs or time_is_up(deadline) or not descend_pairs(state, deadline):
            return
        descend(state, deadline)


def pairs_are_cheap(problem: Problem) -> bool:
    """Whether one pass over all pairs of neighbors takes well below a second."""
    return len(problem.edges) <= 3000 and sum(e.cost_s.size for e in problem.edges) <= 3_000_000


def live_bytes(state: MoveState, moment: int) -> Array:
    """Flat bytes of every strategy of every node at a moment."""
    line = state.timeline
    live = (line.low <= moment) & (moment < line.high)
    weights = np.repeat(live, line.lengths) * line.flat_bytes
    return np.bincount(line.flat_home, weights, int(line.offsets[-1]))


def _single(state: MoveState, goal: float) -> bool:
    """Make the cheapest single move that lowers the peak; False if there is none."""
    moment = int(np.argmax(state.profile))
    top = state.peak()
    taken = live_bytes(state, moment)
    at = state.offsets[:-1] + state.choice
    sizes = np.diff(state.offsets)
    saved = np.repeat(taken[at], sizes) - taken
    now = np.repeat(np.where(np.isinf(state.costs[at]), 0.0, state.costs[at]), sizes)
    extra = state.costs - now
    useful = np.flatnonzero((saved > 1e-12 * top) & np.isfinite(extra))
    gain = np.minimum(saved[useful], top - goal)
    order = np.lexsort(
        (-saved[useful], np.where(extra[useful] > 0, extra[useful] / gain, extra[useful]))
    )
    for candidate in useful[order]:
        node = int(np.searchsorted(state.offsets, candidate, side="right")) - 1
        strategy = int(candidate - state.offsets[node])
        if _stays_below(state, node, strategy, top):
            state.move(node, strategy)
            return True
    return False


def _stays_below(state: MoveState, node: int, strategy: int, top: float) -> bool:
    """Whether all moments at which a move adds memory stay below ``top``."""
    now = int(state.choice[node])
    for low, high, taken in state.segments[node]:
        change = float(taken[strategy] - taken[now])
        if change > 0 and float(state.profile[low:high].max()) + change >= top:
            return False
    return True


def _pair(state: MoveState, goal: float, deadline: float) -> bool:
    """Make the cheapest move of two neighbors that lowers the peak; False if there is none."""
    moment, top = int(np.argmax(state.profile)), state.peak()
    taken = live_bytes(state, moment)
    best: tuple[float, int, int, int, int] | None = None
    tried = 0
    for number, edge in enumerate(state.problem.edges):
        a, b = edge.a, edge.b
        left = taken[state.offsets[a] : state.offsets[a + 1]]
        right = taken[state.offsets[b] : state.offsets[b + 1]]
        saved = (left[state.choice[a]] - left)[:, None] + (right[state.choice[b]] - right)[None, :]
        if saved.max() <= 1e-12 * top:
            continue
        tried += 1
        if tried > _PAIRS or time_is_up(deadline):
            break
        joint = pair_costs(state, number)
        now = joint[state.choice[a], state.choice[b]]
        extra = joint - (now if np.isfinite(now) else 0.0)
        good = (saved > 1e-12 * top) & np.isfinite(extra)
        rate = extra[good] / np.minimum(saved[good], max(top - goal, 1e-300))
        cheaper = np.flatnonzero(rate < (best[0] if best else np.inf))
        cheaper = cheaper[np.argsort(rate[cheaper], kind="stable")[:8]]
        places = np.argwhere(good)
        for candidate in cheaper:
            s, u = (int(x) for x in places[candidate])
            price = float(rate[candidate])
            if _pair_lowers(state, a, s, b, u, top):
                best = (price, a, s, b, u)
                break
    if best is None:
        return False
    state.move(best[1], best[2])
    state.move(best[3], best[4])
    return True


def _pair_lowers(state: MoveState, a: int, s: int, b: int, u: int, top: float) -> bool:
    """Whether all moments at which moving two nodes adds memory stay below ``top``."""
    profile = state.profile.copy()
    for node, strategy in ((a, s), (b, u)):
        for low, high, taken in state.segments[node]:
            profile[low:high] += taken[strategy] - taken[state.choice[node]]
    grown = profile > state.profile
    return not grown.any() or float(profile[grown].max()) < top
