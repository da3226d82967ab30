"""The work of each group's operations, in FLOPs and bytes: the basis of the prices of compute.

A kernel is one launch of compiled code: a product (matmul, convolution), a chain of elementwise
operations or a reduction with the operations that it absorbs (see ``starts``), or a jitted function
that stands for one kernel, whatever it contains (see ``fused``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from costmodels import CostModel, Device, Kernel
from planner.graph.ir import PRODUCTS, RAGGED, SCALAR, Graph, Op
from planner.rules.factor import FactorRule
from planner.rules.kernels.inside import MASKED, MASKED_GRADIENT
from planner.rules.kernels.regions import REGION
from planner.space.factors import Layout
from planner.space.groups import Groups
from planner.step.kernels.absorbed import ProductKernel
from planner.step.kernels.flops import in_place, masked_operands, op_flops, ragged_groups
from planner.step.kernels.fused import FusedCalls
from planner.step.kernels.split import DEEP, Split
from planner.step.kernels.starts import BITCASTS
from planner.step.op_kinds import selects

Array = NDArray[np.float64]

APART = 0.25
"""Fraction of the vector rate that a convolution with one channel per group reaches on a TPU."""
LOOKUPS = ("gather", "scatter")
MOST_SPREAD = 2**27
"""Maximum bytes in tiles of a table with rows along lanes to which XLA:TPU (libtpu 0.0.42) adds
rows."""
BESIDE = 0.75
"""Ratio of the bytes charged for copying a table that fits beside the core to those of its
tiles."""
NEAR = 0.25
"""Maximum size, as a share of ``Device.fast_memory_bytes``, of an operand or result of a product in
fast memory: XLA:TPU (libtpu 0.0.42) keeps most such arrays there between two kernels."""
NEAR_STORE = 0.25
"""Ratio of the time to store such a result to that of a result in the device's memory."""
TF32_PASSES = 3
"""Maximum ``Op.passes`` that GPUs compute with TF32: XLA:GPU uses it for ``Precision.HIGH``, not
for ``HIGHEST`` (documentation of ``jax.lax.Precision``)."""


KERNELS: Mapping[str, Kernel] = {"matmul": "matmul", "attention": "attention"}
"""Values of ``Op.kernel`` that are timed separately, and the kinds of their kernels."""


@dataclass(frozen=True)
class Work:
    """A part of a group's work, summed over operations that are split by the same factors.

    ``classes`` are disjoint sets of the group's factors; ``traffic`` gives bytes moved with the
    indices of the classes that split them. All classes split the FLOPs, those of ``result`` the
    ``result_bytes`` (of a product). Counts are for the whole step: multiplied by the weight.
    ``most`` is, per class, the maximum number of pieces into which cutting it saves time; empty: no
    maximum. ``near_bytes``: arrays with at most this local traffic over the step are read and
    written in fast memory (for a product; 0: none). ``stacks``: a loop writes a stack, which
    rematerialization may make needless. ``split``: how long a product takes if its contraction is
    split.
    """

    classes: tuple[frozenset[int], ...]
    flops: float
    traffic: tuple[tuple[float, tuple[int, ...]], ...]
    dtype: str
    kind: Kernel
    kernels: float
    result_bytes: float = 0.0
    result: tuple[int, ...] = ()
    most: tuple[float, ...] = ()
    near_bytes: float = 0.0
    stacks: bool = False
    split: Split | None = None

    @property
    def one_part(self) -> bool:
        """Whether it is already one device's part, as for a ``shard_map``."""
        return not any(self.classes)

    @property
    def nbytes(self) -> float:
        """Bytes moved if one device does all the work."""
        return sum(nbytes for nbytes, _ in self.traffic)

    def local_bytes(self, cut: Callable[[tuple[int, ...]], Array]) -> tuple[Array, Array]:
        """Bytes that one device moves, and bytes of its part of the product's result.

        Args:
            cut: the number of pieces into which some classes, given by index, are cut together.
        """
        local = [nbytes / cut(classes) for nbytes, classes in self.traffic]
        stored: Array = self.result_bytes / cut(self.result) if self.result_bytes else np.zeros(1)
        if local and self.near_bytes:
            last = local[-1]  # the result
            stored = np.where((last > 0.0) & (last <= self.near_bytes), NEAR_STORE, 1.0) * stored
            local = [np.where(n <= self.near_bytes, 0.0, n) for n in local]
        return sum(local, np.zeros(1)), stored

    def seconds(self, model: CostModel, cut: Callable[[tuple[int, ...]], Array]) -> Array:
        """Seconds of one device, without kernel launches; ``cut`` as for ``local_bytes``."""
        flops = self.flops / cut(tuple(range(len(self.classes))))
        moved, stored = self.local_bytes(cut)
        seconds = model.compute_s(flops, moved, self.dtype, self.kind, stored)
        if self.split is None:
            return seconds
        operands = [nbytes / cut(classes) for nbytes, classes in self.traffic[:2]]
        apart = self.split.applies(operands, cut)
        if not np.any(apart):
            return seconds
        result = self.split.result_bytes / cut(self.result)
        slow = model.compute_s(self.split.drag * flops, moved, self.dtype, "split", result)
        return np.where(apart, np.maximum(slow, seconds), seconds)


