"""Many problems of one shape at once: a lower bound and a choice for each, by message passing.

The problems of a family have the same nodes, edges and strategies, but different costs: one train
step on many meshes. All arrays have a leading dimension [members]. So every step of the algorithm
is one array operation for all members, and the overhead of Python does not grow with their number.

An edge's cost depends on its ends only through *codes*, of which there are fewer than strategies
(all strategies with the same sharding of the value that flows share a code). Tables are
[members, codes of a, codes of b], and messages are also indexed by codes.

* Bound: min-sum diffusion (`diffusion`), all members at once.
* Choice: nodes take, in order, the best strategy given those already taken and the messages, then
  single nodes move while that lowers the cost.

The price of forbidden strategies is above the cost of some allowed choice, so the bound remains a
bound of the best allowed choice.

Complexity: O(members * entries of the tables) per sweep.
Papers: Kolmogorov, PAMI 28, 2006 (the order of messages, and choices from them); Werner, PAMI 29,
2007 (diffusion); Besag, "On the statistical analysis of dirty pictures", 1986 (the moves).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.search.problem import Array
from planner.search.relax.diffusion import Diffusion

MOVES = 6
"""Maximum number of passes of single-node moves."""
LOOK = 6
"""Sweeps between two choices."""
CLOSED = 1e-7
"""Relative gap at which a member needs no more sweeps."""
KEPT = 0.7
"""Share of open members below which the tables of the other members are dropped."""


@dataclass(frozen=True, eq=False)
class FamilyEdge:
    """``cost_s[m, code_a[s], code_b[u]]`` for strategies s of a and u of b; all codes occur."""

    a: int
    b: int
    code_a: Array
    code_b: Array
    cost_s: Array


@dataclass(frozen=True, eq=False)
class Family:
    """Problems of one shape. ``unary[i]``: [members, strategies] seconds, infinite if a member
    lacks the strategy. Edges are finite, no cost is negative, and every node has a strategy."""

    unary: tuple[Array, ...]
    edges: tuple[FamilyEdge, ...]

    @property
    def members(self) -> int:
        """The number of problems."""
        return int(self.unary[0].shape[0]) if self.unary else 0


@dataclass(frozen=True, eq=False)
class Relaxed:
    """Per member: a lower bound, a choice and its cost (infinite: forbidden). ``choice`` is
    [members, nodes]."""

    bound_s: Array
    choice: Array
    cost_s: Array


def node_bound(family: Family) -> Array:
    """[members] the sum of the minima of the node costs: a bound without any communication."""
    total: Array = sum((cost.min(axis=1) for cost in family.unary), np.zeros(family.members))
    return total


def relax(family: Family, sweeps: int, enough_s: float = np.inf) -> Relaxed:
    """Bound every member and compute a choice for it.

    Args:
        family: the problems.
        sweeps: number of forward and backward passes over the nodes, at least one.
        enough_s: bound at which a member is excluded; it may get no choice.
    """
    state = _State(family)
    count = family.members
    lower, cost = np.full(count, -np.inf), np.full(count, np.inf)
    choice = np.zeros((count, len(family.unary)), np.int64)
    here = np.arange(count)  # the members that the state still holds
    for k in range(max(sweeps, 1)):
        state.sweep()
        lower[here] = np.maximum(lower[here], state.bound())
        open_ = lower[here] < enough_s
        if open_.mean() < KEPT:
            state.keep(np.flatnonzero(open_))
            here = here[open_]
        if not here.size:
            break
        if k + 1 == sweeps or (k + 1) % LOOK == 0:
            choices, value = state.moved(state.decoded())
            better = value < cost[here]
            choice[here[better]], cost[here[better]] = choices[better], value[better]
            if (cost[here] - lower[here] <= CLOSED * cost[here]).all():
                break
    cost = np.where(cost < _State.walls(family), cost, np.inf)
    return Relaxed(np.minimum(lower, cost), choice, cost)


class _State(Diffusion):
    """The diffusion of a family, and the choices that its messages lead to."""

    def __init__(self, family: Family) -> None:
        wall = self.walls(family)[:, None]
        self.own = [np.where(np.isfinite(cost), cost, wall) for cost in family.unary]
        super().__init__(
            self.own,
            [(edge.a, edge.b) for edge in family.edges],
            [edge.cost_s for edge in family.edges],
            [(edge.code_a, edge.code_b) for edge in family.edges],
        )

    @staticmethod
    def walls(family: Family) -> Array:
        """[members] the price of forbidden strategies: above the cost of an allowed choice."""
        rows = np.arange(family.members)
        some = [cost.argmin(axis=1) for cost in family.unary]
        total = np.zeros(family.members)
        for cost, chosen in zip(family.unary, some, strict=True):
            total += cost[rows, chosen]
        for edge in family.edges:
            total += edge.cost_s[rows, edge.code_a[some[edge.a]], edge.code_b[some[edge.b]]]
        walls: Array = 1e-9 + 2.0 * total
        return walls

    def keep(self, rows: Array) -> None:
        """Drop all members except ``rows``."""
        self.own = [cost[rows] for cost in self.own]
        super().keep(rows)

    def decoded(self) -> Array:
        """[members, nodes] a choice, node by node, under the messages after a sweep."""
        choice = np.zeros((len(self.unary[0]), len(self.unary)), np.int64)
        for node in range(len(self.unary)):
            cost = self.unary[node]
            for k, side, other in self.near[node]:
                if other < node:
                    left = self._given(k, side, choice[:, other], plain=False)
                    cost = cost + self.sides[k][side].spread(left)
            choice[:, node] = cost.argmin(axis=1)
        return choice

    def _given(self, k: int, side: int, chosen: Array, *, plain: bool) -> Array:
        """[members, codes] an edge's costs given the choice at its other end: the original costs
        (``plain``) or the costs after the messages."""
        code, rows = self.sides[k][1 - side].of(chosen), np.arange(len(chosen))
        table = self.tables[k]
        picked: Array = table[rows, :, code] if side == 0 else table[rows, code]
        if plain:
            return picked
        return picked - self.messages[k][side] - self.messages[k][1 - side][rows, code][:, None]

    def moved(self, choice: Array) -> tuple[Array, Array]:
        """The choices after single-node moves that lower the cost, and their costs."""
        rows = np.arange(len(choice))
        for _ in range(MOVES):
            before = choice.copy()
            for node in range(len(self.unary)):
                cost = self.own[node]
                for k, side, other in self.near[node]:
                    given = self._given(k, side, choice[:, other], plain=True)
                    cost = cost + self.sides[k][side].spread(given)
                best = cost.argmin(axis=1)
                gain = cost[rows, best] < cost[rows, choice[:, node]]
                choice[:, node] = np.where(gain, best, choice[:, node])
            if (choice == before).all():
                break
        return choice, self.cost_of(choice)

    def cost_of(self, choice: Array) -> Array:
        """[members] costs of choices."""
        rows = np.arange(len(choice))
        total = np.zeros(len(choice))
        for node in range(len(self.unary)):
            total += self.own[node][rows, choice[:, node]]
            for k, side, other in self.near[node]:
                if side == 0:
                    given = self._given(k, 0, choice[:, other], plain=True)
                    total += given[rows, self.sides[k][0].of(choice[:, node])]
        return total
