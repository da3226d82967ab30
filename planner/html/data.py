"""The contents of an HTML report, collected from a plan and the data of its planning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from costmodels import Cluster
from planner.compare.manual_plans import Candidate, Comparison
from planner.cost.op_seconds import op_seconds
from planner.cost.peak import memory_over_time
from planner.html.graph import Segment, segments
from planner.html.time import StepInTime, reach, step_in_time
from planner.plan.contents.rows import Leaf
from planner.plan.plan import Plan
from planner.planning import Planned
from planner.report.fold import common_path, kind_of, pattern
from planner.report.sections.recipe import recipe_lines, schedule_text
from planner.report.units import array_text
from planner.report.verdict import (
    choice_text,
    constants_text,
    likely_text,
    mesh_text,
    proof_text,
)
from planner.spec import MeshSpec

MOST_DEVICES = {"hierarchy": 128, "torus": 256}
"""Largest number of devices drawn; of a larger cluster, the first nodes or planes."""


@dataclass(frozen=True)
class Wiring:
    """The cluster and the mesh on it.

    ``shape``: devices per node and nodes, or the dimensions of a torus. ``axes``: per mesh axis,
    its name, its size and the location of its devices (``reach``).
    """

    device: str
    kind: str
    shape: tuple[int, ...]
    slices: int
    per_node: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    axes: tuple[tuple[str, int, str], ...]
    drawn: int
    wraps: tuple[bool, ...]


@dataclass(frozen=True)
class ReportTable:
    """A table by columns, in which texts are indices. ``folded``: per row, the row of the folded
    table that it belongs to."""

    columns: dict[str, tuple[Any, ...]]
    folded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rival:
    """A plan compared with others; ``sends``: kind, runs, seconds and bytes of its collectives.

    Without a plan, ``refused`` says why and the figures are None.
    """

    name: str
    what: str
    mesh: str
    compute_s: float | None
    communication_s: float | None
    overlapped_s: float | None
    step_s: float | None
    peak_bytes: float | None
    fits: bool
    refused: str
    sends: tuple[tuple[str, float, float, float], ...]


@dataclass(frozen=True)
class ReportData:
    """A report's contents: plain data, ready for JSON.

    In tables and in ``step``, a text is an index into ``texts``. Times are in seconds, sizes in
    bytes.
    """

    title: str
    mode: str
    cluster: str
    mesh: str
    axes: tuple[str, ...]
    strategy: str
    recipe: tuple[str, ...]
    schedule: str
    idle: str
    choice: str
    proof: str
    constants: str
    search: dict[str, Any]
    prediction: dict[str, Any]
    likely: str
    overlap: tuple[float, float, float]
    planning_s: float
    wiring: Wiring
    meshes: tuple[tuple[str, float, float, float, str], ...]
    segments: tuple[Segment, ...]
    step: StepInTime
    collectives: ReportTable
    leaves: ReportTable
    compute: tuple[tuple[str, float], ...]
    activations: tuple[tuple[str, str, str, float, str], ...]
    rivals: tuple[Rival, ...]
    """Empty if nothing was compared; otherwise, the chosen plan is first."""
    fallbacks: tuple[str, ...]
    notes: tuple[str, ...]
    texts: tuple[str, ...]


class _Texts:
    """Numbers texts in order of first appearance."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.number.setdefault(text, len(self.number))


def report_data(
    planned: Planned, title: str = "", comparison: Comparison | None = None
) -> ReportData:
    """Collect what a report shows.

    Args:
        planned: from ``planner.planning.plan_step``.
        title: what was planned, such as the model's file.
        comparison: of the same step, from ``planner.compare.manual_plans.compare``.
    """
    plan, extraction = planned.plan, planned.extraction
    priced, prediction = extraction.priced, plan.prediction
    texts = _Texts()
    seconds, sent = op_seconds(extraction), extraction.sent()
    scalars = priced.analysis.scalar_bytes
    room = min(prediction.limit_bytes, priced.model.cluster.device.memory_bytes) - scalars
    profile = memory_over_time(extraction, room)
    search = plan.search
    return ReportData(
        title=title,
        mode=plan.mode,
        cluster=plan.cluster,
        mesh=str(plan.mesh),
        axes=plan.mesh.names,
        strategy=plan.strategy,
        recipe=tuple(f"{name} {text}" for name, text in recipe_lines(plan)),
        schedule=schedule_text(plan),
        idle=plan.idle,
        choice=choice_text(plan),
        proof=proof_text(plan),
        constants=constants_text(plan),
        search={
            "name": search.name,
            "cost_s": search.cost_s,
            "lower_bound_s": search.lower_bound_s,
            "gap": search.gap,
            "reason": search.reason,
        },
        prediction={
            "compute_s": prediction.compute_s,
            "communication_s": prediction.communication_s,
            "overlapped_s": prediction.overlapped_s,
            "step_s": prediction.step_s,
            "peak_bytes": prediction.peak_bytes,
            "limit_bytes": prediction.limit_bytes,
        },
        likely=likely_text(plan),
        overlap=priced.model.overlap,
        planning_s=plan.planning_s,
        wiring=_wiring(priced.model.cluster, plan.mesh),
        meshes=tuple(
            (m.mesh, m.cost_s, m.lower_bound_s, m.peak_bytes, mesh_text(m, plan))
            for m in plan.meshes
        ),
        segments=segments(extraction, seconds, sent),
        step=step_in_time(extraction, prediction, profile, seconds, sent, texts),
        collectives=_collectives(plan, texts),
        leaves=_leaves(plan.inputs, texts),
        compute=tuple((row.source or "no line", row.time_s) for row in plan.compute),
        activations=tuple(
            (a.name, array_text(a.shape, a.dtype), str(a.spec), a.nbytes_per_device, a.source)
            for a in plan.activations
        ),
        rivals=() if comparison is None else tuple(map(_rival, comparison.candidates)),
        fallbacks=plan.fallbacks,
        notes=plan.notes,
        texts=tuple(texts.number),
    )


