"""Kinds of operations, by what their kernels read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.graph.ir import SCALAR, Graph, Op

VIEWS = frozenset(
    "reshape squeeze expand_dims loop_const branch_in planner_shard region_edge "
    "sharding_constraint copy_p reduce_precision".split()
)
"""Operations whose result is their operand, in the same memory."""

FOLDED = VIEWS | {"transpose"}
"""Operations that a product folds into reading an operand."""

PICKED = frozenset({"slice", "dynamic_slice", "gather", "loop_xs"})
"""Fused operations that read a part of their first operand."""

SLICES = frozenset({"slice", "split"})
"""Operations that cut arrays at known places."""

JOINED = frozenset({"pad", "concatenate", "rev"})
"""Operations that mix dimensions and yet are fused."""

FILLS = frozenset({"broadcast_in_dim", "iota"})
"""Operations that may make an array without operands."""

OVERWRITES = frozenset({"scatter", "scatter-add", "scatter_add", "dynamic_update_slice"})
"""Operations that write into their first operand's memory if nothing else reads it."""

WRITERS = frozenset({"loop_ys", "branch_out"})
"""Borders that write their result and may compute their operands themselves."""

ENTERED = frozenset({"loop_xs", "loop_const"})
"""Borders through which arrays enter a loop: they are in memory before it begins."""

PASSES = frozenset({"planner_shard", "region_edge", "sharding_constraint", "optimization_barrier"})
"""Operations whose result is their operand: they move no bytes themselves."""


def writes(op: Op) -> bool:
    """Whether an operation writes its result but may compute its operands itself."""
    reduces = op.kind.startswith(("reduce_", "arg")) and op.kind not in VIEWS
    return reduces or op.kind in WRITERS


def selects(graph: Graph, op: Op) -> bool:
    """Whether a scatter writes one element of each row of a constant array, as in the gradient of a
    label's logit: XLA:TPU compares a counter with the index instead."""
    if not op.kind.startswith("scatter") or SCALAR in op.inputs[1:] or len(op.inputs) != 3:
        return False
    into, out = op.inputs[0], graph.values[op.outputs[0]]
    filled = into == SCALAR or (
        graph.values[into].op >= 0 and graph.ops[graph.values[into].op].kind in FILLS
    )
    rows, (indices, updates) = math.prod(out.shape[:-1]), op.inputs[1:]
    shape = graph.values[updates].shape
    single = graph.values[indices].shape[:-1] == shape  # no windows
    return filled and single and len(out.shape) > 1 and math.prod(shape) == rows


def _looks_up(graph: Graph, op: Op) -> bool:
    """Whether an operation reads many rows of a table: XLA:TPU does so in a separate kernel, and
    both the table and the rows are written. One row is a slice."""
    if op.kind != "gather" or op.inputs[1] == SCALAR:
        return False
    return math.prod(graph.values[op.inputs[1]].shape[:-1]) > 1


def _spreads(graph: Graph, op: Op) -> bool:
    """Whether an operation puts elements between those of an array, as associative scans do to join
    every other element: XLA:TPU writes the result separately."""
    if op.kind != "pad" or op.inputs[0] == SCALAR:
        return False
    part, whole = graph.values[op.inputs[0]].shape, graph.values[op.outputs[0]].shape
    return any(m >= 2 * n - 1 > n for n, m in zip(part, whole, strict=True))


def runs_alone(graph: Graph, op: Op) -> bool:
    """Whether XLA:TPU runs a light operation in a separate kernel."""
    return _looks_up(graph, op) or _spreads(graph, op)


def extents(graph: Graph, time: Sequence[int]) -> tuple[list[int], list[int]]:
    """Per region, when it begins and ends; -1 for the main region and empty ones."""
    begin, stop = [-1] * len(graph.regions), [-1] * len(graph.regions)
    for op in graph.ops:
        region, at = op.region, time[op.index]
        while region > 0:
            begin[region] = at if begin[region] < 0 else min(begin[region], at)
            stop[region] = max(stop[region], at)
            region = graph.regions[region].parent
    return begin, stop


def joins_rows(graph: Graph, op: Op) -> bool:
    """Whether an operation joins arrays along a dimension other than the last: XLA:TPU writes them
    first. It does not if they are joined along lanes, as in rotary embeddings."""
    if op.kind != "concatenate" or op.inputs[0] == SCALAR:
        return False
    part, whole = graph.values[op.inputs[0]].shape, graph.values[op.outputs[0]].shape
    return part[:-1] != whole[:-1]
