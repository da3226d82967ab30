"""A step over time, for drawing: compute and collectives in lanes, memory by what holds it.

A lane has at most a few thousand pieces: neighbors that are too short to be visible are merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels import Cluster
from planner.cost.peak import Profile
from planner.graph.ir import PRODUCTS, Role
from planner.html.timeline import Bar, Timeline, timeline
from planner.plan.contents.rows import Prediction
from planner.plan.extract import Extraction, Sent
from planner.report.fold import common_path, pattern
from planner.space.buffer import Port
from planner.spec import MeshSpec

PIECES = 3000
"""Pieces of a lane: pieces shorter than the step over this number are merged with neighbors."""
BINS = 720
"""Points of the memory curve; each is the maximum in use within its part of the step."""
HELD = 4000
"""Maximum number of values that the memory curve shows separately, the largest ones."""
KINDS = ("start", "product", "elementwise")
CATEGORIES = (
    "parameters",
    "optimizer state",
    "batch and other inputs",
    "gathered for use",
    "results",
    "activations and temporaries",
)
Text = Callable[[str], int]
"""Maps a text to its number."""


@dataclass(frozen=True)
class Lane:
    """Pieces in order, as columns: seconds of start and end, the text of each, how many it merges.

    ``reach``: location of the devices that exchange data. ``busy_s``: the time in use within a
    piece; ``pause_s``: the time that compute waits for it.
    """

    axes: tuple[str, ...]
    reach: str
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    pause_s: tuple[float, ...]
    kind: tuple[int, ...]
    text: tuple[int, ...]
    source: tuple[int, ...]
    joined: tuple[int, ...]


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes per device at ``BINS`` times, and the values that hold them.

    ``moment[b]`` is the moment of most bytes in bin b; ``bytes[c][b]`` are the bytes of category c
    at that moment. The columns ``label``, ``start``, ``end``, ``size``, ``category``, ``count`` are
    the largest values, merged by name and span; they are in use in the moments [start, end).
    """

    moment: tuple[int, ...]
    bytes: tuple[tuple[float, ...], ...]
    peak_bin: int
    label: tuple[int, ...]
    start: tuple[int, ...]
    end: tuple[int, ...]
    size: tuple[float, ...]
    category: tuple[int, ...]
    count: tuple[int, ...]
    traced_order: bool


@dataclass(frozen=True)
class StepInTime:
    """The whole figure. ``hiding``: hidden share of the communication that could be hidden."""

    step_s: float
    hiding: float
    lanes: tuple[Lane, ...]
    memory: MemoryCurve


@dataclass(frozen=True, slots=True)
class _Piece:
    start: float
    end: float
    busy: float
    pause: float
    kind: int
    text: str
    source: str
    count: int


def step_in_time(
    plan: Extraction,
    prediction: Prediction,
    profile: Profile,
    seconds: Sequence[float],
    sent: Sequence[Sent],
    text: Text,
) -> StepInTime:
    """Lay out compute, collectives and memory of a step on one clock.

    Args:
        plan: the chosen plan.
        prediction: its predicted figures.
        profile: its memory over time.
        seconds: per operation, its compute seconds.
        sent: the plan's collectives.
        text: maps texts to numbers.
    """
    order = profile.held.order
    laid = timeline(plan, prediction, order, seconds, sent)
    mesh, shortest = plan.priced.mesh, laid.step_s / PIECES
    lanes = [_lane((), "one device", _compute(plan, order, laid), shortest, text)]
    for axes, bars in laid.lanes:
        names = tuple(mesh.names[k] for k in axes)
        joined = reach(plan.priced.model.cluster, mesh, axes)
        lanes.append(_lane(names, joined, _sending(plan, bars, sent), shortest, text))
    return StepInTime(laid.step_s, laid.hiding, tuple(lanes), _memory(plan, profile, laid, text))


