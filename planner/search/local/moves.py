"""A choice under local moves, with up-to-date costs and memory for all moves.

For each node i and strategy s the state holds, in one flat array,

    d_i[s] = c_i[s] + sum over edges (i, j) of E_ij[s, x_j],

the part of the cost that depends on node i if it moved to s.  The state also holds the memory over
the non-dominated moments.  A move is allowed if, on each of the node's segments (runs of moments
with the same live usages), peak + bytes[s] - bytes[x_i] stays within the limit.

Complexity: O(degree^2 * S) per move of a node with S strategies; O(moments it lives) to test one.
Paper: Besag, "On the statistical analysis of dirty pictures", J. Royal Stat. Soc. B 48, 1986
(iterated conditional modes).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.search.local.memory import MemoryTimeline
from planner.search.problem import Array, Problem, fits, is_forbidden
from planner.search.progress import time_is_up


class MoveState:
    """A choice of a problem and its neighborhood.

    Args:
        problem: the problem; edges should be merged and few (a reduced problem).
        timeline: its compressed usages.
        choice: one strategy per node.
    """

    def __init__(self, problem: Problem, timeline: MemoryTimeline, choice: Sequence[int]) -> None:
        self.problem, self.timeline = problem, timeline
        self.limit = problem.limit_bytes
        self.offsets = timeline.offsets
        self.unary = [_clean(cost) for cost in problem.cost_s]
        self.near: list[list[tuple[int, Array]]] = [[] for _ in self.unary]
        cleaned: dict[int, Array] = {}
        self.tables: list[Array] = []
        self._least: dict[int, float] = {}
        for edge in problem.edges:
            key = id(edge.cost_s)
            table = cleaned[key] if key in cleaned else cleaned.setdefault(key, _clean(edge.cost_s))
            self.tables.append(table)
            self.near[edge.a].append((edge.b, table))
            self.near[edge.b].append((edge.a, table.T))
        self.segments = _segments(timeline, problem)
        self.reset(choice)

    def reset(self, choice: Sequence[int] | Array) -> None:
        """Start from another choice."""
        self.choice = np.array(choice, dtype=np.int64)
        self.profile = self.timeline.profile(self.choice)
        self.costs = np.concatenate([self.conditional(node) for node in range(len(self.unary))])

    def conditional(self, node: int, without: int = -1) -> Array:
        """d_i of a node, recomputed; edges to ``without`` are left out."""
        total = self.unary[node].copy()
        for other, table in self.near[node]:
            if other != without:
                total += table[:, self.choice[other]]
        return total

    def row(self, node: int) -> Array:
        """d_i of a node, from the flat array."""
        part: Array = self.costs[self.offsets[node] : self.offsets[node + 1]]
        return part

    def least(self, edge: int) -> float:
        """The smallest entry of an edge's table."""
        key = id(self.tables[edge])
        if key not in self._least:
            self._least[key] = float(self.tables[edge].min())
        return self._least[key]

    def move(self, node: int, strategy: int) -> None:
        """Move a node and update its neighbors' costs and the memory."""
        for low, high, taken in self.segments[node]:
            self.profile[low:high] += taken[strategy] - taken[self.choice[node]]
        self.choice[node] = strategy
        for other, _ in self.near[node]:
            self.row(other)[:] = self.conditional(other)

    def allowed(self, node: int) -> Array:
        """Mask of the strategies that a node can move to without exceeding the memory limit."""
        mask = np.ones(self.unary[node].size, dtype=bool)
        if np.isfinite(self.limit):
            now = self.choice[node]
            for low, high, taken in self.segments[node]:
                top = self.profile[low:high].max()
                mask &= top + (taken - taken[now]) <= self.limit * (1 + 1e-12)
        return mask

    def peak(self) -> float:
        """The memory peak."""
        return float(self.profile.max()) if self.profile.size else 0.0

    def feasible(self) -> bool:
        """Whether the memory is within the limit and nothing forbidden is used."""
        return fits(self.peak(), self.limit) and bool(np.isfinite(self.current()).all())

    def current(self) -> Array:
        """d_i[x_i] of every node."""
        now: Array = self.costs[self.offsets[:-1] + self.choice]
        return now

    def cost(self) -> float:
        """The cost of the choice."""
        now = self.current()
        if not np.isfinite(now).all():
            return float("inf")
        node_costs = np.array([c[s] for c, s in zip(self.unary, self.choice, strict=True)])
        return float(node_costs.sum() + (now - node_costs).sum() / 2.0)

    def tolerance(self) -> float:
        """Gains below this are rounding."""
        now = self.current()
        return 1e-13 * float(np.abs(now[np.isfinite(now)]).max(initial=0.0))


