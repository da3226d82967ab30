"""Comparisons of plans as text for people and as plain data. No jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.compare.difference import Difference, Exchange, Figure
from planner.plan.contents.interval import step_range, ties
from planner.report.layout import add_row, new_table, pairs, section
from planner.report.units import (
    bytes_text,
    count_text,
    listed,
    more_bytes,
    more_time,
    percent_text,
    time_text,
)

if TYPE_CHECKING:
    from planner.compare.manual_plans import Candidate, Comparison
    from planner.plan.plan import Plan

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
SHOWN = 12
"""Rows shown of a list of collectives or arguments."""


def comparison_parts(comparison: Comparison) -> Iterable[RenderableType]:
    """The parts of a report: times and memory, then the collectives."""
    yield Text(f"plans for {comparison.cluster}", style="bold")
    yield ""
    rows = [("limit", f"{bytes_text(comparison.limit_bytes)} per device")]
    if comparison.chosen.plan is not None:
        rows.append(("chosen", f"mesh {comparison.chosen.plan.mesh}, {comparison.chosen.what}"))
    best, near = fastest(comparison)
    name = "none fits" if best is None else best.name
    if near:
        name += f", tied with {listed([one.name for one in near])}"
    rows.append(("fastest", name))
    yield _under(pairs(rows))
    yield ""
    table = new_table("", ">step", ">relative", ">compute", ">communication", ">memory", "fits")
    for one in comparison.candidates:
        if one.plan is None:
            add_row(table, one.name, *["-"] * 5, "refused", style="dim")
            continue
        p = one.plan.prediction
        add_row(
            table,
            one.name,
            time_text(p.step_s),
            f"tied {_ratio(comparison, one)}" if one in near else _ratio(comparison, one),
            time_text(p.compute_s),
            time_text(p.communication_s),
            bytes_text(p.peak_bytes),
            "yes" if one.fits else "no",
            style="green" if one is comparison.chosen else "" if one.fits else "red",
        )
    yield _under(table)
    yield from section("collectives: runs a step and their time", _kinds(comparison.candidates))
    notes = [(c.name, c.note) for c in comparison.candidates if c.note]
    if notes:
        yield from section("not quite what they are called", pairs(notes))
    refused = [(c.name, c.refused) for c in comparison.candidates if c.refused]
    if refused:
        yield from section("refused", pairs(refused))


def _under(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2), expand=False)


def fastest(comparison: Comparison) -> tuple[Candidate | None, tuple[Candidate, ...]]:
    """The fastest plan that fits, if any does, and those that tie with it."""
    fitting = [c for c in comparison.candidates if c.plan is not None and c.fits]
    if not fitting:
        return None, ()
    best = min(fitting, key=_step_s)
    assert best.plan is not None
    near = (c for c in fitting if c is not best and ties(best.plan, _step_s(c), _step_s(best)))
    return best, tuple(near)


def _step_s(one: Candidate) -> float:
    return one.plan.prediction.step_s if one.plan is not None else math.inf


def _ratio(comparison: Comparison, one: Candidate) -> str:
    """The step time relative to the chosen plan's."""
    if one.plan is None or comparison.chosen.plan is None:
        return "-"
    base = comparison.chosen.plan.prediction.step_s
    return f"{one.plan.prediction.step_s / base:.2f}x" if base > 0 else "-"


def _kinds(candidates: Sequence[Candidate]) -> RenderableType:
    planned = [c for c in candidates if c.plan is not None]
    present = {x.kind for c in planned for x in c.collectives}
    kinds = [k for k in KINDS if k in present]
    if not kinds:
        return Text("none: the devices never talk")
    table = new_table("", *(f">{kind}" for kind in kinds))
    for one in planned:
        by_kind = {x.kind: x for x in one.collectives}
        cells = [
            f"{count_text(by_kind[k].count)}  {time_text(by_kind[k].time_s)}"
            if k in by_kind
            else "-"
            for k in kinds
        ]
        add_row(table, one.name, *cells)
    return table


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain data, with the digests of the plans instead of the plans. "tied":
    whether a plan ties with the fastest one; false for the fastest one."""
    near = fastest(comparison)[1]

    def one(c: Candidate) -> dict[str, Any]:
        out: dict[str, Any] = {"name": c.name, "what": c.what, "fits": c.fits}
        if c.plan is None:
            return {**out, "refused": c.refused}
        out["note"] = c.note
        p = c.plan.prediction
        return {
            **out,
            "plan": c.plan.digest,
            "mesh": str(c.plan.mesh),
            "step_s": p.step_s,
            **range_json(c.plan),
            "tied": c in near,
            "compute_s": p.compute_s,
            "communication_s": p.communication_s,
            "overlapped_s": p.overlapped_s,
            "peak_bytes": p.peak_bytes,
            "collectives": [dataclasses.asdict(x) for x in c.collectives],
        }

    return {
        "cluster": comparison.cluster,
        "limit_bytes": comparison.limit_bytes,
        "candidates": [one(c) for c in comparison.candidates],
    }


def range_json(plan: Plan) -> dict[str, float | None]:
    """The likely range of a plan's step time; null without published runs."""
    time_range = step_range(plan)
    low, high = (None, None) if time_range is None else (time_range.low_s, time_range.high_s)
    return {"low_s": low, "high_s": high}


