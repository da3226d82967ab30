"""The tables of a plan's report: meshes, arrays, compute, collectives, memory, the search."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.plan.contents.rows import MeshRow, MeshVerdict
from planner.plan.plan import Plan
from planner.report.fold import (
    KINDS,
    LeafRow,
    common_start,
    fold_collectives,
    fold_leaves,
    kind_of,
)
from planner.report.layout import add_row, new_table, pairs, section
from planner.report.units import (
    array_text,
    bytes_text,
    count_text,
    percent_text,
    time_text,
)
from planner.report.verdict import WITHOUT_PLAN, constants_text, mesh_text, meshes_text

_HOLDER = re.compile(r"^(.*): ([-+.\de]+) bytes$", re.DOTALL)
_REPLICATED_SHOWN = 5
_LINES_SHOWN = 8
_MESHES_SHOWN = 3
"""Most rows for meshes with the same verdict of ``_FOLDED``; the plan's JSON has all."""
_FOLDED = (MeshVerdict.UNFIT, MeshVerdict.UNSEARCHED, MeshVerdict.PRUNED)


def candidates(plan: Plan) -> RenderableType:
    """All compiled candidates."""
    said = plan.confirmed
    table = new_table("mesh", "lowering", ">predicted", ">compiled", ">sent", ">peak", "verdict")
    for row in said.rows if said is not None else ():
        table.add_row(
            row.mesh,
            row.lowering,
            time_text(row.predicted_s),
            time_text(row.step_s) if row.step_s else "",
            bytes_text(row.sent_bytes),
            bytes_text(row.peak_bytes),
            row.verdict,
        )
    return table


def meshes(plan: Plan) -> Table:
    """The meshes of the search; those that do not fit or are pruned are folded."""
    table = new_table("mesh", ">step time", ">lower bound", ">peak memory", "verdict")
    order = sorted(
        plan.meshes,
        key=lambda m: (
            m.verdict is not MeshVerdict.CHOSEN,
            m.verdict in WITHOUT_PLAN,
            m.cost_s < 0,
            m.cost_s,
            m.lower_bound_s,
        ),
    )
    every, shown = Counter(m.verdict for m in order), Counter[MeshVerdict]()
    folded: dict[MeshVerdict, list[MeshRow]] = {}
    for m in order:
        shown[m.verdict] += 1
        many = m.verdict in _FOLDED and every[m.verdict] > _MESHES_SHOWN + 1
        if many and shown[m.verdict] > _MESHES_SHOWN:
            folded.setdefault(m.verdict, []).append(m)
            continue
        add_row(
            table,
            m.mesh,
            time_text(m.cost_s) if m.cost_s >= 0 else "-",
            time_text(m.lower_bound_s),
            bytes_text(m.peak_bytes) if m.peak_bytes >= 0 else "-",
            mesh_text(m, plan),
            style="green" if m.verdict is MeshVerdict.CHOSEN else "",
        )
    for rows in folded.values():
        least = min(rows, key=lambda m: m.lower_bound_s)
        add_row(
            table,
            f"{len(rows)} more",
            "-",
            f"{time_text(least.lower_bound_s)} or more",
            "-",
            meshes_text(rows, plan),
        )
    return table


def inputs(plan: Plan) -> Iterable[RenderableType]:
    """The arguments by kind: parameters, optimizer state, frozen weights, the batch."""
    for title in KINDS:
        leaves = [leaf for leaf in plan.inputs if kind_of(leaf) == title]
        if leaves:
            total = sum(leaf.nbytes_per_device for leaf in leaves)
            rows = fold_leaves(leaves)
            start = common_start([row.path for row in rows])
            where = f", all under {start}" if start else ""
            yield from section(
                f"{title}: {bytes_text(total)} per device{where}", _leaves(rows, len(start))
            )


def _leaves(rows: Sequence[LeafRow], skip: int) -> Table:
    used = any(row.leaf.used_as is not None for row in rows)
    away = any(row.leaf.memory != "device" for row in rows)
    columns = [*(["used as"] if used else []), *(["in"] if away else [])]
    table = new_table("path", "array", "stored as", *columns, ">each", ">count")
    for row in rows:
        leaf = row.leaf
        other = ["" if leaf.used_as is None else str(leaf.used_as)] if used else []
        other += [leaf.memory] if away else []
        add_row(
            table,
            row.path[skip:],
            array_text(leaf.shape, leaf.dtype),
            str(leaf.spec),
            *other,
            bytes_text(leaf.nbytes_per_device),
            f"x{row.count}",
        )
    return table


