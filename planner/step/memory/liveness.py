"""When each value is in memory: from its producer to its last reader.

Time is the operation index. Values made inside a loop live inside the loop's body. Values
that a loop reads from outside stay until the loop's last operation. Elementwise results
that elementwise operations read soon after are assumed fused and take no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph.fetches import fetches
from planner.graph.ir import PRODUCTS, SCALAR, Graph, Op
from planner.space.buffer import Memory
from planner.step.memory.copies import on_device
from planner.step.memory.materialized import Written
from planner.step.op_kinds import OVERWRITES, extents, writes

PASSES = frozenset({"planner_shard", "region_edge", "sharding_constraint", "optimization_barrier"})
"""Operations whose result is their operand: they move no bytes themselves."""

FUSION_REACH = 64
"""An elementwise result read further away than this many operations is materialized."""


@dataclass(frozen=True, slots=True)
class Interval:
    """``value`` occupies ``pool`` in [start, end), in operation indices.

    ``when``: only if the array is stored in this memory between steps; None: in any case.
    """

    value: int
    start: int
    end: int
    when: Memory | None = None
    pool: Memory = Memory.DEVICE


def materialised(graph: Graph, fusable: Sequence[bool], live: Sequence[bool]) -> tuple[bool, ...]:
    """Which values are written to memory rather than fused away.

    A mark does not prevent fusion; ``jax.lax.optimization_barrier`` does.
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
    graph: Graph,
    written_values: Written,
    live: Sequence[bool],
    donated: Sequence[bool],
    hosted: frozenset[int] = frozenset(),
) -> tuple[Interval, ...]:
    """Live intervals of the values that are written; inputs live for the whole step unless donated.

    A donated input and the output that replaces it share memory: only one is listed. Inputs that
    are ``hosted``, and their new values, are listed for both memories.
    """
    end_of_step = len(graph.ops) + 1
    last = [reads[-1] if reads else -1 for reads in written_values.reads]
    overwritten = _overwritten(graph, written_values, last)
    first = _stretch_over_loops(graph, written_values, last)
    position = {v: k for k, v in enumerate(graph.inputs)}
    aliased = {graph.outputs[o] for i, o in graph.ties if donated[i]} - set(graph.inputs)
    final = set(graph.outputs)
    updated = [new for old, new in graph.next_values.items() if old in hosted]
    choice = hosted.union(updated)
    out = []
    for value in graph.values:
        if not written_values.kept[value.index] or not value.nbytes or value.index in aliased:
            continue
        if value.op >= 0 and not live[value.op]:
            continue
        stays = value.index in final or value.carried
        where = position.get(value.index)
        if value.op == -1 and (where is None or not donated[where]):
            stays = True
        stop = last[value.index] + (value.index not in overwritten)
        stop = end_of_step if stays else stop
        start = 0 if value.op < 0 else first.get(value.index, written_values.time[value.op])
        if stop > start:
            when = Memory.DEVICE if value.index in choice else None
            pool = Memory.HOST if value.host else Memory.DEVICE
            out.append(Interval(value.index, start, stop, when, pool))
    copies = fetches(graph, live, sorted(hosted)) if hosted else {}
    for index, spans in on_device(graph, written_values, live, copies).items():
        out += [Interval(index, start, stop, Memory.HOST) for start, stop in spans]
        out.append(Interval(index, 0, end_of_step, Memory.HOST, Memory.HOST))
    for index in updated:
        if index not in hosted:
            at = written_values.time[graph.values[index].op]
            reads = [  # of the step itself
                t for t in written_values.reads[index] if t < len(graph.ops)
            ]
            until = max([at, *reads]) if last[index] >= len(graph.ops) else max(at, last[index])
            out.append(Interval(index, first.get(index, at), until + 1, Memory.HOST))
            if index not in aliased:
                out.append(Interval(index, at, end_of_step, Memory.HOST, Memory.HOST))
    return tuple(out)