def difference_parts(difference: Difference, before: str, after: str) -> Iterable[RenderableType]:
    """The parts of a report on two plans, which are called ``before`` and ``after``."""
    yield Text(f"{before} -> {after}", style="bold")
    yield ""
    if difference.same:
        yield _under(Text("the same plan, except for source lines and details of the search"))
        return
    if not difference.same_step:
        yield _under(Text(f"the plans are for different steps or shapes: {difference.step_change}"))
        yield ""
    rows = [(s.name, f"{s.before} -> {s.after}") for s in difference.settings]
    rows += [(f.name, figure_text(f)) for f in difference.figures if f.name != "overlapped"]
    yield _under(pairs(rows))
    yield from _moved(difference)
    for title, rows_ in (
        ("collectives gained", difference.gained),
        ("collectives lost", difference.lost),
        ("collectives changed", difference.changed),
    ):
        if rows_:
            yield from section(title, _exchanges(rows_))
    if not difference.exchanges:
        yield from section("collectives", Text("the same"))
    if difference.fields:
        yield from section("other fields that differ", Text(", ".join(difference.fields)))


def figure_text(figure: Figure) -> str:
    """``190 ms -> 210 ms, 20.0 ms (10.5 %) more``."""
    text = time_text if figure.unit == "s" else bytes_text
    change = figure.after - figure.before
    if text(figure.before) == text(figure.after):
        return f"{text(figure.after)}, the same"
    share = f" ({percent_text(abs(change) / figure.before)})" if figure.before > 0 else ""
    if figure.name == "step time":
        word = "slower" if change > 0 else "faster"
    else:
        word = "more" if change > 0 else "less"
    both = f"{text(figure.before)} -> {text(figure.after)}"
    return f"{both}, {text(abs(change))}{share} {word}"


def _moved(difference: Difference) -> Iterable[RenderableType]:
    count = sum(m.count for m in difference.moved)
    title = f"arguments sharded otherwise: {count} of {difference.arguments}"
    if not difference.moved:
        yield from section(title, Text("none"))
        return
    table = new_table("path", "before", "after", ">count")
    for row in difference.moved[:SHOWN]:
        add_row(table, row.path, row.before or "-", row.after or "-", f"x{row.count}")
    if len(difference.moved) > SHOWN:
        rest = difference.moved[SHOWN:]
        add_row(table, f"{len(rest)} more", "", "", f"x{sum(m.count for m in rest)}", style="dim")
    yield from section(title, table)


def _exchanges(rows: Sequence[Exchange]) -> RenderableType:
    table = new_table("collective", "over", ">runs", ">bytes", ">time", "caused by")
    for row in rows[:SHOWN]:
        where = f"{row.cause} ({row.source})" if row.source else row.cause
        add_row(
            table,
            row.kind,
            ",".join(row.axes),
            _change(row.count, count_text),
            more_bytes(row.payload_bytes[1] - row.payload_bytes[0]),
            more_time(row.time_s[1] - row.time_s[0]),
            where,
        )
    if len(rows) > SHOWN:
        rest = rows[SHOWN:]
        nbytes = sum(r.payload_bytes[1] - r.payload_bytes[0] for r in rest)
        seconds = sum(r.time_s[1] - r.time_s[0] for r in rest)
        cells = ("", "", more_bytes(nbytes), more_time(seconds), "")
        add_row(table, f"{len(rest)} more", *cells, style="dim")
    return table


def _change(pair: tuple[float, float], text: Any) -> str:
    """The runs of the plan that has them, or of both plans if they differ."""
    if not all(pair) or pair[0] == pair[1]:
        return str(text(max(pair)))
    return f"{text(pair[0])} -> {text(pair[1])}"


def difference_json(difference: Difference) -> dict[str, Any]:
    """The difference as plain data."""
    return dataclasses.asdict(difference)