def pins(plan: Plan) -> Table:
    """Pins, and how each was honored."""
    table = new_table("pin", "asked", "honored", ">arrays")
    for row in plan.pins:
        add_row(table, row.pin, row.asked, row.how, f"x{row.arrays}")
    return table


def activations(plan: Plan) -> RenderableType:
    """The largest activations."""
    if not plan.activations:
        return Text("none")
    table = new_table("operation", "line", "array", "sharded as", ">per device")
    for a in plan.activations:
        add_row(
            table,
            a.name,
            a.source,
            array_text(a.shape, a.dtype),
            str(a.spec),
            bytes_text(a.nbytes_per_device),
        )
    return table


def compute(plan: Plan) -> RenderableType:
    """The lines with the most compute time."""
    table = new_table("line", ">compute", ">share")
    for row in plan.compute[:_LINES_SHOWN]:
        share = percent_text(row.time_s / max(plan.prediction.compute_s, 1e-300))
        add_row(table, row.source or "no line", time_text(row.time_s), share)
    return table


def collectives(plan: Plan) -> tuple[str, RenderableType]:
    """Title and table of the collectives, folded by what causes them."""
    sums = fold_collectives(plan.collectives)
    if not sums:
        return "collectives", Text("none: the devices never talk")
    table = new_table("collective", "over", ">count", ">each", ">time in all", "line", "caused by")
    for s in sums:
        add_row(
            table,
            s.kind,
            ",".join(s.axes),
            count_text(s.count),
            bytes_text(s.payload_bytes),
            time_text(s.time_s),
            s.source,
            s.cause,
        )
    total = math.fsum(s.time_s for s in sums)
    runs = sum(s.count for s in sums)
    return f"collectives: {count_text(runs)} a step, {time_text(total)} in all", table


def holders(plan: Plan) -> RenderableType:
    """What holds the memory at the peak."""
    rows = []
    for holder in plan.prediction.peak_holders:
        match = _HOLDER.match(holder)
        rows.append((bytes_text(float(match[2])), match[1]) if match else ("", holder))
    return pairs(rows) if rows else Text("not recorded")


def replicated(plan: Plan) -> Iterable[RenderableType]:
    """State and frozen weights that every device holds whole; empty on one device."""
    if plan.mesh.num_devices < 2:
        return
    state_leaves = [leaf for leaf in plan.inputs if leaf.tied or leaf.frozen]
    whole = [leaf for leaf in state_leaves if not leaf.spec.axes]
    everything = sum(leaf.nbytes_per_device for leaf in state_leaves)
    total = sum(leaf.nbytes_per_device for leaf in whole)
    if not whole:
        yield from section("replicated parameters and state", Text("none"))
        return
    rows: list[LeafRow] = sorted(fold_leaves(whole), key=lambda row: -row.nbytes)
    table = new_table("path", "array", ">each", ">count", ">in all")
    for row in rows[:_REPLICATED_SHOWN]:
        leaf = row.leaf
        add_row(
            table,
            row.path,
            array_text(leaf.shape, leaf.dtype),
            bytes_text(leaf.nbytes_per_device),
            f"x{row.count}",
            bytes_text(row.nbytes),
        )
    if len(rows) > _REPLICATED_SHOWN:
        rest = sum(row.nbytes for row in rows[_REPLICATED_SHOWN:])
        add_row(
            table, f"{len(rows) - _REPLICATED_SHOWN} smaller ones", "", "", "", bytes_text(rest)
        )
    yield from section(
        f"replicated parameters and state: {bytes_text(total)} of {bytes_text(everything)} "
        "per device",
        table,
    )


def search_lines(plan: Plan) -> RenderableType:
    """The search, its proof, and the source of the constants."""
    s = plan.search
    rows = [
        ("name", s.name),
        ("cost", time_text(s.cost_s)),
        ("lower bound", time_text(s.lower_bound_s)),
        ("gap", percent_text(s.gap)),
        ("reason", s.reason),
    ]
    if plan.planning_s > 0:
        rows.append(("planning took", time_text(plan.planning_s)))
    rows.append(("constants", constants_text(plan)))
    return pairs(rows)
