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
"""Sweeps between two checks of the bound."""
STALE = 0.03
"""Share of the remaining gap; sweeping stops if the bound rises by less between two checks."""


def diffusion_of(problem: Problem) -> Diffusion:
    """The diffusion of one problem, with a finite price in place of forbidden entries.

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
    """Sweep one problem until its bound reaches ``enough`` or hardly rises.

    Args:
        diffusion: the diffusion of one problem.
        sweeps: maximum number of forward and backward passes over the nodes.
        enough: a bound at which to stop; infinity: none.
        patience: sweeps between two checks of the bound.
        stale: stop if the bound rises between checks by at most this share of the gap to
            ``enough``.

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
    """A valid lower bound of the cost, ignoring the memory limit.

    Args:
        problem: the problem.  A quotient is not reduced first, so that the bound also holds for
            the problem that it comes from.
        sweeps: number of forward and backward passes over the nodes.
        enough: a bound at which to stop.

    Returns:
        The larger of the plain sum of minima and the diffusion bound on the reduced problem;
        infinity if no choice has a finite cost.
    """
    if problem.counts is None:
        reduction = reduce_problem(problem, keep_memory=False)
        if reduction.dead is not None:
            return float("inf")
        problem = reduction.problem
    return raised(diffusion_of(problem), sweeps, enough, patience=PATIENCE, stale=STALE)


def _ceiling(problem: Problem) -> float:
    """A finite price above the cost difference of any two choices without forbidden entries."""
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
