"""A plan as text for people: the summary first, then where every number comes from. No jax."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from costmodels.orders import (
    Simulated,
    Work,
    drawn,
    in_ticks,
    named_order,
    order_of_rows,
    simulate,
)
from planner.plan.compiled.option_sets import COUNTED, OFFLOADED
from planner.plan.plan import LARGE, MeshRow, MeshVerdict, Plan
from planner.report.fold import (
    LeafRow,
    common_start,
    fold_collectives,
    fold_leaves,
    is_optimizer_state,
)
from planner.report.layout import (
    add_row,
    new_table,
    pairs,
    plain_text,
    section,
    show,
    text_lines,
)
from planner.report.units import (
    array_text,
    bytes_text,
    count_text,
    limit_text,
    percent_text,
    time_text,
)
from planner.report.verdict import (
    choice_text,
    constants_text,
    devices_text,
    likely_text,
    mesh_text,
    meshes_text,
    proof_text,
)

_HOLDER = re.compile(r"^(.*): ([-+.\de]+) bytes$", re.DOTALL)
_REPLICATED_SHOWN = 5
_BLOCKS = "counts on collectives on SparseCores (compiler options); by default they block"
_PLACES_NAMED = 6
"""Lines that couple examples that are named."""
_STAGES_DRAWN = 8
_LINES_SHOWN = 8
_MESHES_SHOWN = 3
"""Meshes of one verdict of ``_FOLDED`` that have a row; the plan's JSON has all."""
_FOLDED = (MeshVerdict.UNFIT, MeshVerdict.PRUNED)
SCHEDULE_TITLE = (
    "schedule (a row per stage; digits: forward pass of that microbatch, letters: backward pass, "
    "drawn at twice the time; dots: idle)"
)
"""Above the drawing of ``schedule_text``."""


def plan_text(plan: Plan, width: int = 100) -> str:
    """The report as plain ASCII text, ``width`` columns wide, without colour."""
    return plain_text(_parts(plan), width)


def render_plan(plan: Plan, console: Console) -> None:
    """Print the report on a console."""
    show(_parts(plan), console)


def _parts(plan: Plan) -> Iterable[RenderableType]:
    yield Text(f"plan: {plan.mode} on {plan.cluster}", style="bold")
    yield ""
    yield Padding(_summary(plan), (0, 0, 0, 2), expand=False)
    if schedule := schedule_text(plan):
        yield from section(SCHEDULE_TITLE, Text(schedule))
    yield from section("meshes tried", _meshes(plan))
    yield from _inputs(plan)
    if plan.pins:
        yield from section("pins", _pins(plan))
    if plan.compute:
        yield from section("most compute", _compute(plan))
    yield from section("largest activations", _activations(plan))
    yield from section(*_collectives(plan))
    yield from section("peak memory is held by", _holders(plan))
    yield from _replicated(plan)
    yield from section("fallbacks (operations without a rule)", text_lines(plan.fallbacks))
    if plan.notes:
        yield from section("notes", text_lines(plan.notes))
    if plan.confirmed is not None and plan.confirmed.rows:
        yield from section("compiled candidates", _candidates(plan))
    yield from section("search", _search(plan))


def _summary(plan: Plan) -> RenderableType:
    p, s = plan.prediction, plan.search
    memory = f"{bytes_text(p.peak_bytes)} per device at the peak"
    if p.limit_bytes > 0:
        limit = limit_text(p.limit_bytes, p.device_bytes)
        memory += f", {percent_text(p.peak_bytes / p.limit_bytes)} of {limit}"
    return pairs(
        (
            *_whole(plan),
            *([("idle", plan.idle)] if plan.idle else []),
            *([("strategy", plan.strategy)] if plan.strategy else []),
            (
                "mesh",
                f"{plan.mesh} ({devices_text(plan.mesh.num_devices)}): {choice_text(plan)}",
            ),
            (
                "step time",
                f"{time_text(p.step_s)} predicted = {time_text(p.compute_s)} compute + "
                f"{time_text(p.communication_s)} communication - "
                f"{time_text(p.overlapped_s)} overlapped"
                + (f" + {time_text(p.host_s)} to and from the host" if p.host_s else "")
                + _idle_text(plan),
            ),
            *([("likely", likely)] if (likely := likely_text(plan)) else []),
            *([("overlap", _BLOCKS)] if _hides_only_with_options(plan) else []),
            *recipe_lines(plan),
            ("peak memory", memory),
            *([("compiled", _confirmed_text(plan))] if plan.confirmed else []),
            *([("host memory", _host_text(plan))] if p.host_bytes else []),
            ("gap", f"{percent_text(s.gap)}: {proof_text(plan)}"),
            ("fallbacks", str(len(plan.fallbacks)) if plan.fallbacks else "none"),
        )
    )


