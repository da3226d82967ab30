"""Operations of a step that compute the same: differentiation emits some of them twice."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from planner.graph.ir import SCALAR, Graph

REPEATABLE = frozenset(
    "concatenate transpose reshape squeeze expand_dims broadcast_in_dim slice split "
    "convert_element_type reduce_sum reduce_max reduce_min dot_general".split()
)
"""Operations that ``Op.attrs`` identifies: their parameters hold no functions."""


def equal_values(
    graph: Graph, live: Sequence[bool], apart: Collection[int] = ()
) -> tuple[int, ...]:
    """Per value, the first that is surely equal to it.

    Two operations compute the same if they are of one kind with the same parameters, read equal
    values, and are in the same region and phase. Rematerialization in the backward pass has another
    phase than the original, so it stays distinct.

    Args:
        graph: the step.
        live: per operation, whether its results are used.
        apart: values that stay distinct, such as those that a user marked.

    Complexity: linear in operands.
    """
    same = list(range(len(graph.values)))
    known: dict[tuple[object, ...], tuple[int, ...]] = {}
    for op in graph.ops:
        if not live[op.index] or op.kind not in REPEATABLE or not op.attrs or SCALAR in op.inputs:
            continue
        shapes = tuple((graph.values[o].shape, graph.values[o].dtype) for o in op.outputs)
        inputs = tuple(same[i] for i in op.inputs)
        key = (op.kind, op.attrs, op.region, op.phase, op.fused, inputs, shapes)
        first = known.setdefault(key, op.outputs)
        if first is not op.outputs and not any(v in apart for v in (*op.outputs, *first)):
            for value, other in zip(op.outputs, first, strict=True):
                same[value] = other
    return tuple(same)
