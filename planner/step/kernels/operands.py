"""The float32 values that are sent as bfloat16, because products read them as bfloat16.

A TPU multiplies float32 operands as bfloat16 unless the program requests more precision, and
XLA:TPU converts such an operand before it is gathered or exchanged, not afterwards. Partial sums of
products are float32 and are sent as such.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from costmodels import Device
from planner.graph.ir import PRODUCTS, SCALAR, Graph, Op
from planner.space.groups import GroupLink, Groups
from planner.step.op_kinds import FOLDED, JOINED


def with_sent_bytes(
    graph: Graph, groups: Groups, live: Sequence[bool], device: Device | None
) -> Groups:
    """The groups, with the bytes that their links send. Linear in operations."""
    if device is None or not device.fuses_operands:
        return groups
    narrow = _narrow_links(graph, groups, live)
    links = tuple(
        dataclasses.replace(x, nbytes=x.nbytes / 2) if k in narrow else x
        for k, x in enumerate(groups.links)
    )
    return dataclasses.replace(groups, links=links)


def _narrow_links(graph: Graph, groups: Groups, live: Sequence[bool]) -> set[int]:
    """Indices of the links whose values arrive as bfloat16: all readers at the end multiply."""
    multiplied = _only_multiplied(graph, live)
    kinds = [g.kind for g in groups.groups]

    def narrows(link: GroupLink) -> bool:
        if link.op < 0 or link.operand < 0:
            return False
        return _multiplies(graph, graph.ops[link.op], link.operand, multiplied)

    wide_copies: set[int] = set()
    wide_inputs: set[int] = set()
    for link in groups.links:
        if link.operand >= 0 and live[link.op] and not narrows(link):
            if kinds[link.a] == "copy":
                wide_copies.add(link.a)
            if link.a_use:
                wide_inputs.add(link.value)
    out = set()
    for k, link in enumerate(groups.links):
        if graph.values[link.value].dtype != "float32" or link.operand < 0:
            continue
        copied = kinds[link.b] == "copy"
        fine = link.b not in wide_copies if copied else narrows(link)
        if fine and not (link.a_use and link.value in wide_inputs):
            out.add(k)
    return out


def _multiplies(graph: Graph, op: Op, operand: int, multiplied: Sequence[bool | None]) -> bool:
    """Whether an operation reads an operand as bfloat16, or is a view with only such readers."""
    if op.kind == "optimization_barrier":
        return bool(multiplied[op.outputs[operand]])
    if op.kind in PRODUCTS:
        return op.passes == 1 and not op.fused
    if op.kind == "convert_element_type":
        return graph.values[op.outputs[0]].dtype == "bfloat16"
    passes = op.kind in FOLDED or op.kind in JOINED or op.kind in ("gather", "loop_xs")
    return passes and all(multiplied[o] for o in op.outputs)


def _only_multiplied(graph: Graph, live: Sequence[bool]) -> list[bool | None]:
    """Per value, whether all its readers read bfloat16; None if it has no reader."""
    out: list[bool | None] = [None] * len(graph.values)
    for o in graph.outputs:
        if o != SCALAR:
            out[o] = False
    for op in reversed(graph.ops):
        if live[op.index]:
            for operand, i in enumerate(op.inputs):
                if i != SCALAR:
                    out[i] = _multiplies(graph, op, operand, out) and out[i] is not False
    return out