def _whole(plan: Plan) -> list[tuple[str, str]]:
    """Operations without a rule that take much memory, before all else."""
    large = [line for line in plan.fallbacks if line.endswith(LARGE)]
    if not large:
        return []
    more = f"; {len(large) - 1} more like it, see fallbacks" if len(large) > 1 else ""
    return [("not split", f"{large[0]}{more}")]


def _hides_only_with_options(plan: Plan) -> bool:
    """Whether collectives that count as hidden block as the plan stands."""
    kind, options = plan.cluster.partition(":")[0], plan.compiler_options
    confirmed = plan.confirmed is not None and plan.confirmed.chosen is not None
    counted = kind in COUNTED and options != OFFLOADED and not confirmed
    return counted and plan.prediction.overlapped_s > 0


def recipe_lines(plan: Plan) -> list[tuple[str, str]]:
    """How the step was rewritten: its stages, its microbatches, what it computes again, and what is
    computed in chunks."""
    lines = [("stages", line) for line in plan.staged]
    if plan.microbatches > 1:
        text = f"{plan.microbatches}, one after the other; their gradients are added up"
        if plan.replicas > 1:
            text += f" in {plan.replicas} groups of devices, and reduced once per step"
        if plan.stages > 1:
            name, idle = (plan.schedule or "1F1B").upper(), _ran(plan, plan.microbatches).bubble
            text = f"{plan.microbatches}, {name} through the stages"
            text += f", bubble {percent_text(idle)} where they are equal"
        lines.append(("microbatches", text))
        if plan.coupled:
            text = "of each microbatch, not of the whole batch: "
            text += ", ".join(plan.coupled[:_PLACES_NAMED])
            left = len(plan.coupled) - _PLACES_NAMED
            lines.append(("statistics", text + (f" and {left} more" if left > 0 else "")))
    elif plan.replicas > 1:
        text = f"of {plan.replicas} groups of devices, each added up over the step's loops, and "
        lines.append(("gradients", f"{text}reduced once per step"))
    if plan.pad_batch:
        fed = (x for x in plan.inputs if not (x.tied or x.frozen) and x.shape)
        examples = min((x.shape[0] for x in fed), default=0)
        more = percent_text(plan.pad_batch / max(examples, 1) - 1.0)
        lines.append(
            ("batch", f"padded to {plan.pad_batch} examples, {more} more; sums leave these out")
        )
    if plan.remat != "none":
        again = plan.recomputed or ("nothing to compute again",)
        lines += [("remat", f"{plan.remat}: {line}") for line in again]
    if plan.chunks > 1:
        none = ("none: no product is that large, or its rows need each other",)
        lines += [("chunks", line) for line in plan.chunked or none]
    return lines


def schedule_text(plan: Plan) -> str:
    """The order of the passes of a plan with stages, drawn; empty without stages, or where there
    are too many to draw."""
    if not 1 < plan.stages <= _STAGES_DRAWN:
        return ""
    shown = plan.microbatches if plan.order else min(plan.microbatches, 2 * plan.stages)
    ticks = shown + plan.stages - 1
    left = plan.microbatches - shown
    drawing = drawn(_ran(plan, shown), columns=3 * ticks)
    return drawing + (f"\n{left} more microbatches run the same way between these" if left else "")


