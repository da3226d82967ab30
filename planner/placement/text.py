"""The placement of parameters as a text report and as plain data. No jax."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.placement.case import SPMD, WHOLE
from planner.placement.choice import Placed, Placement
from planner.plan.plan import Plan
from planner.report.layout import add_row, new_table, text_lines
from planner.report.units import bytes_text, time_text

_WHERE = {SPMD: "SPMD", "ps": "servers, by rows", WHOLE: "servers, whole"}


def placement_parts(
    placement: Placement, others: Sequence[tuple[str, int]]
) -> Iterable[RenderableType]:
    """The parts of the report.

    Args:
        placement: the placement to report.
        others: the parameters that it does not name, all under SPMD: (path, bytes).
    """
    served = sum(leaf.place != SPMD for leaf in placement.leaves)
    total = len(placement.leaves) + len(others)
    yield Text(f"placement: {served} of {total} parameters on parameter servers", style="bold")
    if placement.leaves:
        table = new_table(
            *("parameter", ">size", "lies", ">rows", ">bytes", ">on servers", ">under SPMD", "why")
        )
        for leaf in placement.leaves:
            add_row(table, *_cells(leaf), style="" if leaf.place == SPMD else "green")
        yield ""
        yield Padding(table, (0, 0, 0, 2), expand=False)
    yield ""
    yield Padding(text_lines(_legend(placement, others)), (0, 0, 0, 2), expand=False)


def placement_json(placement: Placement, plan: Plan) -> str:
    """A JSON object with ``placement``, a list of objects with the fields of ``Placed``, and
    ``plan``. Fields of ``Placed`` that are infinite or None are null."""
    entries = ",\n".join(f"  {json.dumps(_plain(leaf))}" for leaf in placement.leaves)
    listed = f"[\n{entries}\n]" if entries else "[]"
    return f'{{"placement": {listed},\n"plan": {plan.to_json().strip()}}}\n'


def without_placement(plan: Plan, placement: Placement) -> Plan:
    """The plan without the notes that repeat ``placement_parts``."""
    said = set(map(str, placement.leaves))
    return dataclasses.replace(plan, notes=tuple(n for n in plan.notes if n not in said))


def _plain(leaf: Placed) -> dict[str, Any]:
    fields = dataclasses.asdict(leaf)
    endless = [k for k, v in fields.items() if isinstance(v, float) and math.isinf(v)]
    return {**fields, **dict.fromkeys(endless)}


def _cells(leaf: Placed) -> tuple[str, ...]:
    by_rows = leaf.rows > 0
    under = leaf.spmd_s
    return (
        leaf.path,
        bytes_text(leaf.nbytes),
        _WHERE[leaf.place],
        str(leaf.rows) if by_rows else "-",
        bytes_text(leaf.row_bytes) if leaf.row_bytes else "-",
        time_text(leaf.served_s),
        "-" if under is None else "no plan" if math.isinf(under) else time_text(max(under, 0.0)),
        _why(leaf),
    )


def _why(leaf: Placed) -> str:
    if leaf.spmd_s is None:
        return leaf.reason if math.isinf(leaf.served_s) else "requested"
    if math.isinf(leaf.spmd_s):
        return "nothing fits with it under SPMD"
    gap = time_text(abs(leaf.served_s - max(leaf.spmd_s, 0.0)))
    return f"{gap} a step less" if math.isfinite(leaf.served_s) else "no host link in the catalog"


def _legend(placement: Placement, others: Sequence[tuple[str, int]]) -> list[str]:
    lines = []
    if any(leaf.rows for leaf in placement.leaves):
        lines.append("rows, bytes: the most that a batch reads, where every index is another row")
    if any(math.isfinite(leaf.served_s) for leaf in placement.leaves):
        lines.append("on servers: seconds a step that pulls, pushes and updates add")
    if any(leaf.spmd_s is not None for leaf in placement.leaves):
        lines.append("under SPMD: seconds a step that the plan is longer with it")
    if any(leaf.place != SPMD for leaf in placement.leaves):
        lines.append("what comes from servers is [1] in the plan, rows with their numbers [2]")
    if others:
        nbytes = bytes_text(sum(size for _, size in others))
        which = "the other" if placement.leaves else "all"
        lines.append(f"{which} {len(others)} ({nbytes}) under SPMD: [0]['params'] in the plan")
    return lines
