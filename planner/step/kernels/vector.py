"""The bytes that kernels without a product move on a TPU, as XLA:TPU estimates them.

A register holds 32-bit lanes (``Device.lane_bytes``), whatever the dtype. So the time of a kernel
is that of moving its operands and results, in the bytes of their dtypes, and of one pass over its
elements as 32-bit lanes. Writing the first full array of 32-bit elements takes as long as the pass
and hides it. A reduction and a kernel that writes narrower elements pay for the pass. If rows of
the registers are empty (4 heads of 128), the pass is longer, and nothing hides it.
docs/explanation/compute.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from costmodels import Device
from planner.graph.ir import PRODUCTS, SCALAR, Graph, Op, Phase
from planner.rules.factor import FactorRule
from planner.space.groups import Groups
from planner.step.kernels.flops import extents, in_place
from planner.step.kernels.starts import BITCASTS
from planner.step.memory.lanes import image_lanes
from planner.step.memory.materialized import Written
from planner.step.memory.tiles import padding, rows_used

CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
SCANS = 4.0
"""Ratio of the bytes that a cumulative sum moves to those of one kernel: XLA:TPU computes it in
windows of 128 elements, in four to six kernels (3.2 to 4.6 times on v5e)."""


def vector_bytes(
    graph: Graph,
    rules: Sequence[FactorRule],
    groups: Groups,
    home: Sequence[int],
    written_values: Written,
    device: Device,
    handed: frozenset[int],
    depth: Sequence[int],
) -> list[float]:
    """Per operation, the bytes that one run of its kernel moves, plus those of the pass over its
    elements. Kernels of a group that read the same array in the same phase are one, if none needs a
    sum of another (``depth``: see ``Starts``)."""
    laid = _laid_by_products(graph, rules, groups.fuses)
    return _Vector(graph, groups, written_values, device, handed, laid, depth).run(home)


class _Vector:
    """``vector_bytes`` in progress."""

    def __init__(
        self,
        graph: Graph,
        groups: Groups,
        written_values: Written,
        device: Device,
        handed: frozenset[int],
        laid: Sequence[bool],
        depth: Sequence[int],
    ) -> None:
        self.depth = depth
        self.graph, self.groups, self.found = graph, groups, written_values
        self.device, self.handed, self.laid = device, handed, laid
        self.images = image_lanes(graph, groups.op_layouts, groups.fuses)
        self.tile = (device.tile_rows, device.tile_lanes)
        self.seen: set[tuple[int, Phase, int, int]] = set()
        """Arrays that a kernel has read or made, as (group, phase, depth, value)."""
        self.padded: dict[int, float] = {}

    def run(self, home: Sequence[int]) -> list[float]:
        """The bytes of every operation; 0 for operations in a product's kernel."""
        out = [0.0] * len(self.graph.ops)
        for op in self.graph.ops:
            entry = self.groups.op_layouts[op.index]
            if entry is not None and op.kind not in PRODUCTS and home[op.index] < 0:
                out[op.index] = self.moved(op, entry[0])
        return out

    def moved(self, op: Op, group: int) -> float:
        """The bytes of one operation in a group."""
        written_values = self.found
        if op.kind in BITCASTS and not (
            op.kind == "broadcast_in_dim" and written_values.kept[op.outputs[0]]
        ):
            return 0.0
        writes = [o for o in op.outputs if written_values.kept[o]]
        if op.kind == "loop_ys":
            return self.stacked(op)
        if op.fused:  # the hand-written kernel writes it without padding
            return float(sum(written_values.nbytes[o] for o in writes))
        reduces = op.kind.startswith(("reduce_", "arg"))
        if not (writes or reduces):
            return 0.0
        written = sum(self.tiled(o, written_values.nbytes[o]) for o in writes)
        if op.kind in ("gather", "dynamic_slice"):
            return 2.0 * written
        if in_place(self.graph, op):
            return 2.0 * self.tiled(op.inputs[1], written_values.nbytes[op.inputs[1]])
        read = self.read(op, group, reduces)
        if op.phase is Phase.UPDATE:  # one kernel writes everything computed from a gradient
            self.seen.update([(group, op.phase, self.depth[op.index], o) for o in writes])
        passed = self.passed(op, writes, reduces) if read and op.kind != "pad" else 0.0
        return (written + read + passed) * (SCANS if op.kind in CUMULATIVE else 1.0)

    def stacked(self, op: Op) -> float:
        """The bytes of a stack that a loop writes. A kernel that writes a slice to memory writes it
        to the stack, too; each other slice has a kernel, which computes it."""
        (inside,), (stack,) = op.inputs, op.outputs
        if inside == SCALAR:
            return 0.0
        written = self.tiled(stack, self.found.nbytes[stack])
        if self.found.kept[self.found.base[inside]]:
            return written
        read = sum(self.tiled(s, nbytes) for s, nbytes in self.found.sources[inside].items())
        read *= self.graph.values[stack].shape[0]
        return written + read + self.passed(op, [stack], reduces=False)

    def read(self, op: Op, group: int, reduces: bool) -> float:
        """Bytes of the arrays that the operation's kernel has not read before."""
        read = 0.0
        for i in op.inputs:
            for s, nbytes in () if i == SCALAR else self.found.sources[i].items():
                key = (group, op.phase, self.depth[op.index], s)
                if op.phase is Phase.UPDATE and self.found.base[s] in self.handed:
                    continue
                if key not in self.seen:
                    read += self.tiled(s, nbytes)
                    if reduces or self.groups.fuses[op.index]:
                        self.seen.add(key)
        return read

    def passed(self, op: Op, writes: list[int], reduces: bool) -> float:
        """Bytes that stand for the pass over a kernel's elements; 0 if a write hides it.

        An update always hides it: it writes moments of 32 bits beside a narrower parameter.
        """
        values, lane = self.graph.values, self.device.lane_bytes
        over = [i for i in op.inputs[:1] if i != SCALAR] if reduces else writes
        most, hidden = 0.0, op.phase is Phase.UPDATE
        for v in over:
            elements = math.prod(values[v].shape)
            used = 1.0 if self.laid[v] else rows_used(values[v].shape, self.tile)
            most = max(most, lane * elements * self.padding(v) / used)
            wide = self.found.nbytes[v] >= lane * elements and used == 1.0
            hidden = hidden or (wide and not reduces)
        return 0.0 if hidden else most

    def tiled(self, value: int, nbytes: int) -> float:
        """Bytes including the padding to tiles."""
        return nbytes * self.padding(value)

    def padding(self, value: int) -> float:
        """The factor that padding to tiles multiplies a value's bytes by."""
        known = self.padded.get(value)
        if known is None:
            shape, lying = self.graph.values[value].shape, self.images.get(value, ())[:1]
            known = self.padded[value] = padding(shape, self.tile, lying)
        return known


def _laid_by_products(
    graph: Graph, rules: Sequence[FactorRule], fusable: Sequence[bool]
) -> list[bool]:
    """Per value, whether a product sets its layout: its operands, its result, and what elementwise
    operations make of them. Products with a single row or column do not count."""
    parent = list(range(len(graph.values)))

    def find(v: int) -> int:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    sizes = [math.prod(v.shape) for v in graph.values]
    ends: list[int] = []
    for op in graph.ops:
        inputs = [i for i in op.inputs if i != SCALAR]
        if op.kind in PRODUCTS:
            if min(extents(rules[op.index])[:2]) > 1:
                ends += [*inputs[:2], op.outputs[0]]
        elif fusable[op.index] and op.outputs:
            first = op.outputs[0]
            for v in (*inputs, *op.outputs):
                if sizes[v] == sizes[first]:
                    parent[find(v)] = find(first)
    roots = {find(v) for v in ends}
    return [find(v) in roots for v in range(len(graph.values))]
