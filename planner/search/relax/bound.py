"""A cheap lower bound: the diffusion of one problem (`diffusion`), and when to stop it.

Complexity: O(edges * S^2) per sweep for S strategies.
Papers: those of `diffusion`.
"""

from __future__ import annotations

import math

import numpy as np

from planner.search.exact.reduction import reduce_problem
from planner.search.problem import Array, Problem, is_forbidden
from planner.search.relax.diffusion import Diffusion

PATIENCE = 6
"""Sweeps between two looks at the bound."""
STALE = 0.03
"""Share of the way that is left; when so many sweeps rise by less, they stop."""


def diffusion_of(problem: Problem) -> Diffusion:
    """The diffusion of one problem, a finite price in place of forbidden entries.

    Args:
        problem: the problem; equal table objects share memory.
    """
    ceiling = _ceiling(problem)
    known: dict[int, Array] = {}
    for edge in problem.edges:
        if id(edge.cost_s) not in known:
            known[id(edge.cost_s)] = _finite(edge.cost_s, ceiling)[None]
    return Diffusion(
        [_finite(cost, ceiling)[None] for cost in problem.cost_s],
        [(edge.a, edge.b) for edge in problem.edges],
        [known[id(edge.cost_s)] for edge in problem.edges],
        [(None, None)] * len(problem.edges),
    )


def raised(
    diffusion: Diffusion, sweeps: int, enough: float, *, patience: int, stale: float
) -> float:
    """Sweep one problem until its bound is enough or hardly rises.

    Args:
        diffusion: the diffusion of one problem.
        sweeps: how many times the nodes are visited forth and back at most.
        enough: a bound at which to stop; infinity: none.
        patience: sweeps between two looks at the bound.
        stale: stop when a look has risen by no more than this share of the way to ``enough``.

    Returns:
        The bound.
    """
    lower, done = float(diffusion.bound()[0]), 0
    while done < sweeps and lower < enough:
        step = min(patience, sweeps - done)
        diffusion.sweep(step)
        before, lower, done = lower, max(lower, float(diffusion.bound()[0])), done + step
        if math.isfinite(enough) and lower - before <= stale * (enough - lower):
            break
    return lower


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
    return raised(diffusion_of(problem), sweeps, enough, patience=PATIENCE, stale=STALE)


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