def _overwritten(graph: Graph, written_values: Written, last: Sequence[int]) -> set[int]:
    """Values that their last reader overwrites with its result."""
    out: set[int] = set()
    taken: set[int] = set()
    fixed = set(graph.inputs) | set(graph.outputs)
    for v in graph.values:
        at = last[v.index]
        if not 0 <= at < len(graph.ops) or v.index in fixed or v.op < 0:
            continue
        op = graph.ops[written_values.order[at]]
        if op.kind in PRODUCTS or writes(op) or graph.ops[v.op].region != op.region:
            continue
        if v.host or graph.changes_memory(op):
            continue
        if written_values.normalizes and _normalizes(graph, written_values, op, v.index):
            continue
        for o in op.outputs:
            if written_values.kept[o] and o not in taken and graph.values[o].nbytes == v.nbytes:
                taken.add(o)
                out.add(v.index)
                break
    return out


def _normalizes(graph: Graph, written_values: Written, op: Op, value: int) -> bool:
    """Whether an operation's kernel reads a value and a reduction of its rows: XLA:GPU computes
    both in one Triton kernel, which does not overwrite its operands
    (https://openxla.org/xla/gpu_architecture, softmax and norms)."""
    rows = {s for i in op.inputs if i != SCALAR for s in written_values.sources[i]}
    for s in rows:  # such a kernel reads no slices of stacks and no results of scatters
        maker = graph.values[s].op
        outside = maker < 0 or graph.ops[maker].region != op.region
        if outside and graph.values[s].nbytes >= graph.values[value].nbytes:
            return False
        if maker >= 0 and graph.ops[maker].kind in OVERWRITES:
            return False
    waiting = list(rows)
    while waiting:
        maker = graph.values[waiting.pop()].op
        if maker < 0 or graph.ops[maker].region != op.region:
            continue
        sums = graph.ops[maker]
        of = sums.inputs[0] if sums.kind.startswith("reduce_") else SCALAR
        if of == SCALAR or not _by_rows(
            graph.values[of].shape, graph.values[sums.outputs[0]].shape
        ):
            continue
        if value in written_values.sources[of]:
            return True
        waiting += written_values.sources[of].keys() - rows
        rows.update(written_values.sources[of])
    return False


def _by_rows(shape: Sequence[int], out: Sequence[int]) -> bool:
    """Whether a reduction from ``shape`` to ``out`` is along the last dimension or none, without
    regard to dimensions of size 1."""
    long, short = ([n for n in sizes if n != 1] for sizes in (shape, out))
    return short in (long, long[:-1])


def _stretch_over_loops(graph: Graph, written_values: Written, last: list[int]) -> dict[int, int]:
    """Extend values that take memory for a whole loop: operands from outside, and stacked results.

    Lengthens ``last`` in place; returns when each stack begins: with the loop that fills it.
    """
    begin, stop = extents(graph, written_values.time)
    for value in graph.values:
        home = graph.ops[value.op].region if value.op >= 0 else 0
        for at in written_values.reads[value.index][-1:]:
            region = graph.ops[written_values.order[at]].region if at < len(graph.ops) else 0
            while region > 0 and region != home:
                if graph.regions[region].kind in ("scan", "while"):
                    last[value.index] = max(last[value.index], stop[region])
                region = graph.regions[region].parent
    first: dict[int, int] = {}
    body = 0
    earliest: dict[tuple[object, ...], int] = {}
    for op in graph.ops:
        if op.kind == "loop_back":
            body = op.region
        elif op.kind == "loop_ys":
            inner = graph.values[op.inputs[0]].op if op.inputs[0] != SCALAR else -1
            region = graph.ops[inner].region if inner >= 0 else body
            if region > 0 and graph.regions[region].parent == op.region:
                stacked = graph.values[op.outputs[0]]
                first[stacked.index] = begin[region]
                kind = (stacked.shape, stacked.dtype, op.region)
                earliest[kind] = min(begin[region], earliest.get(kind, begin[region]))
    if written_values.merges:  # one kernel initializes all stacks of a shape
        for index in first:
            stack = graph.values[index]
            first[index] = earliest[stack.shape, stack.dtype, graph.ops[stack.op].region]
    return first
