"""A cheap lower bound: sequential min-sum diffusion (reparametrisation).

The costs are rewritten without changing the cost of any choice,

    c_i[s] + sum_e m_e,i[s]   and   E_ab[s, u] - m_e,a[s] - m_e,b[u],

and whatever the messages m are, the sum of the node minima and edge minima is a lower bound.  Nodes
are visited in order, forth and back.  At a node every incident edge first gives its row minima to
the node; then the node hands an equal part of its costs to each edge that leads onwards,
1 / max(edges onwards, edges backwards) each.  Both moves leave the bound as it is or raise it.  It
is exact on trees.

Complexity: O(edges * S^2) per sweep for S strategies.
Papers: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 28,
2006; Werner, "A linear programming approach to max-sum problem: a review", PAMI 29, 2007.
"""

from __future__ import annotations

import math

import numpy as np

from planner.search.exact.reduction import reduce_problem
from planner.search.problem import Array, Problem, is_forbidden

PATIENCE = 6
"""Sweeps between two looks at the bound."""
STALE = 0.03
"""Share of the way that is left; when so many sweeps rise by less, they stop."""


class Diffusion:
    """A problem under reparametrisation.

    Attributes:
        unary: per node, its present costs.
        left, right: per edge, what was taken out of its rows and columns.
    """

    def __init__(self, problem: Problem) -> None:
        ceiling = _ceiling(problem)
        self.unary = [_finite(cost, ceiling).copy() for cost in problem.cost_s]
        cleaned: dict[int, Array] = {}
        self.tables: list[Array] = []
        for edge in problem.edges:
            if id(edge.cost_s) not in cleaned:
                cleaned[id(edge.cost_s)] = _finite(edge.cost_s, ceiling)
            self.tables.append(cleaned[id(edge.cost_s)])
        self.ends = [(edge.a, edge.b) for edge in problem.edges]
        self.left = [np.zeros(table.shape[0]) for table in self.tables]
        self.right = [np.zeros(table.shape[1]) for table in self.tables]
        self.before: list[list[int]] = [[] for _ in self.unary]
        self.after: list[list[int]] = [[] for _ in self.unary]
        for edge_index, (a, b) in enumerate(self.ends):
            self.after[min(a, b)].append(edge_index)
            self.before[max(a, b)].append(edge_index)

    def bound(self) -> float:
        """Sum of the node minima and edge minima."""
        total = sum(float(cost.min()) for cost in self.unary)
        for table, left, right in zip(self.tables, self.left, self.right, strict=True):
            total += float((table - left[:, None] - right).min())
        return total

    def sweep(self, times: int) -> None:
        """Visit all nodes forth and back ``times`` times."""
        order = range(len(self.unary))
        for _ in range(times):
            for node in order:
                self._visit(node, self.before[node], self.after[node])
            for node in reversed(order):
                self._visit(node, self.after[node], self.before[node])

    def _visit(self, node: int, behind: list[int], onward: list[int]) -> None:
        """Gather the minima of the node's edges, then hand parts on."""
        cost = self.unary[node]
        for edge in behind:
            self._shift(edge, node, cost, self._row_minima(edge, node))
        for edge in onward:
            self._shift(edge, node, cost, self._row_minima(edge, node))
        if onward:
            part = cost * (-1.0 / max(len(onward), len(behind)))
            for edge in onward:
                self._shift(edge, node, cost, part)

    def _row_minima(self, edge: int, node: int) -> Array:
        """Per strategy of the node, the least present cost of the edge."""
        table, left, right = self.tables[edge], self.left[edge], self.right[edge]
        least: Array
        if self.ends[edge][0] == node:
            least = (table - right).min(axis=1) - left
        else:
            least = (table - left[:, None]).min(axis=0) - right
        return least

    def _shift(self, edge: int, node: int, cost: Array, amount: Array) -> None:
        """Move ``amount`` from the edge to the node."""
        side = self.left if self.ends[edge][0] == node else self.right
        side[edge] += amount
        cost += amount


def lower_bound(problem: Problem, *, sweeps: int = 6, enough: float = math.inf) -> float:
    """A valid lower bound of the cost, the memory limit aside.

    Args:
        problem: the problem.  That of a quotient is bounded as it is, without shrinking it first,
            so that the bound holds for the problem behind it, too.
        sweeps: how many times the nodes are visited forth and back.
        enough: a bound at which to stop.

    Returns:
        The larger of the plain sum of minima and the diffusion bound on the reduced problem;
        infinity when no choice has a finite cost.
    """
    if problem.counts is None:
        reduction = reduce_problem(problem, keep_memory=False)
        if reduction.dead is not None:
            return float("inf")
        problem = reduction.problem
    diffusion = Diffusion(problem)
    lower, done = diffusion.bound(), 0
    while done < sweeps and lower < enough:
        step = min(PATIENCE, sweeps - done)
        diffusion.sweep(step)
        before, lower, done = lower, max(lower, diffusion.bound()), done + step
        if math.isfinite(enough) and lower - before <= STALE * (enough - lower):
            break
    return lower


def _ceiling(problem: Problem) -> float:
    """A finite price above anything a choice without forbidden entries can lose."""
    tables = {id(cost): cost for cost in problem.cost_s}
    uses: dict[int, int] = {}
    for cost in problem.cost_s:
        uses[id(cost)] = uses.get(id(cost), 0) + 1
    for edge in problem.edges:
        tables[id(edge.cost_s)] = edge.cost_s
        uses[id(edge.cost_s)] = uses.get(id(edge.cost_s), 0) + 1
    total = 1e-9
    for index, table in tables.items():
        finite = table[~is_forbidden(table)]
        if finite.size:
            total += uses[index] * max(abs(float(finite.max())), abs(float(finite.min())))
    return 2.0 * total


def _finite(table: Array, ceiling: float) -> Array:
    """The table with the ceiling in place of forbidden entries."""
    mask = is_forbidden(table)
    clean: Array = np.where(mask, ceiling, table) if mask.any() else table
    return clean