def reach(cluster: Cluster, mesh: MeshSpec, axes: Sequence[int]) -> str:
    """Location of the devices that exchange data along mesh axes: one node (of a torus: slice), or
    how many."""
    members = [0]
    for k in axes:
        stride = math.prod(mesh.sizes[k + 1 :])
        members = [m + at * stride for m in members for at in range(mesh.sizes[k])]
    homes = len({m // cluster.devices_per_node for m in members})
    unit = "node" if cluster.kind == "hierarchy" else "slice"
    if len(members) == 1:
        return "one device"
    if homes == 1:
        return f"inside a {unit}"
    inside = len(members) // homes
    return f"across {homes} {unit}s" if inside == 1 else f"{inside} in each of {homes} {unit}s"


def _compute(plan: Extraction, order: Sequence[int], laid: Timeline) -> Iterator[_Piece]:
    first = laid.starts_s[0] if laid.starts_s else laid.step_s
    start = plan.priced.model.step_latency_s
    if start > 0:
        yield _Piece(0.0, min(start, first), min(start, first), 0.0, 0, "start of the step", "", 1)
    for at, index in enumerate(order):
        begin, end = laid.starts_s[at], laid.ends_s[at]
        if end > begin:
            op = plan.graph.ops[index]
            kind = 1 if op.kind in PRODUCTS else 2
            yield _Piece(begin, end, end - begin, 0.0, kind, op.kind, op.source, 1)


def _sending(plan: Extraction, bars: Sequence[Bar], sent: Sequence[Sent]) -> Iterator[_Piece]:
    for bar in bars:
        x = sent[bar.sent]
        source = plan.graph.ops[x.op].source if x.op >= 0 else ""
        length = bar.end_s - bar.start_s
        name = f"{x.step.kind} of {plan.graph.values[x.value]}, {x.cause}"
        yield _Piece(bar.start_s, bar.end_s, length, bar.pause_s, 3, name, source, 1)


def _lane(
    axes: tuple[str, ...], joined: str, pieces: Iterator[_Piece], shortest: float, text: Text
) -> Lane:
    """Merge pieces that are too short to be visible with the ones before them."""
    out: list[_Piece] = []
    longest = 0.0  # of those joined in the last piece
    for p in pieces:
        if out and p.end - out[-1].start < shortest:
            old = out[-1]
            main = p if p.busy > longest else old
            longest = max(longest, p.busy)
            out[-1] = _Piece(
                old.start,
                p.end,
                old.busy + p.busy,
                old.pause + p.pause,
                main.kind,
                main.text,
                main.source,
                old.count + 1,
            )
        else:
            out.append(p)
            longest = p.busy
    return Lane(
        axes,
        joined,
        tuple(p.start for p in out),
        tuple(p.end for p in out),
        tuple(p.busy for p in out),
        tuple(p.pause for p in out),
        tuple(p.kind for p in out),
        tuple(text(p.text) for p in out),
        tuple(text(p.source) for p in out),
        tuple(p.count for p in out),
    )


def _memory(plan: Extraction, profile: Profile, laid: Timeline, text: Text) -> MemoryCurve:
    rows = profile.held.buffers
    sizes = np.asarray(profile.nbytes)
    category = np.asarray(_categories(plan, profile), np.int64)
    first = np.asarray([b.start for b in rows], np.int64)
    last = np.asarray([b.end for b in rows], np.int64)
    moments = np.unique(np.concatenate([np.zeros(1, np.int64), first, last, [profile.moment]]))
    rise, fall = np.searchsorted(moments, first), np.searchsorted(moments, last)
    held = np.zeros((len(CATEGORIES), len(moments)))
    for c in range(len(CATEGORIES)):
        in_category = category == c
        change = np.bincount(rise[in_category], sizes[in_category], len(moments))
        change -= np.bincount(fall[in_category], sizes[in_category], len(moments))
        held[c] = np.maximum(np.cumsum(change), 0.0)
    held[CATEGORIES.index("batch and other inputs")] += plan.priced.analysis.scalar_bytes
    total = held.sum(axis=0)
    bin_of = np.asarray([_bin(int(m), laid) for m in moments], np.int64)
    peak = int(np.searchsorted(moments, profile.moment))
    picked, at = [], 0
    for b in range(BINS):
        best = at  # what is in use when the bin begins
        while at + 1 < len(moments) and bin_of[at + 1] <= b:
            at += 1
            if total[at] > total[best] or at == peak:
                best = at if at == peak or best != peak else best
        picked.append(best)
    names = _labels(plan)
    spans: dict[tuple[str, int, int, int], list[float]] = {}
    for k, held_there in enumerate(rows):
        if not sizes[k]:  # a copy that is not made
            continue
        key = (names(held_there.value), int(first[k]), int(last[k]), int(category[k]))
        spans.setdefault(key, []).append(float(sizes[k]))
    top = sorted(spans.items(), key=lambda item: -sum(item[1]))[:HELD]
    return MemoryCurve(
        tuple(int(moments[k]) for k in picked),
        tuple(tuple(float(held[c, k]) for k in picked) for c in range(len(CATEGORIES))),
        min(int(bin_of[peak]), BINS - 1),
        tuple(text(label) for (label, _, _, _), _ in top),
        tuple(start for (_, start, _, _), _ in top),
        tuple(end for (_, _, end, _), _ in top),
        tuple(sum(held) for _, held in top),
        tuple(c for (_, _, _, c), _ in top),
        tuple(len(held) for _, held in top),
        profile.traced,
    )


def _bin(moment: int, laid: Timeline) -> int:
    """The bin of a moment: even moments are the start of an operation, odd ones its end."""
    place, half = divmod(moment, 2)
    if place >= len(laid.starts_s):
        return BINS - 1
    when = laid.ends_s[place] if half else laid.starts_s[place]
    return min(int(BINS * when / laid.step_s), BINS - 1) if laid.step_s > 0 else 0


def _categories(plan: Extraction, profile: Profile) -> list[int]:
    graph = plan.graph
    of: dict[int, int] = dict.fromkeys(graph.outputs, CATEGORIES.index("results"))
    for v in graph.inputs:
        value = graph.values[v]
        state = value.carried or value.role is Role.FROZEN
        of[v] = 2 if not state else 1 if value.role is Role.MOMENT else 0
    return [
        CATEGORIES.index("gathered for use")
        if b.port is Port.GATHERED
        else of.get(b.value, len(CATEGORIES) - 1)
        for b in profile.held.buffers
    ]


def _labels(plan: Extraction) -> Callable[[int], str]:
    """Names of values; arguments that differ only by numbers in their paths share one."""
    graph = plan.graph
    alike: dict[tuple[str, ...], list[str]] = {}
    for path in graph.input_paths:
        alike.setdefault(pattern(path), []).append(path)
    folded = {key: common_path(paths) for key, paths in alike.items()}

    def name(value: int) -> str:
        v = graph.values[value]
        if v.op >= 0:
            op = graph.ops[v.op]
            return f"{op.kind} {v} ({op.source or 'no line'})"
        return folded.get(pattern(v.name), v.name) or str(v)

    return name
