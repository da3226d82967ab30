"""Sequential min-sum diffusion (reparametrization) of one problem, or of many of one shape.

The costs are rewritten without changing the cost of any choice,

    c_i[s] + sum_e m_e,i[s]   and   E_ab[s, u] - m_e,a[s] - m_e,b[u],

and for any messages m, the sum of the node minima and edge minima is a lower bound.  A sweep visits
the nodes in order, forward and then backward.  At a node, every edge to an earlier node of the pass
first moves its row minima to the node; then the node moves an equal part of its costs to each edge
to a later node: 1 / max(edges to later nodes, edges to earlier nodes) each.  Neither move lowers
the bound.  The bound is exact on trees.

All arrays have a leading dimension [members]: problems with the same nodes, edges and strategies
but different costs take the same array operations.  One problem is one member.  An edge may depend
on its ends through *codes*, of which there are fewer than strategies: its table and messages are
then indexed by codes, and a node passes on the part that all strategies of a code have in common.

Complexity: O(members * entries of the tables) per sweep.
Papers: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 28,
2006; Werner, "A linear programming approach to max-sum problem: a review", PAMI 29, 2007.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from planner.search.problem import Array

Turn: TypeAlias = tuple[list[tuple[int, int]], list[tuple[int, int]], float]
"""A visit of a node: the ends of edges that it gathers from, those that it passes a part to, and
that part."""


class End:
    """One end of an edge: the code of every strategy of its node.

    Args:
        code: [strategies] codes, all of which occur; None: every strategy has a separate code.
    """

    def __init__(self, code: Array | None) -> None:
        self.code = code
        if code is not None:
            self._order = np.argsort(code, kind="stable")
            self._starts = np.searchsorted(code[self._order], np.arange(int(code.max()) + 1))

    def least(self, values: Array) -> Array:
        """[members, codes] the minimum over each code of values [members, strategies]."""
        if self.code is None:
            return values
        least: Array = np.minimum.reduceat(values[:, self._order], self._starts, axis=1)
        return least

    def of(self, strategies: Array) -> Array:
        """The codes of strategies."""
        return strategies if self.code is None else np.asarray(self.code[strategies])

    def spread(self, values: Array) -> Array:
        """[members, strategies] the value of each strategy's code."""
        return values if self.code is None else values[:, self.code]


class Diffusion:
    """Problems of one shape under reparametrization.

    After a sweep, the minimum of every edge's entries, per code of its first end, is zero up to
    rounding: that end was visited last and took it.

    Args:
        unary: per node, [members, strategies] finite costs; copied.
        ends: per edge, its two nodes.
        tables: per edge, [members, codes of the first end, codes of the second] finite costs.
        codes: per edge, the codes of its ends; None: strategies.

    Attributes:
        unary: per node, its current costs.
        tables: the tables as given.
        messages: per edge, the amounts moved out of its rows, [members, codes of the first end],
            and out of its columns.
    """

    def __init__(
        self,
        unary: Sequence[Array],
        ends: Sequence[tuple[int, int]],
        tables: Sequence[Array],
        codes: Sequence[tuple[Array | None, Array | None]],
    ) -> None:
        self.unary = [cost.copy() for cost in unary]
        self.ends, self.tables = list(ends), list(tables)
        self.sides = [(End(left), End(right)) for left, right in codes]
        self.messages = [
            (np.zeros(table.shape[:2]), np.zeros(table.shape[::2])) for table in self.tables
        ]
        self.near: list[list[tuple[int, int, int]]] = [[] for _ in self.unary]
        for k, (a, b) in enumerate(self.ends):
            self.near[a].append((k, 0, b))
            self.near[b].append((k, 1, a))
        self._forth = [_turn(node, near, ahead=True) for node, near in enumerate(self.near)]
        self._back = [_turn(node, near, ahead=False) for node, near in enumerate(self.near)]
        self._swept = False
        self._scratch = np.empty(max((table.size for table in self.tables), default=0))

    def keep(self, rows: Array) -> None:
        """Drop all members except ``rows``."""
        self.unary = [cost[rows] for cost in self.unary]
        self.tables = [table[rows] for table in self.tables]
        self.messages = [(left[rows], right[rows]) for left, right in self.messages]

    def rest(self, k: int) -> Array:
        """[members, codes, codes] the current costs of an edge."""
        left, right = self.messages[k]
        rest: Array = self.tables[k] - left[:, :, None] - right[:, None, :]
        return rest

    def bound(self) -> Array:
        """[members] the lower bounds: the sum of the node minima and edge minima."""
        total = np.zeros(len(self.unary[0]) if self.unary else 1)
        for cost in self.unary:
            total += cost.min(axis=1)
        if not self._swept:  # after a sweep the edge minima are zero
            for k in range(len(self.tables)):
                total += self.rest(k).min(axis=(1, 2))
        return total

    def sweep(self, times: int = 1) -> None:
        """Visit all nodes forward and backward, ``times`` times."""
        for _ in range(times):
            for node, turn in enumerate(self._forth):
                if not self._swept:  # after a sweep, the node has the minima of its later edges
                    turn = ([(k, side) for k, side, _ in self.near[node]], *turn[1:])
                self._visit(node, turn)
            for node in reversed(range(len(self.unary))):
                self._visit(node, self._back[node])
            self._swept = True

    def _visit(self, node: int, turn: Turn) -> None:
        """Gather the minima of edges, then pass parts on."""
        behind, onward, share = turn
        for k, side in behind:
            self._shift(k, side, node, self._least(k, side))
        if onward:
            cost = self.unary[node]
            parts = [self.sides[k][side].least(cost) * -share for k, side in onward]
            for (k, side), part in zip(onward, parts, strict=True):
                self._shift(k, side, node, part)

    def _least(self, k: int, side: int) -> Array:
        """[members, codes] the amount that an edge can move to its end: its row minima."""
        table, (left, right) = self.tables[k], self.messages[k]
        spare = self._scratch[: table.size].reshape(table.shape)
        if side == 0:
            np.subtract(table, right[:, None, :], out=spare)
            return np.asarray(spare.min(axis=2)) - left
        np.subtract(table, left[:, :, None], out=spare)
        return np.asarray(spare.min(axis=1)) - right

    def _shift(self, k: int, side: int, node: int, amount: Array) -> None:
        """Move ``amount`` from an edge to its end."""
        message = self.messages[k][side]
        message += amount
        self.unary[node] += self.sides[k][side].spread(amount)


def _turn(node: int, near: Sequence[tuple[int, int, int]], *, ahead: bool) -> Turn:
    """The visit of a node in the forward (``ahead``) or backward pass; ``near``: edge, side, other
    node."""
    onward = [(k, side) for k, side, other in near if (other > node) == ahead]
    behind = [(k, side) for k, side, other in near if (other > node) != ahead]
    return behind, onward, 1.0 / max(len(onward), len(behind), 1)