def _ran(plan: Plan, microbatches: int) -> Simulated:
    """The schedule of a plan with equal stages; a backward pass takes twice a forward pass."""
    if not plan.schedule:
        return in_ticks(plan.stages, microbatches, Work(1.0, 2.0))
    if plan.order:
        order = order_of_rows(plan.schedule, plan.order)
    else:
        order = named_order(plan.schedule, plan.stages, microbatches)
    one = Work(1.0, 1.0, 1.0) if order.splits_weights else Work(1.0, 2.0)
    return simulate(order, [one] * len(order.place))


def _idle_text(plan: Plan) -> str:
    """What the busiest stage waits for the others, where stages are programs of their own."""
    p = plan.prediction
    idle_s = p.step_s - (p.compute_s + p.communication_s - p.overlapped_s + p.host_s)
    return f" + {time_text(idle_s)} idle" if plan.schedule and idle_s > 0 else ""


def _confirmed_text(plan: Plan) -> str:
    """Compiled step time and peak memory, or why the plan is not confirmed."""
    said = plan.confirmed
    row = said.chosen if said is not None else None
    if said is None or row is None:
        return f"not confirmed: {(said.note if said else '').removeprefix('not confirmed: ')}"
    return (
        f"{time_text(row.step_s)}, peak {bytes_text(row.peak_bytes)} ({said.compiler}); best of "
        f"{len(said.rows)} candidates"
    )


def _candidates(plan: Plan) -> RenderableType:
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


def _host_text(plan: Plan) -> str:
    count = sum(leaf.memory != "device" for leaf in plan.inputs)
    arrays = "1 array of the state" if count == 1 else f"{count} arrays of the state"
    return f"{bytes_text(plan.prediction.host_bytes)} per device between uses, {arrays}"


def _meshes(plan: Plan) -> Table:
    table = new_table("mesh", ">step time", ">lower bound", ">peak memory", "verdict")
    order = sorted(
        plan.meshes,
        key=lambda m: (
            m.verdict is not MeshVerdict.CHOSEN,
            m.verdict is MeshVerdict.UNFIT,
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


def _inputs(plan: Plan) -> Iterable[RenderableType]:
    state = [leaf for leaf in plan.inputs if leaf.tied]
    parts = (
        ("parameters", [leaf for leaf in state if not is_optimizer_state(leaf.path)]),
        ("optimizer state", [leaf for leaf in state if is_optimizer_state(leaf.path)]),
        ("frozen weights", [leaf for leaf in plan.inputs if leaf.frozen]),
        (
            "batch and other inputs",
            [leaf for leaf in plan.inputs if not leaf.tied and not leaf.frozen],
        ),
    )
    for title, leaves in parts:
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


def _pins(plan: Plan) -> Table:
    table = new_table("pin", "asked", "honored", ">arrays")
    for row in plan.pins:
        add_row(table, row.pin, row.asked, row.how, f"x{row.arrays}")
    return table


def _activations(plan: Plan) -> RenderableType:
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


def _compute(plan: Plan) -> RenderableType:
    table = new_table("line", ">compute", ">share")
    for row in plan.compute[:_LINES_SHOWN]:
        share = percent_text(row.time_s / max(plan.prediction.compute_s, 1e-300))
        add_row(table, row.source or "no line", time_text(row.time_s), share)
    return table


def _collectives(plan: Plan) -> tuple[str, RenderableType]:
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


def _holders(plan: Plan) -> RenderableType:
    rows = []
    for holder in plan.prediction.peak_holders:
        found = _HOLDER.match(holder)
        rows.append((bytes_text(float(found[2])), found[1]) if found else ("", holder))
    return pairs(rows) if rows else Text("not recorded")


def _replicated(plan: Plan) -> Iterable[RenderableType]:
    """State and frozen weights that every device holds whole; says nothing on one device."""
    if plan.mesh.num_devices < 2:
        return
    kept = [leaf for leaf in plan.inputs if leaf.tied or leaf.frozen]
    whole = [leaf for leaf in kept if not leaf.spec.axes]
    everything = sum(leaf.nbytes_per_device for leaf in kept)
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


def _search(plan: Plan) -> RenderableType:
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
