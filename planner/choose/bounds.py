"""All meshes at once: a lower bound on the cost of each, and a first choice for each.

Meshes of one, two, three axes are families (``planner.search.relax.family``), processed in this
order. Within a family the meshes with the least node costs come first, and a mesh is pruned as soon
as a lower bound allows it:

* by ``node_bound`` alone, before its communication is priced;
* after any sweep of messages (``planner.search.relax.family.relax``).

A mesh is pruned if its bound is not below the cheapest choice so far or, if that choice has fewer
axes and uses all of them, not below it by more than the margin that another axis must pay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from costmodels import CostModel
from planner.choose.simplest import idle_axes
from planner.cost.batched import Mask, PricedFamily, price_family
from planner.cost.pricing import Priced
from planner.search.relax.family import Family, node_bound, relax
from planner.spec import MeshSpec
from planner.step.analysis import Analysis

SWEEPS = 3
"""Sweeps of messages over every mesh that is not pruned."""
DEEP = 24
"""Sweeps over a single leading mesh."""
ENTRIES = 12_000_000
"""Table entries (of 8 bytes each) held at a time."""


@dataclass(frozen=True, eq=False)
class Scout:
    """The lower bound and the choice of a mesh: no plan on it is cheaper than ``bound_s``.

    ``choice`` (one strategy per class, in ``priced.sets``) costs ``cost_s`` and takes
    ``peak_bytes``; None if the bound pruned the mesh first (its ``priced`` then has no sets).
    """

    priced: Priced
    bound_s: float
    choice: tuple[int, ...] | None = None
    cost_s: float = math.inf
    peak_bytes: float = 0.0


@dataclass(frozen=True, eq=False)
class Field:
    """The input of ``scouted``: a quotient, the meshes with the strategies that pins allow (a mask
    per class that pins restrict), and the rules of the comparison.

    ``margin``: how many times cheaper a mesh with more axes must be. ``ideal_s``: a lower bound for
    all meshes; once a choice is within the margin of it, meshes with more axes are skipped.
    """

    analysis: Analysis
    model: CostModel
    meshes: Sequence[tuple[MeshSpec, Mapping[int, Mask]]]
    limit_bytes: float
    margin: float
    ideal_s: float
    known_s: float = math.inf
    """Meshes that can't cost less are pruned."""
    bounds_s: Mapping[MeshSpec, float] = field(default_factory=dict)
    """Lower bounds of meshes that are known beforehand."""

    def cheapest(self, scouts: Sequence[Scout]) -> float:
        """The cost of the cheapest choice that fits."""
        return min((s.cost_s for s in self._fitting(scouts)), default=math.inf)

    def simpler(self, scouts: Sequence[Scout]) -> float:
        """The cost that a mesh with more axes must beat: that of the cheapest choice, or less than
        that by the margin if the choice uses all axes of its mesh."""
        fitting = [
            s for s in self._fitting(scouts) if s.cost_s <= self.margin * self.cheapest(scouts)
        ]
        busy = [s.cost_s for s in fitting if not idle_axes(s.priced, s.choice or ())]
        return min(self.cheapest(scouts), min(busy, default=math.inf) / self.margin)

    def _fitting(self, scouts: Sequence[Scout]) -> list[Scout]:
        return [s for s in scouts if s.choice and s.peak_bytes <= self.limit_bytes]


def scouted(field: Field, numbers: Sequence[int] = (1, 2, 3)) -> list[Scout]:
    """Compute bounds for all meshes with these numbers of axes, and choices for those not
    pruned."""
    done: list[Scout] = []
    for axes in numbers:
        level = [m for m in field.meshes if m[0].num_axes == axes]
        simpler = min(field.simpler(done), field.known_s)
        out = [m for m, _ in level if field.bounds_s.get(m, 0.0) >= simpler]
        done += [Scout(_bare(field, m), field.bounds_s[m]) for m in out]
        level = [m for m in level if m[0] not in out]
        for rank in sorted({len(mesh.sizes) for mesh, _ in level}):
            done += _family(field, [m for m in level if len(m[0].sizes) == rank], simpler)
        if field.margin * field.simpler(done) <= field.margin * field.ideal_s:
            break
    return done


def deepened(field: Field) -> Scout:
    """The scout of a single mesh (the only one of ``field``) after more sweeps of messages."""
    (mesh, masks), *_ = field.meshes
    family = price_family(field.analysis, [mesh], field.model, [masks])
    return next(iter(_relaxed(field, family, math.inf, DEEP)))


def _family(
    field: Field, meshes: Sequence[tuple[MeshSpec, Mapping[int, Mask]]], simpler_s: float
) -> list[Scout]:
    """Scouts of meshes with one number of axes; ``simpler_s``: the cost that they must beat because
    of meshes with fewer axes."""
    masks = [mask for _, mask in meshes]
    family = price_family(field.analysis, [mesh for mesh, _ in meshes], field.model, masks)
    least = node_bound(Family(family.unary, ()))
    queue = np.argsort(least, kind="stable").tolist()
    size = max(1, ENTRIES // max(1, family.entries()))
    done: list[Scout] = []
    while queue:
        enough = min(field.cheapest(done), simpler_s)
        batch, queue = queue[:size], queue[size:]
        for k in batch:
            if least[k] >= enough:
                done.append(Scout(_bare(field, meshes[k][0]), float(least[k])))
        batch = [k for k in batch if least[k] < enough]
        if batch:
            done += _relaxed(field, family.take(batch), enough)
    return done


def _relaxed(
    field: Field, family: PricedFamily, enough_s: float, sweeps: int = SWEEPS
) -> Iterator[Scout]:
    """Scouts of a family after message passing."""
    relaxed = relax(family.problems(), sweeps, enough_s)
    peaks = family.peaks(relaxed.choice, field.limit_bytes)
    for m, mesh in enumerate(family.meshes):
        bound, cost = float(relaxed.bound_s[m]), float(relaxed.cost_s[m])
        if math.isinf(cost):
            yield Scout(_bare(field, mesh), bound)
        else:
            yield Scout(
                family.own(m, field.limit_bytes),
                bound,
                family.own_choice(m, relaxed.choice[m]),
                cost,
                float(peaks[m]),
            )


def _bare(field: Field, mesh: MeshSpec) -> Priced:
    """A mesh without its strategies, which are no longer needed."""
    return Priced(field.analysis, mesh, field.model, (), field.limit_bytes)
