"""The values that hold the memory at a moment."""

from __future__ import annotations

from planner.cost.peak import buffer_bytes
from planner.graph.ir import RAGGED, Graph, Op, Role
from planner.plan.extract import Extraction
from planner.report.fold import common_path, pattern
from planner.report.shortage import Holder
from planner.space.buffer import Buffer, Port, in_pool

HOLDERS_SHOWN = 6


def holders(extraction: Extraction, moment: int) -> tuple[Holder, ...]:
    """The values that hold the most bytes per device at a moment; equal ones share a row."""
    analysis, graph = extraction.priced.analysis, extraction.graph
    position = {v: k for k, v in enumerate(graph.inputs)}
    rows: dict[tuple[object, ...], list[tuple[str, float]]] = {}
    buffers = in_pool(analysis.buffers)
    for b, nbytes in zip(buffers, buffer_bytes(extraction, buffers), strict=True):
        if not b.at(moment) or not nbytes:
            continue
        value = graph.values[b.value]
        where = position.get(b.value)
        if value.op >= 0:
            op = graph.ops[value.op]
            kind, name = "activation", f"{op.kind} {value} ({op.source or 'no line'})"
        elif where is None:
            kind, name = "constant", str(value)
        else:
            kind, name = "input", graph.input_paths[where]
            if value.carried:
                kind = "optimizer state" if value.role is Role.MOMENT else "parameter"
                kind = "row per example" if value.role is Role.EXAMPLES else kind
            elif value.role is Role.FROZEN:
                kind = "frozen weights"
        kind = "gathered copy" if b.port is Port.GATHERED else kind
        shape: object = name if where is None else (pattern(name), value.shape, value.dtype)
        grouped = _of_groups(graph, b)
        if grouped is not None:
            kind, times = "copies", round(b.nbytes / value.nbytes)
            shape = name = (
                f"{value} once for each of {times} groups of {grouped.kind} "
                f"({grouped.source or 'no line'}), "
                "masked, as the compiler makes them; a grouped product in Pallas needs none"
            )
        rows.setdefault((kind, shape), []).append((name, nbytes))
    all_holders = [
        Holder(
            str(kind),
            same[0][0] if isinstance(shape, str) else common_path([name for name, _ in same]),
            len(same),
            sum(nbytes for _, nbytes in same),
        )
        for (kind, shape), same in rows.items()
    ]
    all_holders.sort(key=lambda h: (-h.nbytes, h.kind, h.name))
    rest = all_holders[HOLDERS_SHOWN:]
    if not rest:
        return tuple(all_holders)
    count = sum(h.count for h in rest)
    return (
        *all_holders[:HOLDERS_SHOWN],
        Holder("", "smaller ones", count, sum(h.nbytes for h in rest)),
    )


def _of_groups(graph: Graph, b: Buffer) -> Op | None:
    """The grouped product whose masked copies of an operand a buffer holds, or None."""
    if b.value < 0 or b.nbytes < 2 * graph.values[b.value].nbytes:
        return None
    return next((op for op in graph.ops if op.kind in RAGGED and b.value in op.inputs), None)


def moment_text(extraction: Extraction, moment: int) -> str:
    """The operation and the source line at a moment."""
    ops = extraction.graph.ops
    if moment >= len(ops):
        return "the end of the step"
    op = ops[moment]
    return f"{op.kind} ({op.source or 'no line'})"
