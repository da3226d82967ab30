"""Eliminates a reduced problem under changing prices: plans once, runs many times.

The plan takes the largest table cap whose work and storage stay within bounds, on the plain graph
or with strategy classes (`strategy_classes`), whichever is less work.  If no such plan is exact,
the run is a mini-bucket relaxation: its value bounds the optimum from below and its decoded choice
is a start for local search.  `diffusion` then reparametrizes the costs first, so the value is never
below the diffusion bound.

Complexity: two plans; per run, the work of the script.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.search.exact.elimination import make_script, run_script
from planner.search.exact.elimination_order import CAP, EliminationOrder, make_plan
from planner.search.exact.reduction import ReducedProblem
from planner.search.exact.strategy_classes import Classed, add_classes
from planner.search.exact.tables import Pool
from planner.search.problem import Array
from planner.search.relax.bound import diffusion_of

STORE = 100_000_000
"""Maximum table entries that a run may hold at a time."""

EASY = 20_000_000
"""Joined entries up to which no other plan is tried."""


@dataclass(frozen=True, eq=False)
class SolverRoute:
    """A plan, the graph it is for, and the joined entries of a run."""

    graph: Classed
    plan: EliminationOrder
    work: int


class Eliminator:
    """Minimizes node costs + edge costs of a reduced problem by elimination.

    Args:
        reduction: the reduced problem.
        cap: entries of the largest table.
        work: maximum joined entries of a run; the cap shrinks until a run is within it.
        sweeps: diffusion sweeps that tighten a relaxation.

    Attributes:
        exact: whether the value of a run is the optimum rather than a lower bound.
        work: joined entries of a run.
    """

    def __init__(
        self, reduction: ReducedProblem, *, cap: int = CAP, work: float = 4e9, sweeps: int = 8
    ) -> None:
        self.pool = reduction.pool
        self.unary = [np.asarray(cost, dtype=np.float64) for cost in reduction.problem.cost_s]
        self.offsets = np.concatenate([[0], np.cumsum([cost.size for cost in self.unary])])
        route = choose_route(reduction, cap, work)
        self.plan, self.exact, self.work = route.plan, route.plan.exact, route.work
        self.pairs = list(route.graph.pairs.values())
        self.extra = route.graph.unary[len(self.unary) :]
        entries = sum(edge.cost_s.size for edge in reduction.problem.edges)
        if not self.exact and entries <= STORE // 4:
            self._reparametrise(reduction, sweeps)

    def _reparametrise(self, reduction: ReducedProblem, sweeps: int) -> None:
        """Move cost between nodes and edges so that the relaxation loses less."""
        diffusion = diffusion_of(reduction.problem)
        diffusion.sweep(sweeps)
        self.unary = [cost[0] for cost in diffusion.unary]
        parts = zip(reduction.problem.edges, diffusion.messages, strict=True)
        self.pairs = [
            self.pool.intern(edge.cost_s - left[0][:, None] - right[0])
            for edge, (left, right) in parts
        ]

    def solve(self, prices: Array | None = None) -> tuple[float, list[int]]:
        """Run the elimination.

        Args:
            prices: flat extra cost of every strategy of every reduced node, or None.

        Returns:
            ``(value, choice)`` as `elimination.run_script` returns them.
        """
        unary = self.unary
        if prices is not None:
            parts = np.split(prices, self.offsets[1:-1])
            unary = [cost + part for cost, part in zip(unary, parts, strict=True)]
        inputs = [self.pool.intern(cost) for cost in unary] + self.extra + self.pairs
        script = make_script(self.plan, inputs, share=self.pool.share)
        value, choice = run_script(self.plan, script, self.pool.tables)
        return value, choice[: len(unary)]


def choose_route(reduction: ReducedProblem, cap: int = CAP, work: float = 4e9) -> SolverRoute:
    """The cheapest exact plan, or the relaxation with the largest cap within the bounds.

    Args:
        reduction: the reduced problem.
        cap: entries of the largest table, to start from.
        work: maximum joined entries of a run.

    Returns:
        The route.
    """
    sizes = [cost.size for cost in reduction.problem.cost_s]
    plain = Classed(sizes, reduction.unary, reduction.pairs)
    best = _route(reduction.pool, plain, cap)
    if not best.plan.exact or best.work > EASY:
        classed = add_classes(reduction.pool, reduction.unary, reduction.pairs)
        if len(classed.sizes) > len(sizes):
            other = _route(reduction.pool, classed, cap)
            if other.plan.exact and (not best.plan.exact or other.work < best.work):
                best = other
    while not _affordable(best, work) and cap > 1000:
        cap //= 8
        best = _route(reduction.pool, plain, cap)
    return best


def _affordable(route: SolverRoute, work: float) -> bool:
    """Whether a run is within the limits of work and storage."""
    return route.work <= work and route.plan.entries <= STORE


def _route(pool: Pool, graph: Classed, cap: int) -> SolverRoute:
    """Plan the elimination of a graph and count its work."""
    plan = make_plan(graph.sizes, list(graph.pairs), cap)
    inputs = [*graph.unary, *graph.pairs.values()]
    return SolverRoute(graph, plan, make_script(plan, inputs, share=pool.share).work)
