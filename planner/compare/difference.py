"""The differences between two plans, folded so that repeated layers share a line. No jax."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from planner.plan.canonical import differing, without_place
from planner.plan.contents.rows import CollectiveRow, Leaf, Prediction
from planner.plan.plan import Plan
from planner.report.fold import common_path, pattern
from planner.report.units import sharding_text
from planner.spec import PLAIN


@dataclass(frozen=True)
class Setting:
    """A setting that differs: what the plan was made for (cluster, mode, ...), or its mesh."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Figure:
    """A predicted figure of one device; ``unit`` is "s" or "bytes"."""

    name: str
    unit: str
    before: float
    after: float


@dataclass(frozen=True)
class Moved:
    """``count`` arguments of one pattern whose sharding differs.

    ``before`` and ``after`` are shardings as text; empty where a plan has no such argument.
    """

    path: str
    count: int
    before: str
    after: str


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind, axes, source line and cause, in both plans.

    Counts, seconds and bytes are totals of all runs in a step on one device: (before, after).
    """

    kind: str
    axes: tuple[str, ...]
    source: str
    cause: str
    count: tuple[float, float]
    time_s: tuple[float, float]
    payload_bytes: tuple[float, float]


@dataclass(frozen=True)
class Difference:
    """What differs between two plans.

    ``same``: whether both are the same, apart from files, lines and what the search tried.
    ``same_step``: whether both are for one step with the same shapes; ``step_change`` says where
    they first differ. ``figures``: all figures, changed or not. ``exchanges``: collectives that
    differ, the largest change of time first. ``fields``: the fields of the plan that differ, if
    none of the above does.
    """

    same: bool
    same_step: bool
    settings: tuple[Setting, ...]
    figures: tuple[Figure, ...]
    arguments: int
    moved: tuple[Moved, ...]
    exchanges: tuple[Exchange, ...]
    fields: tuple[str, ...] = ()
    step_change: str = ""

    @property
    def gained(self) -> tuple[Exchange, ...]:
        """Collectives that only the second plan has."""
        return tuple(e for e in self.exchanges if not e.count[0])

    @property
    def lost(self) -> tuple[Exchange, ...]:
        """Collectives that only the first plan has."""
        return tuple(e for e in self.exchanges if not e.count[1])

    @property
    def changed(self) -> tuple[Exchange, ...]:
        """Collectives of both plans that differ in their runs, seconds or bytes."""
        return tuple(e for e in self.exchanges if all(e.count))


def difference(before: Plan, after: Plan) -> Difference:
    """Compare two plans, of one step or of two."""
    a, b = before.prediction, after.prediction
    rows = (
        ("cluster", before.cluster, after.cluster),
        ("mode", before.mode, after.mode),
        ("mesh", str(before.mesh), str(after.mesh)),
        ("strategy", before.strategy, after.strategy),
        ("recipe", _recipe(before), _recipe(after)),
        ("search", before.search.name, after.search.name),
        ("fallbacks", str(len(before.fallbacks)), str(len(after.fallbacks))),
    )
    change = _step_change(before, after)
    settings = tuple(Setting(*row) for row in rows if row[1] != row[2])
    figures = (
        Figure("step time", "s", a.step_s, b.step_s),
        Figure("compute", "s", a.compute_s, b.compute_s),
        Figure("communication", "s", a.communication_s, b.communication_s),
        Figure("overlapped", "s", a.overlapped_s, b.overlapped_s),
        *_of_host(a, b),
        Figure("peak memory", "bytes", a.peak_bytes, b.peak_bytes),
        Figure("memory limit", "bytes", a.limit_bytes, b.limit_bytes),
    )
    moved = _moved(before.inputs, after.inputs)
    exchanges = _exchanges(before.collectives, after.collectives)
    seen = settings or moved or exchanges or any(f.before != f.after for f in figures)
    return Difference(
        before.canonical_digest == after.canonical_digest,
        not change,
        settings,
        figures,
        len({leaf.path for plan in (before, after) for leaf in plan.inputs}),
        moved,
        exchanges,
        () if seen else differing(json.loads(before.to_json()), json.loads(after.to_json())),
        change,
    )


def _recipe(plan: Plan) -> str:
    return "as written" if plan.recipe == PLAIN else str(plan.recipe)


def _of_host(a: Prediction, b: Prediction) -> tuple[Figure, ...]:
    """Figures of host memory, if one of the plans uses it."""
    if not (a.host_bytes or b.host_bytes):
        return ()
    return (
        Figure("host copies", "s", a.host_s, b.host_s),
        Figure("host memory", "bytes", a.host_bytes, b.host_bytes),
    )


def _step_change(before: Plan, after: Plan) -> str:
    """Where the steps of two plans first differ; empty for one step with the same shapes."""

    def arguments(plan: Plan) -> list[str]:
        return [f"{leaf.path} {leaf.dtype}{list(leaf.shape)}" for leaf in plan.inputs]

    def operations(plan: Plan) -> list[str]:
        texts = (plan.op_table[index] for index in plan.op_index)
        return [
            f"{text} of {list(reads)}" for text, reads in zip(texts, plan.op_inputs, strict=True)
        ]

    for what, a, b in (
        ("argument", arguments(before), arguments(after)),
        ("operation", operations(before), operations(after)),
    ):
        for k, (one, other) in enumerate(itertools.zip_longest(a, b, fillvalue="none")):
            if one != other:
                return f"{what} {k}: {one} -> {other}"
    return ""


def _told(leaf: Leaf | None) -> str:
    if leaf is None:
        return ""
    text = sharding_text(leaf.spec, leaf.spec if leaf.used_as is None else leaf.used_as)
    return text if leaf.memory == "device" else f"{text}, in {leaf.memory}"


def _moved(before: Sequence[Leaf], after: Sequence[Leaf]) -> tuple[Moved, ...]:
    """Arguments whose sharding differs, folded by pattern, in order of first appearance."""
    first = {leaf.path: leaf for leaf in before}
    then = {leaf.path: leaf for leaf in after}
    folded: dict[tuple[object, ...], list[str]] = {}
    for path in dict.fromkeys((*first, *then)):
        texts = _told(first.get(path)), _told(then.get(path))
        if texts[0] != texts[1]:
            folded.setdefault((pattern(path), *texts), []).append(path)
    return tuple(
        Moved(common_path(paths), len(paths), str(key[1]), str(key[2]))
        for key, paths in folded.items()
    )


Key = tuple[str, tuple[str, ...], str, tuple[str, ...]]


def _sums(
    rows: Iterable[CollectiveRow], moved: Set[Key]
) -> dict[Key, tuple[float, float, float, list[str]]]:
    """Runs, seconds and bytes of collectives that share a line, and their causes; those in
    ``moved`` are added up regardless of their line."""
    out: dict[Key, tuple[float, float, float, list[str]]] = {}
    for row in rows:
        file = _wherever(row)
        key = file if file in moved else (row.kind, row.axes, row.source, pattern(row.cause))
        count, time_s, nbytes, causes = out.get(key, (0.0, 0.0, 0.0, []))
        out[key] = (
            count + row.count,
            time_s + row.count * row.time_s,
            nbytes + row.count * row.payload_bytes,
            [*causes, row.cause],
        )
    return out


def _wherever(row: CollectiveRow) -> Key:
    """The key of a collective that stays the same when lines are moved or files renamed."""
    return row.kind, row.axes, "", pattern(without_place(row.cause))


def _lines(rows: Iterable[CollectiveRow]) -> dict[Key, set[str]]:
    """The source lines of the collectives with each such key."""
    out: dict[Key, set[str]] = {}
    for row in rows:
        out.setdefault(_wherever(row), set()).add(row.source)
    return out


def _exchanges(
    before: Iterable[CollectiveRow], after: Iterable[CollectiveRow]
) -> tuple[Exchange, ...]:
    before, after = tuple(before), tuple(after)
    lines, then_lines = _lines(before), _lines(after)
    moved = {key for key, sources in lines.items() if then_lines.get(key, sources) != sources}
    first, then = _sums(before, moved), _sums(after, moved)
    out = []
    for key in dict.fromkeys((*first, *then)):
        a = first.get(key, (0.0, 0.0, 0.0, []))
        b = then.get(key, (0.0, 0.0, 0.0, []))
        if a[:3] != b[:3]:
            kind, axes, source, _ = key
            cause = common_path([*a[3], *b[3]])
            runs, seconds, nbytes = (a[0], b[0]), (a[1], b[1]), (a[2], b[2])
            out.append(Exchange(kind, axes, source, cause, runs, seconds, nbytes))
    return tuple(
        sorted(out, key=lambda e: (-abs(e.time_s[1] - e.time_s[0]), e.kind, e.axes, e.source))
    )
