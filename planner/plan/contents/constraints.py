"""Decides where the executor must constrain a sharding."""

from __future__ import annotations

from planner.cost.reshard import pattern_of
from planner.cost.routes import route
from planner.graph.ir import SCALAR
from planner.plan.behind import behind_transposes
from planner.plan.contents.rows import Constraint
from planner.plan.extract import Extraction
from planner.rules.kernels.regions import REGION
from planner.spec import Sharding

UNHELD = frozenset({"loop_const", "loop_out", "loop_ys", "branch_in", "branch_out"})
"""Operations whose results the executor can't constrain."""


def constraints_of(extraction: Extraction) -> tuple[Constraint, ...]:
    """The constraints that the executor must set: on operands and results of operations that mix
    dimensions, on borders, and wherever a sharding changes."""
    graph, groups = extraction.graph, extraction.priced.analysis.groups
    out: dict[tuple[int, str, int], Constraint] = {}

    def add(op: int, slot: str, position: int, spec: Sharding) -> None:
        short = Sharding.of(spec.entries)
        out.setdefault((op, slot, position), Constraint(op, slot, position, short))

    for link in groups.links:
        if link.operand == -1 or link.op < 0:
            continue
        rank = len(link.src)
        src, dst = extraction.link_digits(link)
        kind = groups.groups[link.b].kind
        if link.operand <= -2:
            lookup = graph.ops[link.op].kind == "gather"  # else Shardy may gather the table
            before = src
            if rank + 1 in src and not lookup:
                split = tuple(b if a == rank + 1 else a for a, b in zip(src, dst, strict=True))
                before = split
                if split != dst:
                    # reduced with this split: otherwise XLA may undo the split of the operands
                    add(link.op, "made", -2 - link.operand, extraction.from_digits(split, rank))
                elif any(b for a, b in zip(src, dst, strict=True) if a == rank + 1):
                    # reduced, then split, which is one reduce-scatter: otherwise Shardy may
                    # move the operands instead
                    whole = [0 if a == rank + 1 else a for a in src]
                    add(link.op, "made", -2 - link.operand, extraction.from_digits(whole, rank))
            elif src != dst:
                # computed with the old sharding, then resharded: otherwise XLA may propagate
                # the new sharding back into an operation that it partitions wrongly
                add(link.op, "made", -2 - link.operand, extraction.from_digits(src, rank))
            if (way := _halfway(extraction, before, dst, link.value)) is not None:
                add(link.op, "after", -2 - link.operand, extraction.from_digits(way, rank))
            add(link.op, "out", -2 - link.operand, extraction.from_digits(dst, rank))
        elif kind == "anchor" or src != dst:
            if src != dst and rank + 1 not in src:
                # constrained where the value is made: otherwise Shardy gives the value, or
                # its later readers, the new sharding
                value = graph.values[link.value]
                held = value.op >= 0 and graph.ops[value.op].kind not in UNHELD
                if held and groups.groups[link.a].kind != "copy":
                    position = graph.ops[value.op].outputs.index(link.value)
                    add(value.op, "out", position, extraction.from_digits(src, rank))
                else:
                    add(link.op, "from", link.operand, extraction.from_digits(src, rank))
            if kind != "copy":
                add(link.op, "in", link.operand, extraction.from_digits(dst, rank))
    for op in graph.ops:
        entry = groups.op_layouts[op.index]
        if op.kernel and op.kind != REGION and entry is not None:  # it runs on these shards
            group, ins, outs = entry
            for slot, values, layouts in (("in", op.inputs, ins), ("made", op.outputs, outs)):
                for k, (v, layout) in enumerate(zip(values, layouts, strict=True)):
                    if v != SCALAR and layout:
                        add(op.index, slot, k, extraction.sharding(group, layout))
        if op.kind in ("loop_carry", "loop_xs") and entry is not None:
            group, _, outs = entry
            if outs[0]:
                add(op.index, "out", 0, extraction.sharding(group, outs[0]))
        if op.kind == "loop_back" and op.inputs[0] != SCALAR and graph.values[op.inputs[1]].splits:
            add(op.index, "in", 0, extraction.value_sharding(op.inputs[1]))
    if extraction.priced.model.cluster.kind != "torus":  # XLA:GPU would not form reduce-scatters
        return tuple(out[place] for place in sorted(out))
    return behind_transposes(graph, groups.op_layouts, out.values())


def _halfway(
    extraction: Extraction, src: tuple[int, ...], dst: tuple[int, ...], value: int
) -> tuple[int, ...] | None:
    """The intermediate sharding of a change that moves some axes and gathers others: all moves are
    done, no gathers. None if there is no such sharding on the way. If one constraint requires both,
    XLA's partitioner gathers the whole value instead."""
    shape, sizes = extraction.graph.values[value].shape, extraction.priced.mesh.sizes
    moves = any(0 < s != d > 0 for s, d in zip(src, dst, strict=True))
    gathers = any(s > 0 == d for s, d in zip(src, dst, strict=True))
    if len(shape) + 1 in src or not (moves and gathers):
        return None
    way = tuple(d or s for s, d in zip(src, dst, strict=True))
    split = [1] * len(shape)
    for digit, size in zip(way, sizes, strict=True):
        if digit:
            split[digit - 1] *= size
    divides = all(n % k == 0 for n, k in zip(shape, split, strict=True))
    permutes = route(pattern_of(src, dst, len(shape))).permutes
    return way if divides and not permutes else None
