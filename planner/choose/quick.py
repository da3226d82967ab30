"""A quick look at a step on all meshes: for comparing forms of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from planner.annotate import Pin
from planner.choose.attempts import attempt
from planner.choose.bounds import Field, scouted
from planner.choose.candidates import candidate_meshes
from planner.choose.floors import floor_of
from planner.choose.meshes import allowed_meshes, lead_meshes, of_scout, search_meshes
from planner.choose.simplest import SAME, choose
from planner.request.parsed import Request
from planner.search.problem import Solution
from planner.search.registry import FAST
from planner.spec import MeshSpec
from planner.step.analysis import ideal_s
from planner.step.classes import Quotient

FIRST, LAST = (1, 2), (3,)
"""Numbers of mesh axes that a quick look begins with, and those that it goes on to if no plan
fits."""
TIGHT = 1.2
"""Cost over its bound from which on memory is what decides, and the mesh of the least peak is worth
a look."""


@dataclass(frozen=True)
class Glance:
    """What a quick look found.

    Attributes:
        cost_s: of the best plan found; infinite where none fits or is of interest.
        fits: whether it may be the cost alone that is too high.
        bound_s: no plan on the meshes looked at costs less.
        fill: peak of that plan, over the limit.
        floor: memory that every plan takes, likewise.
    """

    cost_s: float
    fits: bool
    bound_s: float = math.inf
    fill: float = 0.0
    floor: float = 0.0


def scout_meshes(
    quotient: Quotient,
    pins: Sequence[Pin],
    request: Request,
    known_s: float = math.inf,
    bounds_s: Mapping[MeshSpec, float] = MappingProxyType({}),
) -> Glance:
    """What a quick look finds, for comparing forms of a step: a fraction of the time of
    ``search_meshes``, which may find something cheaper, on more mesh axes, or something that
    fits after all.

    Args:
        quotient, pins, request: as for ``search_meshes``.
        known_s: what does not cost less is of no interest.
        bounds_s: what meshes cost at least, where that is known beforehand (``free_bounds``).

    """
    floor = floor_of(quotient, pins, request).peak_bytes / request.limit_bytes
    if floor > 1.0:
        return Glance(math.inf, False, floor=floor)
    meshes = candidate_meshes(request, pins)
    if request.spreads or len(meshes) == 1 or not quotient.part.groups.groups:
        if len(meshes) == 1:
            best = choose(lead_meshes(quotient, pins, request, whole=False).tried)[1]
        else:
            best = choose(search_meshes(quotient, pins, request))[1]
        cost_s = best.cost_s if best.feasible else math.inf
        return Glance(cost_s, best.feasible, best.lower_bound_s, _fill(best, request), floor)
    allowed = allowed_meshes(quotient, pins, request, meshes)
    ideal = ideal_s(quotient.whole, request.model, request.cluster.num_devices)
    limit = request.limit_bytes
    field = Field(quotient.part, request.model, allowed, limit, SAME, ideal, known_s, bounds_s)
    stage_axes = int(request.stages > 1)  # the axis of stages is in every mesh
    for axes in (FIRST, LAST):
        tried = [of_scout(s, request) for s in scouted(field, tuple(k + stage_axes for k in axes))]
        candidates = [t for t in tried if t[1].choice]
        if not tried:
            continue
        if not candidates:
            return Glance(math.inf, True)
        bound_s = min(t[1].lower_bound_s for t in tried)
        best = choose(candidates)[1]
        hopeful = min(candidates, key=lambda t: t[1].lower_bound_s)
        nearest = min(candidates, key=lambda t: t[1].peak_bytes)
        enough_s = min(known_s, best.cost_s / SAME if best.feasible else math.inf)
        if hopeful[1].lower_bound_s < enough_s:
            best = _cheaper(best, attempt(quotient, pins, request, hopeful[0].mesh, FAST)[1])
        if not best.feasible or best.cost_s > TIGHT * bound_s:
            best = _cheaper(best, attempt(quotient, pins, request, nearest[0].mesh, FAST)[1])
        if best.feasible:
            return Glance(best.cost_s, True, bound_s, _fill(best, request))
    return Glance(math.inf, False)


def _fill(solution: Solution, request: Request) -> float:
    return solution.peak_bytes / request.limit_bytes


def _cheaper(a: Solution, b: Solution) -> Solution:
    """The cheaper of two, of those that fit."""
    return min(a, b, key=lambda s: (not s.feasible, s.cost_s))


def free_bounds(quotient: Quotient, pins: Sequence[Pin], request: Request) -> dict[MeshSpec, float]:
    """What meshes that a quick look begins with cost at least where memory is no matter."""
    meshes = candidate_meshes(request, pins)
    if request.spreads or not quotient.part.groups.groups:
        return {}
    allowed = allowed_meshes(quotient, pins, request, meshes)
    field = Field(quotient.part, request.model, allowed, 0.0, SAME, 0.0)
    return {s.priced.mesh: s.bound_s for s in scouted(field, FIRST)}
