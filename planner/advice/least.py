"""The plan with the least memory peak, whatever it costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from planner.choose.meshes import unfold
from planner.choose.simplest import Tried, choose
from planner.cost.pricing import Priced, unfolded
from planner.request.parsed import Request
from planner.search import lower_bound
from planner.search.local.memory_limit import LeastMemory, least_memory, polished_at
from planner.search.problem import evaluate, fits, make_solution
from planner.step.classes import Quotient

LEAST_S = 10.0
"""Seconds to minimize the peaks of all meshes together."""
FOLDED_SHARE = 0.5
"""Share of ``LEAST_S`` with equal plans for equal parts, which is fast; then plans may differ."""


@dataclass(frozen=True, eq=False)
class Least:
    """The least peak over the meshes that were tried.

    Attributes:
        priced: the whole step on the mesh of the least peak.
        memory: its choice and peak; scalars, which every plan holds, are not counted.
        lower_bytes: lower bound on the peak on every mesh tried; 0 if that is not known.
    """

    priced: Priced
    memory: LeastMemory
    lower_bytes: float


def least_plan(quotient: Quotient, tried: Sequence[Tried], request: Request) -> Least:
    """Minimize the peak on the meshes that were tried, the most promising ones first.

    Outside AUTO_PARALLEL the mode decides what is sharded, so the result of the search is returned,
    without a bound.
    """
    if request.spreads:
        priced, solution = unfold(quotient, choose(tried))
        peak, moment = solution.peak_bytes, solution.peak_moment
        return Least(priced, LeastMemory(solution.choice, peak, moment, 0.0), 0.0)
    begun = time.monotonic()
    folded: list[tuple[Priced, LeastMemory, Priced]] = []
    looked_at = [t for t in tried if t[0].sets]  # others were ruled out before they were priced
    for part, _ in sorted(looked_at, key=lambda t: t[1].peak_bytes):
        left = begun + FOLDED_SHARE * LEAST_S - time.monotonic()
        if folded and left <= 0:
            break
        folded.append((*_folded(quotient, part, left), part))
    folded.sort(key=lambda f: f[1].peak_bytes)
    candidates = [(priced, memory) for priced, memory, _ in folded]
    bounds: list[float] = []
    for priced, memory, part in folded:
        left = begun + LEAST_S - time.monotonic()
        if part is priced:
            bounds.append(memory.lower_bytes)
        elif left > 0:
            candidates.append((priced, least_memory(priced.problem, time_limit_s=left)))
            bounds.append(candidates[-1][1].lower_bytes)
    priced, memory = min(candidates, key=lambda f: f[1].peak_bytes)
    lower = min(bounds) if len(bounds) == len(tried) else 0.0
    return Least(priced, memory, min(lower, memory.peak_bytes))


def _folded(quotient: Quotient, part: Priced, seconds: float) -> tuple[Priced, LeastMemory]:
    """The least peak with equal plans for equal parts. Its bound holds for such plans only, unless
    nothing is folded."""
    memory = least_memory(part.problem, time_limit_s=seconds)
    if part.analysis is quotient.whole:
        return part, memory
    priced, choice = unfolded(quotient, part), quotient.unfold_choice(memory.choice)
    _, peak, moment = evaluate(priced.problem, choice)
    return priced, LeastMemory(choice, peak, moment, 0.0)


def rescued(least: Least, tried: Sequence[Tried], request: Request) -> tuple[Tried, ...]:
    """``tried``, where the plan of the least peak replaces its mesh's plan if it fits after all."""
    problem, begun = least.priced.problem, time.monotonic()
    fit = fits(least.memory.peak_bytes, problem.limit_bytes)
    if request.spreads or not fit:
        return tuple(tried)
    choice = polished_at(problem, least.memory.choice, request.time_limit_s)
    reason = "no plan chosen by cost fits; the plan of the least peak, made cheaper"
    solution = make_solution(problem, choice, lower_bound(problem), request.search, reason, begun)
    mesh = least.priced.mesh
    return tuple((least.priced, solution) if p.mesh == mesh else (p, s) for p, s in tried)
