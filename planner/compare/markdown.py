"""What differs between two plans as Markdown, for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planner.compare.difference import Difference, Exchange
from planner.compare.text import figure_text
from planner.report.units import bytes_text, count_text, time_text

SHOWN = 20
"""Rows of a table at most."""


def difference_markdown(difference: Difference, before: str, after: str) -> str:
    """A heading, the figures, and a table of shardings and one of collectives that differ."""
    return "\n".join(_lines(difference, before, after)) + "\n"


def _lines(difference: Difference, before: str, after: str) -> Iterator[str]:
    yield f"### Plan: {_code(before)} to {_code(after)}"
    yield ""
    if difference.same:
        yield "The same plan."
        return
    if not difference.same_step:
        yield f"The plans are for different steps or shapes: {_code(difference.step_change)}"
        yield ""
    rows = [(s.name, f"{s.before} to {s.after}") for s in difference.settings]
    rows += [(f.name, figure_text(f).replace(" -> ", " to ")) for f in difference.figures]
    yield from _table(("", "change"), rows)
    count = sum(m.count for m in difference.moved)
    if count:
        yield f"**{count} of {difference.arguments} arguments are sharded otherwise**"
        yield ""
        yield from _table(
            ("path", "before", "after", "count"),
            [
                (_code(m.path), _code(m.before), _code(m.after), str(m.count))
                for m in difference.moved
            ],
        )
    if difference.exchanges:
        yield "**Collectives that differ**"
        yield ""
        head = ("collective", "over", "runs", "bytes", "time", "caused by")
        yield from _table(head, [_exchange(e) for e in difference.exchanges])
    if difference.fields:
        yield f"Other fields that differ: {', '.join(map(_code, difference.fields))}"


def _exchange(row: Exchange) -> tuple[str, ...]:
    where = f"{row.cause} ({row.source})" if row.source else row.cause
    return (
        row.kind,
        ", ".join(row.axes),
        _both(map(count_text, row.count)),
        _both(map(bytes_text, row.payload_bytes)),
        _both(map(time_text, row.time_s)),
        _code(where),
    )


def _both(texts: Iterable[str]) -> str:
    before, after = texts
    return before if before == after else f"{before} to {after}"


def _code(text: str) -> str:
    return f"`{text}`" if text else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows[:SHOWN]):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""
    if len(rows) > SHOWN:
        yield f"and {len(rows) - SHOWN} more"
        yield ""