@dataclass
class Workload:
    """Collects the work of one graph, operation by operation."""

    graph: Graph
    groups: Groups
    kept: Sequence[bool]
    fused: FusedCalls
    starts: Sequence[bool]
    depth: Sequence[int]
    seen_share: Sequence[float]
    kernels: Mapping[int, ProductKernel] = field(default_factory=dict)
    moved: Sequence[float] = ()
    device: Device | None = None
    sums: list[dict[tuple[frozenset[int], str], list[float]]] = field(init=False)
    products: list[list[Work]] = field(init=False)
    seen: set[tuple[int, int, int]] = field(default_factory=set)
    """Arrays that a kernel has read or made, as (group, depth of the kernel, value)."""
    known: dict[tuple[str, int], float] = field(default_factory=dict)
    spans: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], frozenset[int]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.sums = [{} for _ in self.groups.groups]
        self.products = [[] for _ in self.groups.groups]

    def add(self, op: Op, rule: FactorRule) -> tuple[Work, ...]:
        """Count one operation of a group; returns its work."""
        if op.kind == REGION and rule.origin == "region":
            return self.region(op)
        part = self.part(op, rule)
        if part is None:
            return ()
        group, work = part
        if op.kind in PRODUCTS or op.kernel in KERNELS or work.most or work.stacks:
            self.products[group].append(work)
            return work, *self.spread(op, group)
        total = self.sums[group].setdefault((work.classes[0], work.dtype), [0.0, 0.0, 0.0])
        total[0] += work.flops
        total[1] += work.nbytes
        total[2] += work.kernels
        return work, *self.spread(op, group)

    def region(self, op: Op) -> tuple[Work, ...]:
        """Count the work of each device in a ``shard_map``, which is not split further."""
        entry = self.groups.op_layouts[op.index]
        if entry is None:
            return ()
        before = len(self.products[entry[0]])
        weight = self.graph.regions[op.region].weight
        dtype = next((self.graph.values[v].dtype for v in op.inputs if v != SCALAR), "float32")
        for kind, flops, moved in op.work:
            if kind in (MASKED, MASKED_GRADIENT):
                if self.device is None or (kind == MASKED and self.device.fuses_operands):
                    continue
                moved = 0.0 if self.device.fuses_operands else moved
            traffic = ((weight * moved, ()),)
            how: Kernel = "vector" if kind == "vector" else "matmul"
            self.products[entry[0]].append(
                Work((frozenset(),), weight * flops, traffic, dtype, how, weight)
            )
        return tuple(self.products[entry[0]][before:])

    def part(self, op: Op, rule: FactorRule) -> tuple[int, Work] | None:
        """The group of one operation and its share of the group's work. Calls must be in program
        order: operations of a group with equal depths (`starts`) are one kernel, which reads each
        array once and does not read its results."""
        entry = self.groups.op_layouts[op.index]
        if entry is None:
            return None
        group, ins, outs = entry
        values, is_written = self.graph.values, self.kept
        weight = self.graph.regions[op.region].weight
        inside = self.fused.call[op.index]
        flops = self.known.get((op.kind, id(rule)))
        if flops is None:  # equal operations share a rule
            flops = self.known[op.kind, id(rule)] = op_flops(self.graph, op, rule)
        first = next((v for v in op.inputs if v >= 0), op.outputs[0] if op.outputs else -1)
        dtype = values[first].dtype if first >= 0 else "float32"
        if op.kind in PRODUCTS:
            flops *= self._passes(op, dtype) * self._dense(op) * self._grouped(op, dtype)
            return group, self._product(op, flops, dtype, weight)
        factors = self.spans.get((ins, outs))
        if factors is None:
            factors = frozenset(f for layout in (*ins, *outs) for f in layout if f >= 0)
            self.spans[ins, outs] = factors
        if op.kind.startswith(LOOKUPS):  # a device with some of the rows receives all indices
            moved_by = (*ins[1:], *outs) if op.kind == "gather" else ins[1:]
            factors = frozenset(f for layout in moved_by for f in layout if f >= 0)
        depth, seen = self.depth[op.index], self.seen
        reads = {v for v in op.inputs if v >= 0 and is_written[v] and (group, depth, v) not in seen}
        writes = [v for v in op.outputs if is_written[v]]
        fuses = self.groups.fuses[op.index]
        if fuses or op.kind.startswith(("reduce_", "arg")):
            seen.update([(group, depth, v) for v in (*reads, *(writes if fuses else ()))])
        nbytes = float(sum([values[v].nbytes for v in (*reads, *writes)]))
        if op.kind in BITCASTS and reads:
            nbytes = 0.0
        elif op.kind in ("gather", "dynamic_slice"):
            nbytes = 2.0 * sum(values[v].nbytes for v in op.outputs)
        elif in_place(self.graph, op):
            nbytes = 2.0 * values[op.inputs[1]].nbytes
        if self.moved:
            nbytes = self.moved[op.index]
        flops *= 0.0 if op.kind == "loop_ys" else self.seen_share[op.index]
        if self.moved and not (nbytes or flops):
            return None
        flops = 0.0 if inside >= 0 else weight * flops
        kernels = weight if self.starts[op.index] and inside < 0 else 0.0
        traffic = ((weight * nbytes, (0,)),)
        if op.kernel in KERNELS:
            return group, Work((factors,), flops, traffic, dtype, KERNELS[op.kernel], kernels)
        row = self._row(op, ins, outs)
        if row is not None:
            classes, most = (factors - {row[0]}, frozenset({row[0]})), (math.inf, row[1])
            moved = ((weight * nbytes, (0, 1)),)
            return group, Work(classes, flops, moved, dtype, "vector", kernels, most=most)
        stacks = op.kind == "loop_ys"
        return group, Work((factors,), flops, traffic, dtype, "vector", kernels, stacks=stacks)

    def spread(self, op: Op, group: int) -> tuple[Work, ...]:
        """The extra cost of tables with few columns: XLA:TPU lays out their rows 128 lanes wide to
        look them up or to add to them (docs/explanation/compute.md). Splitting columns does not
        reduce this cost.

        An addition fills the table in this layout, then copies it, if its tiles do not fit beside
        the core and take at most ``MOST_SPREAD``. A lookup copies the table first; at most
        ``MOST_SPREAD`` bytes of tiles count.
        """
        device, entry = self.device, self.groups.op_layouts[op.index]
        adds, finds = op.kind.startswith("scatter"), op.kind == "gather"
        if entry is None or device is None or not device.fast_memory_bytes or not (adds or finds):
            return ()
        if adds and selects(self.graph, op):  # compiled as a comparison
            return ()
        value = op.outputs[0] if adds else op.inputs[0]
        shape = () if value == SCALAR else self.graph.values[value].shape
        if len(shape) != 2 or shape[1] >= device.tile_lanes:
            return ()
        nbytes = float(shape[0] * device.tile_lanes * device.lane_bytes)
        beside = nbytes <= device.fast_memory_bytes
        if adds and (beside or nbytes > MOST_SPREAD):
            return ()
        layout = entry[2][0] if adds else entry[1][0]
        row = frozenset(f for f in layout[:1] if f >= 0)
        nbytes = min(nbytes, MOST_SPREAD) * (BESIDE if beside else 2.0)
        moved = ((self.graph.regions[op.region].weight * nbytes, (0,)),)
        extra = Work((row,), 0.0, moved, self.graph.values[value].dtype, "vector", 0.0)
        self.products[group].append(extra)
        return (extra,)

    def _row(
        self, op: Op, ins: Sequence[Layout], outs: Sequence[Layout]
    ) -> tuple[int, float] | None:
        """The factor of the columns of the rows that an operation looks up or adds to, and the
        maximum number of pieces into which cutting it saves time. A row of 16 numbers takes the 128
        lanes of a tile in a TPU's memory; rows that fit beside the processor have another
        layout."""
        device = self.device
        if device is None or not device.fast_memory_bytes or not op.kind.startswith(LOOKUPS):
            return None
        value = op.outputs[0] if op.kind == "gather" else op.inputs[2]
        layout = outs[0] if op.kind == "gather" else ins[2]
        shape = () if value == SCALAR else self.graph.values[value].shape
        if len(shape) < 2 or not layout or layout[-1] < 0:
            return None
        padded = math.prod(shape[:-1]) * device.tile_lanes * device.lane_bytes
        if padded <= device.fast_memory_bytes:
            return None
        return layout[-1], max(1.0, shape[-1] / device.tile_lanes)

    def _passes(self, op: Op, dtype: str) -> float:
        """How many times longer a product takes at its requested precision: the number of bfloat16
        products if the device has no others, else the ratio without TF32."""
        if op.passes == 1 or dtype != "float32" or self.device is None:
            return 1.0
        if self.device.fuses_operands:
            return op.passes
        slower = self.device.matmul_flops_per_s(dtype) / self.device.vector_flops_per_s
        return max(1.0, slower) if op.passes > TF32_PASSES else 1.0

    def _dense(self, op: Op) -> float:
        """How many times the FLOPs of a ragged product compilers compute: XLA:GPU and XLA:CPU
        multiply all rows by the matrices of all groups, masked; XLA:TPU does so for its gradient
        (docs/explanation/compute.md)."""
        if op.kind not in RAGGED or self.device is None:
            return 1.0
        if self.device.fuses_operands and masked_operands(self.graph, op) == 1:
            return 1.0
        return float(ragged_groups(self.graph, op))

    def _grouped(self, op: Op, dtype: str) -> float:
        """How many times longer a convolution with groups of channels takes than one without groups
        and with equal FLOPs. If groups have few channels, XLA:TPU computes it outside of the matrix
        units, 500 products per cycle and core (a quarter of the vector rate), and 2,000 for the
        gradient of its kernel; or it multiplies all channels, most of them by zeros
        (docs/explanation/compute.md)."""
        device = self.device
        if op.kind != "conv_general_dilated" or device is None or not device.fuses_operands:
            return 1.0
        entry = self.groups.op_layouts[op.index]
        assert entry is not None
        group, ins, outs = entry
        shared = {f for f in ins[0] if f >= 0}.intersection(ins[1], outs[0])
        groups = math.prod(self.groups.groups[group].sizes[f] for f in shared)
        if groups == 1:
            return 1.0
        *operands, result = (
            math.prod(self.graph.values[v].shape) for v in (*op.inputs[:2], op.outputs[0])
        )
        vector = device.vector_flops_per_s * (1.0 if result < min(operands) else APART)
        rate = device.matmul_flops_per_s(dtype) * device.convolution_efficiency
        return max(1.0, min(float(groups), rate / vector))

    @property
    def _on_tpu(self) -> bool:
        return self.device is not None and self.device.fuses_operands

    def _product(self, op: Op, flops: float, dtype: str, weight: float) -> Work:
        """The work of a product. Its factors form classes by which of the two operands and the
        result have them, so that each array is split only by its dimensions."""
        _, ins, outs = self.groups.op_layouts[op.index]  # type: ignore[misc]
        values, places = self.graph.values, (*ins[:2], outs[0])
        member: dict[int, int] = {}
        for bit, layout in enumerate(places):
            for f in layout:
                if f >= 0:
                    member[f] = member.get(f, 0) | 1 << bit
        kinds = sorted(set(member.values()))
        classes = tuple(frozenset(f for f, m in member.items() if m == k) for k in kinds)
        split = [tuple(c for c, k in enumerate(kinds) if k >> bit & 1) for bit in range(3)]
        sides = [*zip(op.inputs[:2], split, strict=False), (op.outputs[0], split[2])]
        traffic = tuple(
            (weight * values[v].nbytes, who) for v, who in sides if v != SCALAR and self.kept[v]
        )
        if self._dense(op) > 1 and self.device is not None and not self._on_tpu:
            copies = 2 * ragged_groups(self.graph, op)  # written and read
            masked = masked_operands(self.graph, op)
            traffic = tuple(
                (n * copies if k < masked else n, who) for k, (n, who) in enumerate(traffic)
            )
        stored = weight * values[op.outputs[0]].nbytes
        kernel = self.kernels.get(op.index)
        if kernel is not None:
            moved = [weight * nbytes for nbytes in kernel[:3]]
            traffic = tuple(zip(moved, split, strict=True))
            stored, flops = weight * kernel.stored, flops * kernel.idle
        call = self.fused.call[op.index]
        if call < 0:
            kind: Kernel = "convolution" if op.kind == "conv_general_dilated" else "matmul"
            if kind == "matmul" and kinds[-1:] == [0b111] and self._on_tpu:
                kind = "batched"
            fast = self.device.fast_memory_bytes if self.device is not None else 0
            apart: Split | None = None
            if kind == "matmul" and op.kind == "dot_general" and kernel is not None and fast:
                first, second, result = (
                    math.prod(values[v].shape) if v != SCALAR else 1
                    for v in (*op.inputs[:2], op.outputs[0])
                )
                depth = math.sqrt(first * second / max(1, result))
                if depth > DEEP:
                    inside = tuple(c for c, k in enumerate(kinds) if k == 0b011)
                    plain = weight * kernel.plain
                    apart = Split(depth, inside, weight * fast, kernel.drag, plain)
            return Work(
                classes,
                weight * flops,
                traffic,
                dtype,
                kind,
                weight,
                stored,
                split[2],
                near_bytes=weight * NEAR * fast,
                split=apart,
            )
        flops *= self.fused.factor(call)
        kernels = weight if self.fused.first_product(call) == op.index else 0.0
        return Work(classes, weight * flops, traffic, dtype, "attention", kernels)

    def done(self) -> tuple[tuple[Work, ...], ...]:
        """The work of every group."""
        return tuple(
            (
                *products,
                *(
                    Work((factors,), flops, ((nbytes, (0,)),), dtype, "vector", kernels)
                    for (factors, dtype), (flops, nbytes, kernels) in sums.items()
                ),
            )
            for products, sums in zip(self.products, self.sums, strict=True)
        )
