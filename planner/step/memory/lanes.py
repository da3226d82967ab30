"""Which dimensions of an array may lie along the lanes of its tiles, if a compiler limits them."""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph.ir import SCALAR, Graph
from planner.space.factors import Layout

Entry = tuple[int, tuple[Layout, ...], tuple[Layout, ...]] | None
"""The group of an operation, the layouts of its operands, and those of its results."""


Lanes = tuple[int, ...]
"""The dimensions of an array that may lie along the lanes."""


def image_lanes(
    graph: Graph, entries: Sequence[Entry], fusable: Sequence[bool]
) -> dict[int, Lanes]:
    """Per value, the dimensions that may lie along lanes: the features or the batch of images that
    convolutions read or make, and of values computed from these element by element. XLA:TPU lays no
    other dimension of an image along lanes. The features come first: prices use them, because the
    local batch of a device is not known there. Arguments have the layout of the caller, with the
    least waste (``step.memory.tiles.padding``).

    Args:
        graph: the step.
        entries: one per operation (``Groups.op_layouts``).
        fusable: per operation, whether it only passes dimensions along.
    """
    lanes: dict[int, Lanes] = {}
    given = set(graph.inputs)
    for op in graph.ops:
        entry = entries[op.index]
        if op.kind == "conv_general_dilated" and entry is not None:
            image, kernel, result = entry[1][0], set(entry[1][1]), entry[2][0]
            shared = ((op.inputs[0], image, set(result)), (op.outputs[0], result, set(image)))
            for value, layout, other in shared:
                dims = [
                    d for d, f in enumerate(layout) if f in kernel and f not in other and f >= 0
                ]
                batch = [
                    d for d, f in enumerate(layout) if f in other and f not in kernel and f >= 0
                ]
                if value != SCALAR and len(dims) == 1 and value not in given:
                    lanes[value] = (*dims, *batch[:1])
        elif fusable[op.index] and len(op.outputs) == 1:
            out = op.outputs[0]
            for i in op.inputs:
                if i in lanes and graph.values[i].shape == graph.values[out].shape:
                    lanes[out] = lanes[i]
    return lanes
