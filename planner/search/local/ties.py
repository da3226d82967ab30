"""Prefers the choice with less memory at equal cost: a final descent for every search.

A search stops if nothing is cheaper (or if its bound proves so within a tolerance), so it does not
distinguish choices of equal cost. Here single nodes, then pairs of neighbors move if that lowers
the cost, or, at equal cost, the bytes without raising the memory peak. Single nodes also move if
that lowers the peak at equal cost. Equal means within the rounding of the sums, so bounds and
proofs of the choice also hold for the result.

If an exact elimination is easy, a second descent starts from the optimum of the costs plus a small
price on memory. Of two results of equal cost, the one with the lower peak is taken.

Complexity: O(all strategies) per pass over nodes, O(all table entries) per pass over edges.
Paper: Besag, "On the statistical analysis of dirty pictures", J. Royal Stat. Soc. B 48, 1986
(the descent); Ehrgott, "Multicriteria Optimization", 2005 (lexicographic order).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from planner.search.exact.reduction import reduce_problem
from planner.search.exact.solver import Eliminator, choose_route
from planner.search.local.memory import MemoryTimeline
from planner.search.local.moves import MoveState, pair_costs
from planner.search.local.repair import live_bytes
from planner.search.problem import Array, Problem, fits

ROUNDS = 20
"""Maximum number of passes over nodes and edges."""
LARGEST = 1_000_000
"""Maximum entries of an edge's table for its ends to move together."""
TRIES = 8
"""Maximum number of moves of a pair that are checked for memory."""
BYTE = 0.5
"""Savings below this are rounding."""
EQUAL = 1e-12
"""Relative difference of two costs that is rounding."""
EASY = 1e7
"""Joined entries up to which the elimination is tried."""
PRICE = 1e-6
"""Price of all bytes in the elimination, relative to the cost of the choice."""


def less_memory(problem: Problem, choice: Sequence[int], nbytes: Sequence[Array]) -> Array:
    """A choice that costs no more and, at equal cost, takes no more memory.

    Args:
        problem: the problem.
        choice: a feasible choice.
        nbytes: per node, bytes per strategy that count in addition to the usages' average (those
            of arrays that are stored between steps).

    Returns:
        [nodes] the choice after the descent.
    """
    line = MemoryTimeline(problem)
    weight = np.concatenate([np.zeros(0), *nbytes])
    if line.moments.size:
        weight = weight + line.prices(np.full(line.moments.size, 1.0 / line.moments.size))
    state = MoveState(problem, line, choice)
    if not state.feasible():
        return state.choice
    _descend(state, weight)
    start = _eliminated(problem, weight, state)
    if start is None:
        return state.choice
    other = MoveState(problem, line, start)
    if not other.feasible():
        return state.choice
    _descend(other, weight)
    return min((state, other), key=lambda s: _rank(s, weight, state)).choice


def _descend(state: MoveState, weight: Array) -> None:
    """Move nodes and pairs until no move gains."""
    for _ in range(ROUNDS):
        moved = _singles(state, weight)
        if not (_pairs(state, weight) or moved):
            break


def _rank(state: MoveState, weight: Array, base: MoveState) -> tuple[float, float, float]:
    """Extra cost and peak over ``base``, zero if within rounding; and the bytes."""
    cost, peak = base.cost(), base.peak()
    extra, more = state.cost() - cost, state.peak() - peak
    return (
        extra if abs(extra) > EQUAL * abs(cost) else 0.0,
        more if abs(more) > BYTE else 0.0,
        float(weight[state.offsets[:-1] + state.choice].sum()),
    )


