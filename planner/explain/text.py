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


def explanation_parts(found: Explanation) -> Iterable[RenderableType]:
    """The parts of the report."""
    yield Text(f"why {found.target} is sharded as it is", style="bold")
    yield ""
    memory = f"{bytes_text(found.peak_bytes)} per device at the peak"
    if found.limit_bytes > 0:
        memory += f", {percent_text(found.peak_bytes / found.limit_bytes)} of the limit"
    yield _under(
        pairs(
            (
                ("plan", f"{found.mode} on {found.cluster}, mesh {found.mesh}"),
                ("step time", f"{time_text(found.step_s)} predicted"),
                ("peak memory", memory),
            )
        )
    )
    for decision in found.decisions:
        yield from _decision(decision)
    if found.more:
        once = list(dict.fromkeys(found.more))
        rest = len(once) - MORE_SHOWN
        lines = once[:MORE_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        yield from section("the same text also means", text_lines(lines))


def _under(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2), expand=False)


def _decision(found: Decision) -> Iterable[RenderableType]:
    array = array_text(found.shape, found.dtype)
    rows = [("array", array), ("sharded as", sharding_text(found.stored, found.used))]
    if found.equal > 1:
        rows.append(("equal ones", f"{found.equal}, such as repeated layers, decided as one"))
    if found.shared:
        names = ", ".join(found.together)
        more = ", ..." if found.shared > len(found.together) else ""
        rows.append(("shared with", f"{found.shared} values with the same sharding: {names}{more}"))
    rows += [("dimension " + str(k), _dimension(d)) for k, d in enumerate(found.dimensions)]
    rows.append(("allowed", f"{found.strategies} of {found.possible} shardings"))
    rows.append(("forced by", "; ".join(found.forced) or _unforced(found)))
    yield from section(found.what, pairs(rows))
    yield ""
    yield _under(_alternatives(found))
    for row in found.alternatives:
        if row.changes:
            yield from _changes(row)


def _unforced(found: Decision) -> str:
    less = [a for a in found.alternatives if a.best is not None and a.best.extra_s < -1e-9]
    if less:
        return "nothing: a cheaper sharding exists, which the search missed"
    return "nothing: no other sharding is cheaper"


def _dimension(found: Dimension) -> str:
    now = f"split over {' and '.join(found.axes)}" if found.axes else "whole"
    free = f"; could be over {' or '.join(found.open_to)}" if found.open_to else ""
    return f"{found.size}, {now}{free}" + (f"; {found.why}" if found.why else "")


def _alternatives(found: Decision) -> RenderableType:
    if not found.alternatives:
        return Text("alternatives: none")
    table = new_table("alternative", ">alone", ">memory", ">with others", ">memory", ">changes")
    for row in found.alternatives:
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
    if found.unpriced:
        rest = f"{found.unpriced} more expensive one{'s' if found.unpriced > 1 else ''}"
        add_row(table, rest, *[""] * 5, style="dim")
    return table


def _memory(price: Price) -> str:
    return more_bytes(price.extra_bytes) + ("" if price.fits else " too much")


def _changes(row: Alternative) -> Iterable[RenderableType]:
    """What an alternative changes elsewhere."""
    yield ""
    yield _under(Text(f"{sharding_text(row.stored, row.used)} also changes", style="dim"))
    lines = [f"{c.what}{_times(c.count)}: {c.before} -> {c.after}" for c in row.changes]
    rest = row.changed - sum(c.count for c in row.changes)
    if rest > 0:
        lines.append(f"and {rest} more")
    yield Padding(text_lines(lines), (0, 0, 0, 4), expand=False)


def _times(count: int) -> str:
    return f" x{count}" if count > 1 else ""


def explanation_json(found: Explanation) -> dict[str, Any]:
    """The explanation as plain data; a sharding is a list of entries, as in a plan."""
    return {f.name: _plain(getattr(found, f.name)) for f in dataclasses.fields(found)}


def _plain(value: Any) -> Any:
    if isinstance(value, Sharding):
        return [list(e) if isinstance(e, tuple) else e for e in value.entries]
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {f.name: _plain(getattr(value, f.name)) for f in fields}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value