def _rival(one: Candidate) -> Rival:
    if one.plan is None:
        return Rival(one.name, one.what, "", None, None, None, None, None, False, one.refused, ())
    p = one.plan.prediction
    return Rival(
        one.name,
        one.what,
        str(one.plan.mesh),
        p.compute_s,
        p.communication_s,
        p.overlapped_s,
        p.step_s,
        p.peak_bytes,
        one.fits,
        one.refused,
        tuple((c.kind, c.count, c.time_s, c.payload_bytes) for c in one.collectives),
    )


def _wiring(cluster: Cluster, mesh: MeshSpec) -> Wiring:
    per_node = cluster.devices_per_node
    drawn, most = cluster.num_devices, MOST_DEVICES[cluster.kind]
    if drawn > most:
        unit = per_node if per_node <= most else math.prod(cluster.shape[1:])
        drawn = max(most // unit, 1) * unit
    return Wiring(
        cluster.device.kind,
        cluster.kind,
        cluster.shape,
        cluster.slices,
        per_node,
        cluster.link.bytes_per_s,
        cluster.network.bytes_per_s if cluster.network is not None else 0.0,
        tuple(
            (name, size, reach(cluster, mesh, (k,)))
            for k, (name, size) in enumerate(zip(mesh.names, mesh.sizes, strict=True))
        ),
        min(drawn, mesh.num_devices),
        tuple(
            cluster.kind == "torus" and n > 2 and n % cluster.wrap_multiple == 0
            for n in cluster.shape
        ),
    )


def _collectives(plan: Plan, text: _Texts) -> ReportTable:
    """Every collective, folded: those that differ only by numbers in names share a row."""
    kinds: dict[tuple[object, ...], int] = {}
    columns: dict[str, list[Any]] = {
        name: [] for name in "kind axes count payload each total value source cause".split()
    }
    folded = []
    for c in plan.collectives:
        row = (c.kind, ",".join(c.axes), c.count, c.payload_bytes, c.time_s, c.time_s * c.count)
        words = (c.value, c.source, c.cause)
        cells = (text(row[0]), text(row[1]), *row[2:], *map(text, words))
        for column, cell in zip(columns.values(), cells, strict=True):
            column.append(cell)
        key = (c.kind, c.axes, pattern(c.cause), c.source, c.payload_bytes)
        folded.append(kinds.setdefault(key, len(kinds)))
    return ReportTable({name: tuple(column) for name, column in columns.items()}, tuple(folded))


def _leaves(leaves: Sequence[Leaf], text: _Texts) -> ReportTable:
    """Every argument, folded likewise."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    columns: dict[str, list[Any]] = {
        name: [] for name in "path kind array stored used size whole".split()
    }
    folded = [0] * len(leaves)
    for k, leaf in enumerate(leaves):
        kind = kind_of(leaf)
        used = str(leaf.spec) if leaf.used_as is None else str(leaf.used_as)
        words = (leaf.path, kind, array_text(leaf.shape, leaf.dtype), str(leaf.spec), used)
        whole = leaf.nbytes_per_device
        for column, cell in zip(
            columns.values(), (*map(text, words), whole, not leaf.spec.axes), strict=True
        ):
            column.append(cell)
        key = (pattern(leaf.path), leaf.shape, leaf.dtype, leaf.spec, leaf.used_as, leaf.tied)
        kinds.setdefault(key, []).append(k)
    names = []
    for number, members in enumerate(kinds.values()):
        names.append(text(common_path([leaves[k].path for k in members])))
        for k in members:
            folded[k] = number
    columns["common"] = [names[n] for n in folded]
    return ReportTable({name: tuple(column) for name, column in columns.items()}, tuple(folded))
