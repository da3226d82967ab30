"""Checks that the numbers of a solution match the evaluator's."""

from __future__ import annotations

import math

import numpy as np

from planner.cost.pricing import Priced
from planner.debug.check.layouts import demand
from planner.search.problem import Problem, Solution, evaluate, fits, memory_profile

CLOSE = 1e-9
"""Relative difference that another order of summation may cause."""


def check_solution(*tried: tuple[Priced, Solution]) -> None:
    """Demand that solutions have the cost, the peak and the bound that their problems give them.

    Raises:
        InternalError: the mesh and the number at fault.
    """
    for priced, solution in {id(s): (p, s) for p, s in tried}.values():
        check_answer(priced.problem, solution, f"solution on {priced.mesh}")


def check_answer(problem: Problem, solution: Solution, where: str) -> None:
    """Demand that ``solution`` is a solution of ``problem`` with the right numbers."""
    choice = solution.choice
    demand(
        len(choice) == len(problem.names), where, f"{len(choice)} of {len(problem.names)} choices"
    )
    for name, cost, s in zip(problem.names, problem.cost_s, choice, strict=True):
        demand(0 <= s < cost.size, where, f"takes strategy {s} of {cost.size} for node {name}")
    cost_s, peak_bytes, _ = evaluate(problem, choice)
    _same(where, "cost", solution.cost_s, cost_s, "s")
    _same(where, "peak", solution.peak_bytes, peak_bytes, "bytes")
    at = _bytes_at(problem, solution)
    _same(where, f"peak at moment {solution.peak_moment}", solution.peak_bytes, at, "bytes")
    right = math.isfinite(cost_s) and fits(peak_bytes, problem.limit_bytes)
    demand(
        solution.feasible == right,
        where,
        f"feasible is {solution.feasible} at {cost_s:g} s and {peak_bytes:g} of "
        f"{problem.limit_bytes:g} bytes",
    )
    demand(
        not solution.feasible or solution.lower_bound_s <= cost_s * (1 + CLOSE),
        where,
        f"its bound {solution.lower_bound_s:g} s is above its cost {cost_s:g} s",
    )


def _bytes_at(problem: Problem, solution: Solution) -> float:
    """The live bytes in the fullest pool at the solution's peak moment."""
    moments, nbytes = memory_profile(problem, solution.choice)
    firsts = [pool.first for pool in problem.pools] or [0]
    positions = [
        np.searchsorted(moments, solution.peak_moment + f, side="right") - 1 for f in firsts
    ]
    return max(float(nbytes[at]) if at >= 0 else 0.0 for at in positions)


def _same(where: str, what: str, got: float, expected: float, unit: str) -> None:
    close = math.isclose(got, expected, rel_tol=CLOSE, abs_tol=1e-12)
    demand(close, where, f"states a {what} of {got:.12g} {unit}, evaluated {expected:.12g}")
