"""Quick cost estimates of a step over all meshes, for comparing forms of the step."""

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
"""Numbers of mesh axes that an estimate starts with, and those that it continues with if no plan
fits."""
TIGHT = 1.2
"""Ratio of cost to bound above which memory is the limiting factor, so that the mesh with the
lowest peak is tried, too."""


@dataclass(frozen=True)
class Glance:
    """Result of a quick estimate.

    Attributes:
        cost_s: of the best plan; infinite if no plan fits or all of them cost too much.
        fits: whether a plan fits, or may fit but costs too much.
        bound_s: lower bound on the cost of any plan on the meshes that were tried.
        fill: peak memory of the best plan as a fraction of the limit.
        floor: memory that every plan needs, as a fraction of the limit.
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
    """Estimate the cost of a step, for comparing forms of it. Takes a fraction of the time of
    ``search_meshes``, which may find a cheaper plan, a plan on more mesh axes, or a plan that fits
    where this finds none.

    Args:
        quotient, pins, request: as for ``search_meshes``.
        known_s: plans that do not cost less are ignored.
        bounds_s: lower bounds on the cost of meshes, if known beforehand (``free_bounds``).

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
    stage_axes = int(request.stages > 1)  # every mesh has the stage axis
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
    """The cheaper of two solutions; one that fits comes before one that does not."""
    return min(a, b, key=lambda s: (not s.feasible, s.cost_s))


def free_bounds(quotient: Quotient, pins: Sequence[Pin], request: Request) -> dict[MeshSpec, float]:
    """Lower bounds without a memory limit on the cost of meshes that an estimate starts with, for
    the step under any rematerialization."""
    meshes = candidate_meshes(request, pins)
    if request.spreads or not quotient.part.groups.groups:
        return {}
    allowed = allowed_meshes(quotient, pins, request, meshes)
    part = quotient.part.without_stacks()
    field = Field(part, request.model, allowed, 0.0, SAME, 0.0)
    return {s.priced.mesh: s.bound_s for s in scouted(field, FIRST)}
