"""When copies of arrays in host memory are on the device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from planner.graph.fetches import Span
from planner.graph.ir import SCALAR, Graph
from planner.step.memory.materialized import Written
from planner.step.op_kinds import VIEWS, extents

_SAME = VIEWS | {"optimization_barrier"}


def on_device(
    graph: Graph,
    written_values: Written,
    live: Sequence[bool],
    copies: Mapping[int, Sequence[Span]],
) -> dict[int, list[Span]]:
    """When copies of ``fetches`` are on the device: [start, end) in moments of ``written_values``.

    A copy is read by the kernels that compute from it, which may run later than the operations that
    read it in the trace. A copy that a loop reads stays until the loop ends.
    """
    if not copies:
        return {}
    begin, stop = extents(graph, written_values.time)
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    via: dict[int, frozenset[tuple[int, int]]] = {}

    def read(tags: Iterable[tuple[int, int]], start: int, end: int) -> None:
        for tag in tags:
            first[tag] = min(start, first.get(tag, start))
            last[tag] = max(end, last.get(tag, end))

    for op in graph.ops:
        if not live[op.index]:
            continue
        tags = [_tags(i, op.index, copies, via) for i in op.inputs]
        if not any(tags):
            continue
        if op.kind in _SAME:
            via.update((o, t) for o, t in zip(op.outputs, tags, strict=False))
            continue
        union = frozenset[tuple[int, int]]().union(*tags)
        written = [o for o in op.outputs if written_values.kept[o]]
        via.update((o, union) for o in op.outputs if not written_values.kept[o])
        if written or not op.outputs:
            start = end = written_values.time[op.index]
            region = op.region
            while region > 0:
                start, end = min(start, begin[region]), max(end, stop[region])
                region = graph.regions[region].parent
            read(union, start, end)
    for o in graph.outputs:
        read(via.get(o, ()), len(graph.ops), len(graph.ops))
    return {
        value: [
            (first[value, k], last[value, k] + 1) for k in range(len(spans)) if (value, k) in first
        ]
        for value, spans in copies.items()
    }


def _tags(
    value: int,
    op: int,
    copies: Mapping[int, Sequence[Span]],
    via: Mapping[int, frozenset[tuple[int, int]]],
) -> frozenset[tuple[int, int]]:
    """The copies that an operand of an operation is computed from: (array, index of the copy)."""
    if value == SCALAR or value not in copies:
        return via.get(value, frozenset())
    return frozenset({(value, bisect_left([span[1] for span in copies[value]], op))})
