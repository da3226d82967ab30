"""Which operations start a kernel, and which may share one: counts the launches of a compiler that
fuses.

Each operation that mixes dimensions is a kernel. Elementwise operations are fused with the
elementwise operations that they read, also with several results (XLA's loop and multi-output
fusion), unless a product or reduction lies on a path between the two. Operations that write nothing
to memory are part of their readers, and so are scalars. Reductions absorb the operations that they
read, and reductions of one value share a kernel. docs/explanation/compute.md compares this with
compiled steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.graph.ir import SCALAR, Graph
from planner.step.memory.liveness import PASSES

BITCASTS = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota"})
"""Operations that are never a kernel alone: they reshape bytes, or their readers compute them."""


class Starts(NamedTuple):
    """Per operation, whether its kernel is counted at it, and the number of products and reductions
    on the longest path to it: kernels of the same depth may be one."""

    begins: tuple[bool, ...]
    depth: tuple[int, ...]


def starts(
    graph: Graph, fusable: Sequence[bool], is_written: Sequence[bool], live: Sequence[bool]
) -> Starts:
    """Find the starts and the depths. Near-linear in operations."""
    values = graph.values
    out = [False] * len(graph.ops)
    levels = [0] * len(graph.ops)
    depth = [0] * len(graph.values)  # heavy operations on the longest path to a value
    chain = [-1] * len(graph.values)  # the elementwise operation that made it
    parent = list(range(len(graph.ops)))
    writes: list[int] = []
    reduced: set[int] = set()

    def find(op: int) -> int:
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    for op in graph.ops:
        if not live[op.index]:
            continue
        inputs = [i for i in op.inputs if i != SCALAR]
        level = max((depth[i] for i in inputs), default=0)
        here, kind = op.index, op.kind
        levels[here] = level
        if kind in PASSES or kind.startswith(("loop_", "branch_")):
            for o in op.outputs:
                depth[o] = level
            continue
        reduces = kind.startswith(("reduce_", "arg"))
        if reduces or not fusable[here]:
            if not reduces:
                out[here] = True
            elif inputs and inputs[0] not in reduced:
                reduced.add(inputs[0])
                out[here] = True
            for o in op.outputs:
                depth[o] = level + 1
            continue
        for i in inputs:
            if chain[i] >= 0 and depth[i] == level and values[i].shape:
                parent[find(chain[i])] = find(here)
        for o in op.outputs:
            depth[o], chain[o] = level, here
        if kind not in BITCASTS and any(is_written[o] for o in op.outputs):
            writes.append(here)
    counted: set[int] = set()
    for op_index in writes:
        root = find(op_index)
        if root not in counted:
            counted.add(root)
            out[op_index] = True
    return Starts(tuple(out), tuple(levels))
