"""An explanation as text for people and as plain data. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.explain.model import Alternative, Decision, Dimension, Explanation, Price
from planner.report.layout import add_row, new_table, pairs, section, text_lines
from planner.report.units import (
    array_text,
    bytes_text,
    more_bytes,
    more_time,
    percent_text,
    sharding_text,
    time_text,
)
from planner.spec import Sharding

MORE_SHOWN = 8


def explanation_parts(explanation: Explanation) -> Iterable[RenderableType]:
    """The parts of the report."""
    yield Text(f"why {explanation.target} is sharded as it is", style="bold")
    yield ""
    memory = f"{bytes_text(explanation.peak_bytes)} per device at the peak"
    if explanation.limit_bytes > 0:
        memory += f", {percent_text(explanation.peak_bytes / explanation.limit_bytes)} of the limit"
    yield _under(
        pairs(
            (
                ("plan", f"{explanation.mode} on {explanation.cluster}, mesh {explanation.mesh}"),
                ("step time", f"{time_text(explanation.step_s)} predicted"),
                ("peak memory", memory),
            )
        )
    )
    for decision in explanation.decisions:
        yield from _decision(decision)
    if explanation.more:
        once = list(dict.fromkeys(explanation.more))
        rest = len(once) - MORE_SHOWN
        lines = once[:MORE_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        yield from section("the same text also means", text_lines(lines))


def _under(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2), expand=False)


def _decision(decision: Decision) -> Iterable[RenderableType]:
    array = array_text(decision.shape, decision.dtype)
    rows = [("array", array), ("sharded as", sharding_text(decision.stored, decision.used))]
    if decision.equal > 1:
        rows.append(("equal ones", f"{decision.equal}, such as repeated layers, decided as one"))
    if decision.shared:
        names = ", ".join(decision.together)
        more = ", ..." if decision.shared > len(decision.together) else ""
        rows.append(
            ("shared with", f"{decision.shared} values with the same sharding: {names}{more}")
        )
    rows += [("dimension " + str(k), _dimension(d)) for k, d in enumerate(decision.dimensions)]
    rows.append(("allowed", f"{decision.strategies} of {decision.possible} shardings"))
    rows.append(("forced by", "; ".join(decision.forced) or _unforced(decision)))
    yield from section(decision.what, pairs(rows))
    yield ""
    yield _under(_alternatives(decision))
    for row in decision.alternatives:
        if row.changes:
            yield from _changes(row)


def _unforced(decision: Decision) -> str:
    less = [a for a in decision.alternatives if a.best is not None and a.best.extra_s < -1e-9]
    if less:
        return "nothing: a cheaper sharding exists, which the search missed"
    return "nothing: no other sharding is cheaper"


def _dimension(dimension: Dimension) -> str:
    now = f"split over {' and '.join(dimension.axes)}" if dimension.axes else "whole"
    free = f"; could be over {' or '.join(dimension.open_to)}" if dimension.open_to else ""
    return f"{dimension.size}, {now}{free}" + (f"; {dimension.why}" if dimension.why else "")


def _alternatives(decision: Decision) -> RenderableType:
    if not decision.alternatives:
        return Text("alternatives: none")
    table = new_table("alternative", ">alone", ">memory", ">with others", ">memory", ">changes")
    for row in decision.alternatives:
        best = row.best
        cells = (
            ("does not fit", "", "")
            if best is None
            else (more_time(best.extra_s), more_bytes(best.extra_bytes), str(row.changed))
        )
        add_row(
            table,
            sharding_text(row.stored, row.used),
            more_time(row.alone.extra_s),
            _memory(row.alone),
            *cells,
        )
    if decision.unpriced:
        rest = f"{decision.unpriced} more expensive one{'s' if decision.unpriced > 1 else ''}"
        add_row(table, rest, *[""] * 5, style="dim")
    return table


def _memory(price: Price) -> str:
    return more_bytes(price.extra_bytes) + ("" if price.fits else " too much")


def _changes(row: Alternative) -> Iterable[RenderableType]:
    """The lines on what an alternative changes elsewhere."""
    yield ""
    yield _under(Text(f"{sharding_text(row.stored, row.used)} also changes", style="dim"))
    lines = [f"{c.what}{_times(c.count)}: {c.before} -> {c.after}" for c in row.changes]
    rest = row.changed - sum(c.count for c in row.changes)
    if rest > 0:
        lines.append(f"and {rest} more")
    yield Padding(text_lines(lines), (0, 0, 0, 4), expand=False)


def _times(count: int) -> str:
    return f" x{count}" if count > 1 else ""


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """The explanation as plain data; a sharding is a list of entries, as in a plan."""
    return {f.name: _plain(getattr(explanation, f.name)) for f in dataclasses.fields(explanation)}


def _plain(value: Any) -> Any:
    if isinstance(value, Sharding):
        return [list(e) if isinstance(e, tuple) else e for e in value.entries]
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {f.name: _plain(getattr(value, f.name)) for f in fields}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value
