"""Reduced-cost fixing: removes strategies that no choice better than a known one can contain.

Under a reparametrization (`diffusion`) with bound L, every choice that takes strategy s at
node i costs at least

    L + (c_i[s] - min c_i) + sum over edges (i, j) of (min_u E_ij[s, u] - min E_ij).

If that exceeds the cost U of a known feasible choice, s is removed.  With a small gap between L and
U, nearly all strategies are removed, and exact elimination solves the rest.  The memory limit only
removes choices, so the argument holds under it as well.

Complexity: that of the sweeps, O(edges * S^2) each.
Papers: Crowder, Johnson and Padberg, "Solving large-scale zero-one linear programming problems",
Oper. Res. 31, 1983 (reduced-cost fixing); Savchynskyy et al., "Global MAP-optimality by shrinking
the combinatorial search area with convex relaxation", NIPS 2013.
"""

from __future__ import annotations

import numpy as np

from planner.search.problem import Array, Problem
from planner.search.relax.bound import diffusion_of


def fix_by_bound(problem: Problem, upper_s: float, *, sweeps: int) -> tuple[float, list[Array]]:
    """Strategies that a choice cheaper than ``upper_s`` can contain.

    Args:
        problem: the problem; edges should be merged (a reduced problem).
        upper_s: cost of a known feasible choice.
        sweeps: diffusion sweeps.

    Returns:
        ``(lower bound, domains)``: per node the sorted indices that remain, never empty.
    """
    diffusion = diffusion_of(problem)
    diffusion.sweep(sweeps)
    extra = [cost[0] - cost.min() for cost in diffusion.unary]
    for k, (a, b) in enumerate(diffusion.ends):
        now = diffusion.rest(k)[0]
        least = now.min()
        extra[a] = extra[a] + (now.min(axis=1) - least)
        extra[b] = extra[b] + (now.min(axis=0) - least)
    lower = float(diffusion.bound()[0])
    room = upper_s - lower + 1e-9 * abs(upper_s)
    domains = []
    for cost in extra:
        mask = cost <= room
        mask[int(cost.argmin())] = True
        domains.append(np.flatnonzero(mask))
    return lower, domains
