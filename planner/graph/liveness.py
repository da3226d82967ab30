"""When each value is in memory: from its producer to its last reader.

Time is the operation index. Values born inside a loop live inside the loop's body; what
a loop reads from outside stays until the loop's last operation. Elementwise results that
are read at once by elementwise operations are assumed fused and take no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph.ir import SCALAR, Graph

PASSES = frozenset({"planner_shard", "sharding_constraint", "optimization_barrier"})
"""Operations whose result is their operand: they move no bytes themselves."""

FUSION_REACH = 64
"""An elementwise result read further away than this many operations is materialised."""


@dataclass(frozen=True, slots=True)
class Interval:
    """``value`` is in memory in [start, end), in operation indices."""

    value: int
    start: int
    end: int


def materialised(graph: Graph, fusable: Sequence[bool], live: Sequence[bool]) -> tuple[bool, ...]:
    """Which values are written to memory rather than fused away.

    A mark is no obstacle to fusion; ``jax.lax.optimization_barrier`` is one.
    """
    out = [v.op == -1 for v in graph.values]
    final = set(graph.outputs)
    heavy = [not f and op.kind not in PASSES for f, op in zip(fusable, graph.ops, strict=True)]
    for op in graph.ops:
        if not live[op.index]:
            continue
        big = heavy[op.index] or op.kind.startswith(("reduce_", "arg", "loop_"))
        for o in op.outputs:
            out[o] = out[o] or big or o in final
        for i in op.inputs:
            if i != SCALAR and (heavy[op.index] or op.index - graph.values[i].op > FUSION_REACH):
                out[i] = True
    for op in graph.ops:  # free to recompute: broadcasts and counters
        if op.kind in ("broadcast_in_dim", "iota"):
            for o in op.outputs:
                out[o] = o in final
    passes = [op for op in graph.ops if op.kind in PASSES and live[op.index]]
    for op in (*passes, *reversed(passes)):  # one array under two names
        stop = op.kind == "optimization_barrier"  # nothing is fused across it
        for i, o in zip(op.inputs, op.outputs, strict=True):
            if i != SCALAR:
                out[i] = out[o] = stop or out[i] or out[o]
    return tuple(out)


def intervals(
    graph: Graph, kept: Sequence[bool], live: Sequence[bool], donated: Sequence[bool]
) -> tuple[Interval, ...]:
    """Live intervals of the values of ``kept``; inputs live all step unless donated.

    A donated input that comes back as an output shares its memory: only one is listed.
    """
    end_of_step = len(graph.ops) + 1
    last = [-1] * len(graph.values)
    for op in graph.ops:
        if live[op.index]:
            for i in op.inputs:
                if i != SCALAR:
                    last[i] = op.index
    _stretch_over_loops(graph, last)
    position = {v: k for k, v in enumerate(graph.inputs)}
    aliased = {graph.outputs[o] for i, o in graph.ties if donated[i]} - set(graph.inputs)
    tied = {graph.inputs[i] for i, _ in graph.ties}
    final = set(graph.outputs)
    out = []
    for value in graph.values:
        if not kept[value.index] or not value.nbytes or value.index in aliased:
            continue
        if value.op >= 0 and not live[value.op]:
            continue
        stays = value.index in final or value.index in tied
        where = position.get(value.index)
        if value.op == -1 and (where is None or not donated[where]):
            stays = True
        stop = end_of_step if stays else last[value.index] + 1
        start = max(value.op, 0)
        if stop > start:
            out.append(Interval(value.index, start, stop))
    return tuple(out)


def _stretch_over_loops(graph: Graph, last: list[int]) -> None:
    """A value that a loop reads from outside lives until the loop ends (in place)."""
    stop = [-1] * len(graph.regions)
    for op in graph.ops:
        region = op.region
        while region > 0:
            stop[region] = op.index
            region = graph.regions[region].parent
    for value in graph.values:
        if last[value.index] < 0:
            continue
        home = graph.ops[value.op].region if value.op >= 0 else 0
        region = graph.ops[last[value.index]].region
        while region > 0 and region != home:
            if graph.regions[region].kind in ("scan", "while"):
                last[value.index] = max(last[value.index], stop[region])
            region = graph.regions[region].parent