def _eliminated(problem: Problem, weight: Array, state: MoveState) -> tuple[int, ...] | None:
    """The optimum with a price on memory instead of the limit; None if that is not easy."""
    price = PRICE * state.cost() / max(float(weight[state.offsets[:-1] + state.choice].sum()), BYTE)
    parts = np.split(price * weight, state.offsets[1:-1])
    costs = tuple(cost + part for cost, part in zip(problem.cost_s, parts, strict=True))
    priced = dataclasses.replace(problem, cost_s=costs)
    reduction = reduce_problem(priced, keep_memory=False)
    if reduction.dead is not None:
        return None
    route = choose_route(reduction, work=EASY)
    if not route.plan.exact or route.work > EASY:
        return None
    return reduction.decode(Eliminator(reduction, work=EASY).solve()[1])


def _singles(state: MoveState, weight: Array) -> bool:
    """Move single nodes until none gains; whether anything moved."""
    starts, sizes = state.offsets[:-1], np.diff(state.offsets)
    moved_ever = False
    for _ in range(ROUNDS):
        at, tolerance = starts + state.choice, state.tolerance()
        extra = state.costs - np.repeat(state.costs[at], sizes)
        more = weight - np.repeat(weight[at], sizes)
        at_peak = live_bytes(state, int(np.argmax(state.profile))) if state.profile.size else more
        good = (extra < -tolerance) | ((extra <= tolerance) & (more < -BYTE))
        good |= (extra <= tolerance) & (at_peak < np.repeat(at_peak[at], sizes) - BYTE)
        moved = False
        for node in np.unique(np.searchsorted(starts, np.flatnonzero(good), side="right") - 1):
            moved = _move(state, weight, int(node)) or moved
        if not moved:
            break
        moved_ever = True
    return moved_ever


def _move(state: MoveState, weight: Array, node: int) -> bool:
    """Make the best move of a node if one gains; whether it moved."""
    now, tolerance = int(state.choice[node]), state.tolerance()
    row = state.row(node)
    extra = row - row[now]
    more = weight[state.offsets[node] : state.offsets[node + 1]]
    more = more - more[now]
    cheaper = (extra < -tolerance) & state.allowed(node)
    if cheaper.any():
        state.move(node, int(np.argmin(np.where(cheaper, extra, np.inf))))
        return True
    peak = state.peak()
    best = (peak, -BYTE, now)
    for strategy in np.flatnonzero(abs(extra) <= tolerance).tolist():
        after = _peak_after(state, node, strategy)
        after = peak if abs(after - peak) < BYTE else after
        best = min(best, (after, float(more[strategy]), strategy))
    if best[2] == now:
        return False
    state.move(node, best[2])
    return True


def _peak_after(state: MoveState, node: int, strategy: int) -> float:
    """The memory peak after a move."""
    now, profile = state.choice[node], state.profile.copy()
    for low, high, taken in state.segments[node]:
        profile[low:high] += taken[strategy] - taken[now]
    return float(profile.max(initial=0.0))


def _pairs(state: MoveState, weight: Array) -> bool:
    """Move the ends of each edge together if that gains; whether anything moved."""
    moved = False
    for number, edge in enumerate(state.problem.edges):
        if edge.cost_s.size > LARGEST:
            continue
        a, b = edge.a, edge.b
        here = int(state.choice[a]), int(state.choice[b])
        joint, tolerance = pair_costs(state, number), state.tolerance()
        if not math.isfinite(joint[here]):
            continue
        extra = joint - joint[here]
        left, right = (weight[state.offsets[n] : state.offsets[n + 1]] for n in (a, b))
        more = (left - left[here[0]])[:, None] + (right - right[here[1]])[None, :]
        good = (extra < -tolerance) | ((extra <= tolerance) & (more < -BYTE))
        if not good.any():
            continue
        rank = np.where(extra < -tolerance, extra, 0.0)[good]
        order = np.lexsort((more[good], rank))[:TRIES]
        for s, u in np.argwhere(good)[order].tolist():
            top = state.peak()
            limit = state.limit if extra[s, u] < -tolerance else top
            state.move(a, s)
            state.move(b, u)
            if fits(state.peak(), limit):
                moved = True
                break
            state.move(b, here[1])
            state.move(a, here[0])
    return moved
