"""Moves constraints on products to the transposes that read them (TPU).

The gradient of a kernel is a product that only a transpose reads. XLA:TPU fuses the two and writes
the product in the parameter's layout. A constraint between them prevents that: parameters and
moments get the transposed layout and are copied in every step. Decision 020.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.graph.ir import Graph
from planner.plan.contents.rows import Constraint
from planner.space.factors import Layout
from planner.spec import Sharding

RESULTS = ("made", "after", "out")
"""The slots of a result, in the order in which they are applied."""

Entry = tuple[int, tuple[Layout, ...], tuple[Layout, ...]] | None
"""Per operation: its group, the layouts of its operands, and those of its results."""


def behind_transposes(
    graph: Graph, entries: Sequence[Entry], constraints: Iterable[Constraint]
) -> tuple[Constraint, ...]:
    """The constraints, with those on such products moved to the transpose, sorted by place.

    Args:
        graph: the step.
        entries: one per operation (``Groups.op_layouts``).
        constraints: constraints of the step, at most one per place.
    """
    known = {(c.op, c.slot, c.position): c for c in constraints}
    busy = {op for op, _, _ in known}
    turned = {
        op: (transpose, order)
        for op, transpose in read_by_transposes(graph).items()
        if transpose not in busy and (order := _permutation(entries[transpose])) is not None
    }
    out = {}
    for (op, slot, position), c in known.items():
        if slot in RESULTS and op in turned:
            op, order = turned[op]
            dims = (*c.spec.dims, *((),) * (len(order) - len(c.spec.dims)))
            c = Constraint(
                op, slot, 0, Sharding.of(Sharding(tuple(dims[d] for d in order)).entries)
            )
        out[op, slot, position] = c
    return tuple(out[place] for place in sorted(out))


def read_by_transposes(graph: Graph) -> dict[int, int]:
    """Products with a transpose as their only reader: product -> transpose."""
    readers: dict[int, list[int]] = {}
    for op in graph.ops:
        for v in op.inputs:
            readers.setdefault(v, []).append(op.index)
    transposes = {}
    for op in graph.ops:
        if op.kind != "dot_general" or op.outputs[0] in graph.outputs:
            continue
        read = readers.get(op.outputs[0], [])
        if len(read) == 1 and graph.ops[read[0]].kind == "transpose":
            transposes[op.index] = read[0]
    return transposes


def _permutation(entry: Entry) -> tuple[int, ...] | None:
    """Operand dimension per result dimension of a transpose; None if layouts are ambiguous."""
    if entry is None:
        return None
    (before,), (after,) = entry[1], entry[2]
    if sorted(before) != sorted(after) or len(set(before)) < len(before):
        return None
    return tuple(before.index(f) for f in after)