def descend(state: MoveState, deadline: float) -> bool:
    """Iterated conditional modes: move single nodes to their best allowed strategy until none
    gains.

    Args:
        state: the state; the result respects the memory limit only if the state does.
        deadline: monotonic time to stop at.

    Returns:
        Whether anything moved.
    """
    moved_ever = False
    while not time_is_up(deadline):
        least = np.minimum.reduceat(state.costs, state.offsets[:-1])
        tolerance = state.tolerance()
        now = state.current()
        moved = False
        gaining = least < np.where(np.isinf(now), 1e300, now - tolerance)
        for node in np.flatnonzero(gaining).tolist():
            row = np.where(state.allowed(node), state.row(node), np.inf)
            best = int(np.argmin(row))
            if row[best] < state.row(node)[state.choice[node]] - tolerance:
                state.move(node, best)
                moved = moved_ever = True
        if not moved:
            break
    return moved_ever


def descend_pairs(state: MoveState, deadline: float) -> bool:
    """Move the two ends of an edge together if that gains: one pass over the edges.

    Args:
        state: the state.
        deadline: monotonic time to stop at.

    Returns:
        Whether anything moved.
    """
    moved = False
    for number, (edge, table) in enumerate(zip(state.problem.edges, state.tables, strict=True)):
        if time_is_up(deadline):
            break
        left, right = state.conditional(edge.a, edge.b), state.conditional(edge.b, edge.a)
        old = int(state.choice[edge.a]), int(state.choice[edge.b])
        now = left[old[0]] + right[old[1]] + table[old]
        enough = now - 1e-12 * abs(now) if np.isfinite(now) else np.inf
        if not left.min() + right.min() + state.least(number) < enough:
            continue
        joint = (left[:, None] + right[None, :] + table).ravel()
        gains = np.flatnonzero(joint < enough)
        gains = gains[np.argsort(joint[gains], kind="stable")[:4]]
        for new in zip(*np.unravel_index(gains, table.shape), strict=True):
            state.move(edge.a, int(new[0]))
            state.move(edge.b, int(new[1]))
            if fits(state.peak(), state.limit):
                moved = True
                break
            state.move(edge.a, old[0])
            state.move(edge.b, old[1])
    return moved


def pair_costs(state: MoveState, number: int) -> Array:
    """[S_a, S_b] the part of the cost that depends on the two nodes of an edge, which must be the
    only edge between them."""
    edge = state.problem.edges[number]
    left, right = state.conditional(edge.a, edge.b), state.conditional(edge.b, edge.a)
    joint: Array = left[:, None] + right[None, :] + state.tables[number]
    return joint


def _clean(table: Array) -> Array:
    """A float table with infinity for forbidden entries."""
    mask = is_forbidden(table)
    values: Array = np.where(mask, np.inf, table) if mask.any() else np.asarray(table, np.float64)
    return values


def _segments(timeline: MemoryTimeline, problem: Problem) -> list[list[tuple[int, int, Array]]]:
    """Per node, runs (low, high, bytes per strategy) of moments with the same live usages."""
    usages: list[list[tuple[int, int, Array]]] = [[] for _ in problem.cost_s]
    for k, node in enumerate(timeline.node):
        low, high = int(timeline.low[k]), int(timeline.high[k])
        begin = int(timeline.flat_at[k])
        taken = timeline.flat_bytes[begin : begin + int(timeline.lengths[k])]
        if low < high:
            usages[node].append((low, high, taken))
    return [_disjoint(parts) if len(parts) > 1 else parts for parts in usages]


def _disjoint(parts: list[tuple[int, int, Array]]) -> list[tuple[int, int, Array]]:
    """Cut overlapping intervals into disjoint ones and add their bytes."""
    cuts = sorted({at for low, high, _ in parts for at in (low, high)})
    place = {at: k for k, at in enumerate(cuts)}
    change = np.zeros((len(cuts), parts[0][2].size))
    live = np.zeros(len(cuts), np.int64)
    for low, high, taken in parts:
        change[place[low]] += taken
        change[place[high]] -= taken
        live[place[low]] += 1
        live[place[high]] -= 1
    totals, count = np.cumsum(change, axis=0), np.cumsum(live)
    return [(low, high, totals[k]) for k, (low, high) in enumerate(pairwise(cuts)) if count[k] > 0]
