"""Layout of reports on a terminal or as plain text: sections and tables. No jax."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.box import Box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_RULES = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def plain_text(parts: Iterable[RenderableType], width: int) -> str:
    """Parts of a report as plain ASCII text, ``width`` columns wide, without color."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
    )
    show(parts, console)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def show(parts: Iterable[RenderableType], console: Console) -> None:
    """Print parts of a report on a console."""
    for part in parts:
        console.print(part, markup=False, highlight=False)


def section(title: str, body: RenderableType) -> Iterable[RenderableType]:
    """A blank line, a title, and the indented body."""
    yield ""
    yield Text(title, style="bold")
    yield Padding(body, (0, 0, 0, 2), expand=False)


def new_table(*columns: str) -> Table:
    """A table with a rule below its header. A column named ">..." is for numbers, one named "<..."
    for names that stay on one line."""
    table = Table(
        box=_RULES,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        collapse_padding=True,
        header_style="dim",
    )
    for name in columns:
        if name.startswith(">"):
            table.add_column(Text(name[1:]), justify="right", no_wrap=True)
        elif name.startswith("<"):
            table.add_column(Text(name[1:]), no_wrap=True)
        else:
            table.add_column(Text(name), overflow="fold")
    return table


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """Add cells of plain text."""
    table.add_row(*(Text(cell) for cell in cells), style=style)


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and descriptions in two columns."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def text_lines(lines: Sequence[str]) -> RenderableType:
    """One line per text, or "none"."""
    return Text("\n".join(lines) if lines else "none", overflow="fold")
