"""Compiled sequential min-sum diffusion: the bound of `diffusion`, for large problems.

Messages persist between calls, so a bound under slightly changed node costs takes few sweeps.

Complexity: O(table entries) per sweep.
Papers: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 28,
2006; Werner, "A linear programming approach to max-sum problem: a review", PAMI 29, 2007.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from planner.search.problem import Array
from planner.search.relax.compiled import compiled
from planner.search.relax.flat import FlatProblem


@compiled
def _gather(
    a_side: bool,
    size: int,
    other: int,
    table: Array,
    at: int,
    side: Array,
    other_side: Array,
    unary: Array,
    low: int,
) -> None:
    """Move the row minima of an edge into the node costs ``unary[low:low + size]``."""
    for s in range(size):
        least = np.inf
        if a_side:
            begin = at + s * other
            for u in range(other):
                value = table[begin + u] - other_side[u]
                if value < least:
                    least = value
        else:
            for u in range(other):
                value = table[at + u * size + s] - other_side[u]
                if value < least:
                    least = value
        least -= side[s]
        if least < np.inf:
            side[s] += least
            unary[low + s] += least


@compiled
def sweep(
    at: Array,
    ends: Array,
    table_at: Array,
    table: Array,
    near_at: Array,
    near: Array,
    left_at: Array,
    left: Array,
    right_at: Array,
    right: Array,
    unary: Array,
    times: int,
) -> None:
    """Visit all nodes forward and backward ``times`` times.

    Args:
        at: [n + 1] where each node's strategies begin in ``unary``.
        ends: [m, 2] nodes of each edge.
        table_at, table: where each edge's row-major table begins, and all tables.
        near_at, near: [n + 1], [2 m] the edges of each node.
        left_at, left, right_at, right: the amounts taken out of the rows and columns of each edge.
        unary: the node costs under the messages, changed in place.
        times: number of forward and backward passes.
    """
    n = at.size - 1
    for turn in range(2 * times):
        for k in range(n):
            v = k if turn % 2 == 0 else n - 1 - k
            low, size = at[v], at[v + 1] - at[v]
            onward, backward = 0, 0
            for i in range(near_at[v], near_at[v + 1]):
                e = near[i]
                first = ends[e, 0] == v
                other = ends[e, 1] if first else ends[e, 0]
                count = at[other + 1] - at[other]
                side = left[left_at[e] : left_at[e] + size]
                other_side = right[right_at[e] : right_at[e] + count]
                if not first:
                    side = right[right_at[e] : right_at[e] + size]
                    other_side = left[left_at[e] : left_at[e] + count]
                _gather(first, size, count, table, table_at[e], side, other_side, unary, low)
                if other > v:
                    onward += 1
                else:
                    backward += 1
            if onward + backward == 0:
                continue
            share = 1.0 / max(onward, backward)
            ahead = turn % 2 == 0
            part = unary[low : low + size] * share
            for i in range(near_at[v], near_at[v + 1]):
                e = near[i]
                first = ends[e, 0] == v
                other = ends[e, 1] if first else ends[e, 0]
                if (other > v) != ahead:
                    continue
                for s in range(size):
                    if part[s] < np.inf:
                        if first:
                            left[left_at[e] + s] -= part[s]
                        else:
                            right[right_at[e] + s] -= part[s]
                        unary[low + s] -= part[s]


@compiled
def slack(
    at: Array,
    ends: Array,
    table_at: Array,
    table: Array,
    left_at: Array,
    left: Array,
    right_at: Array,
    right: Array,
    unary: Array,
    extra: Array,
) -> float:
    """The bound, and per strategy the least excess over the bound of the choices that contain it.

    Returns:
        The sum of node minima and edge minima; ``extra`` is filled.
    """
    n = at.size - 1
    total = 0.0
    for v in range(n):
        least = unary[at[v] : at[v + 1]].min()
        total += least
        for s in range(at[v], at[v + 1]):
            extra[s] = unary[s] - least
    for e in range(ends.shape[0]):
        a, b = ends[e, 0], ends[e, 1]
        rows, columns = at[a + 1] - at[a], at[b + 1] - at[b]
        least = np.inf
        row = np.full(rows, np.inf)
        column = np.full(columns, np.inf)
        for s in range(rows):
            for u in range(columns):
                value = (
                    table[table_at[e] + s * columns + u]
                    - left[left_at[e] + s]
                    - right[right_at[e] + u]
                )
                if value < row[s]:
                    row[s] = value
                if value < column[u]:
                    column[u] = value
            if row[s] < least:
                least = row[s]
        total += least
        for s in range(rows):
            extra[at[a] + s] += row[s] - least
        for u in range(columns):
            extra[at[b] + u] += column[u] - least
    return total


@compiled
def read_choice(
    at: Array,
    ends: Array,
    table_at: Array,
    table: Array,
    near_at: Array,
    near: Array,
    left_at: Array,
    left: Array,
    right_at: Array,
    right: Array,
    unary: Array,
    choice: Array,
) -> None:
    """Read a choice from the messages: each node in order takes its best, given those before it."""
    n = at.size - 1
    for v in range(n):
        size = at[v + 1] - at[v]
        score = unary[at[v] : at[v + 1]].copy()
        for i in range(near_at[v], near_at[v + 1]):
            e = near[i]
            first = ends[e, 0] == v
            other = ends[e, 1] if first else ends[e, 0]
            count = at[other + 1] - at[other]
            side = left[left_at[e] : left_at[e] + size]
            other_side = right[right_at[e] : right_at[e] + count]
            if not first:
                side = right[right_at[e] : right_at[e] + size]
                other_side = left[left_at[e] : left_at[e] + count]
            low, high = 0, count
            if other < v:
                low = choice[other]
                high = low + 1
            for s in range(size):
                least = np.inf
                for u in range(low, high):
                    value = table[table_at[e] + (s * count + u if first else u * size + s)]
                    if value - other_side[u] < least:
                        least = value - other_side[u]
                score[s] += least - side[s]
        choice[v] = np.argmin(score)


class Messages:
    """The messages of a flat problem, which persist between calls.

    Args:
        flat: the problem.

    Attributes:
        extra: per strategy, the least excess over the bound of the choices that contain it; set by
            `bound`.
    """

    def __init__(self, flat: FlatProblem) -> None:
        self.flat = flat
        sizes = flat.sizes
        rows, columns = sizes[flat.ends[:, 0]], sizes[flat.ends[:, 1]]
        self._left_at = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._right_at = np.concatenate([[0], np.cumsum(columns)]).astype(np.int64)
        self._left = np.zeros(int(self._left_at[-1]))
        self._right = np.zeros(int(self._right_at[-1]))
        self._unary = flat.unary.copy()
        self._prices = np.zeros(flat.unary.size)
        self.extra = np.zeros(flat.unary.size)

    def _edges(self) -> tuple[Any, ...]:
        """Tables of the edges, then the messages."""
        flat = self.flat
        return (flat.at, flat.ends, flat.table_at, flat.table)

    def _sides(self) -> tuple[Any, ...]:
        return (self._left_at, self._left, self._right_at, self._right)

    def price(self, prices: Array) -> None:
        """Change the extra cost of every strategy."""
        self._unary += prices - self._prices
        self._prices = prices.copy()

    def sweep(self, times: int, over: Callable[[], bool] = lambda: False) -> None:
        """Visit all nodes forward and backward ``times`` times, or until ``over`` is true."""
        near = (self.flat.near_at, self.flat.near)
        arguments: tuple[Any, ...] = (*self._edges(), *near, *self._sides(), self._unary, 1)
        for _ in range(times):
            sweep(*arguments)
            if over():
                break

    def bound(self) -> float:
        """The bound of costs plus prices; fills ``extra``."""
        arguments: tuple[Any, ...] = (*self._edges(), *self._sides(), self._unary, self.extra)
        total = slack(*arguments)
        return float(total) + self.flat.constant_s

    def decode(self) -> Array:
        """A choice from the messages."""
        choice = np.zeros(self.flat.nodes, np.int64)
        near = (self.flat.near_at, self.flat.near)
        arguments: tuple[Any, ...] = (*self._edges(), *near, *self._sides(), self._unary, choice)
        read_choice(*arguments)
        return choice
