"""The operations that run inside the kernel of a product, as XLA:TPU compiles them.

A product computes its elementwise operands itself. Elementwise operations on its result, and
reductions of them, run on a finished tile while the matrix unit makes the next one. The vector
unit runs in parallel with the matrix unit, so such operations add no time until they take longer
than the product. docs/explanation/compute.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from costmodels import Device, op_time_s
from planner.graph.ir import PRODUCTS, SCALAR, Graph, Op, Phase
from planner.rules.factor import FactorRule
from planner.space.groups import Groups
from planner.step.kernels.flops import op_flops
from planner.step.kernels.fused import FusedCalls
from planner.step.kernels.split import drag
from planner.step.memory.lanes import image_lanes
from planner.step.memory.materialized import Written
from planner.step.memory.tiles import copied, padding
from planner.step.op_kinds import FOLDED, PASSES

FAR = 4.0
"""Ratio of padding to that of the best layout from which the copy takes time: it is written and
read. Compiled (libtpu 0.0.42), windows of 49 x 32 numbers (2.6) do not show it; sets of 20 x 32
(4.8) and interactions of 12 x 32 (5.3) do."""


class ProductKernel(NamedTuple):
    """The bytes that the kernel of a product moves: for its operands, for its result, and from the
    matrix unit. ``idle`` multiplies its FLOPs: columns of the matrix unit that are not used.
    ``plain``: bytes from the matrix unit alone; ``drag``: what further arrays cost if the
    contraction is split (``split.drag``)."""

    first: float
    second: float
    result: float
    stored: float
    idle: float = 1.0
    plain: float = 0.0
    drag: float = 1.0


def absorbing(
    graph: Graph, fusable: Sequence[bool], is_written: Sequence[bool], live: Sequence[bool]
) -> tuple[int, ...]:
    """Per operation, the product in whose kernel it runs, or -1.

    Args:
        graph: the step.
        fusable: per operation, whether it only passes dimensions along.
        is_written: per value, whether it is written to memory.
        live: per operation, whether its results are used.

    The optimizer's update is excluded, because it takes longer than the product; it does not read a
    gradient that a product passes to it (``vector_bytes``). Near-linear in operations.
    """
    home = _behind(graph, fusable, live)
    return _before(graph, fusable, is_written, live, home)


def _absorbs(op: Op) -> bool:
    """Whether an operation's kernel absorbs others; a kernel written by a user does not."""
    return op.kind in PRODUCTS and not op.fused


def _elementwise(op: Op, fusable: Sequence[bool]) -> bool:
    return fusable[op.index] and not op.kind.startswith(("loop_", "branch_"))


def _behind(graph: Graph, fusable: Sequence[bool], live: Sequence[bool]) -> list[int]:
    """Operations on the result of a product, up to the next reduction or product."""
    depth = [0] * len(graph.values)  # products and reductions on the longest path to a value
    maker = [-1] * len(graph.values)  # the product whose kernel makes a value
    home = [-1] * len(graph.ops)
    for op in graph.ops:
        if not live[op.index]:
            continue
        inputs = [i for i in op.inputs if i != SCALAR]
        level = max((depth[i] for i in inputs), default=0)
        product = max((maker[i] for i in inputs if depth[i] == level), default=-1)
        if product >= 0 and graph.ops[product].region != op.region:
            product = -1
        if product >= 0 and _leaves_image(graph, op, graph.ops[product]):
            product = -1
        reduces = op.kind.startswith(("reduce_", "arg"))
        if op.kind == "loop_ys" and op.phase is Phase.FORWARD and inputs:
            home[op.index], product = maker[inputs[0]], -1
        elif op.kind in PRODUCTS:
            level, product = level + 1, op.index if _absorbs(op) else -1
        elif reduces or op.kind in FOLDED or _elementwise(op, fusable):
            if product >= 0 and op.phase is not Phase.UPDATE:
                home[op.index] = product
            else:
                product = -1
            if reduces:
                level, product = level + 1, -1
        elif op.kind not in PASSES:
            level, product = level + 1, -1
        for o in op.outputs:
            depth[o], maker[o] = level, product
    return home


def _leaves_image(graph: Graph, op: Op, product: Op) -> bool:
    """Whether an operation changes the shape of a convolution's images, such as ``jnp.repeat`` or
    pooling by a reshape: the convolution's kernel ends there."""
    if product.kind != "conv_general_dilated" or op.kind not in ("reshape", "broadcast_in_dim"):
        return False
    return op.inputs[0] != SCALAR and len(graph.values[op.outputs[0]].shape) > 4


def _before(
    graph: Graph,
    fusable: Sequence[bool],
    is_written: Sequence[bool],
    live: Sequence[bool],
    home: list[int],
) -> tuple[int, ...]:
    """Add operations that only such kernels read, and that these kernels compute themselves."""
    readers: list[list[int]] = [[] for _ in graph.values]
    for op in graph.ops:
        if live[op.index]:
            for i in set(op.inputs):
                if i != SCALAR:
                    readers[i].append(op.index)
    final = set(graph.outputs)
    for op in reversed(graph.ops):
        here = op.index
        if not live[here] or home[here] >= 0 or not op.outputs:
            continue
        if op.phase is Phase.UPDATE or not _elementwise(op, fusable):
            continue
        if any(is_written[o] or o in final for o in op.outputs):
            continue
        reading = [r for o in op.outputs for r in readers[o]]
        homes = [r if _absorbs(graph.ops[r]) else home[r] for r in reading]
        here_too = all(graph.ops[r].region == op.region for r in reading)
        if homes and here_too and min(homes) >= 0:
            home[here] = min(homes)
    return tuple(home)


def product_kernels(
    graph: Graph,
    rules: Sequence[FactorRule],
    groups: Groups,
    home: Sequence[int],
    written_values: Written,
    device: Device,
    handed: frozenset[int],
) -> dict[int, ProductKernel]:
    """The kernel of each product.

    Operands count as the arrays that they are computed from. Other arrays that absorbed operations
    read and write have the shape of the result, or are small, and count as part of the result.
    ``handed`` are gradients that products pass to their updates (``gradients_in_updates``): they
    are not written. A collective between the two is charged for that (``planner.cost.reshard``).
    """
    operands: dict[int, tuple[int, int]] = {}
    more: dict[int, int] = {}
    behind: dict[int, dict[int, int]] = {}
    writes: dict[int, set[int]] = {}
    for op in graph.ops:
        if op.kind in PRODUCTS:
            first, second = (
                0 if i == SCALAR else sum(written_values.sources[i].values()) for i in op.inputs[:2]
            )
            result = op.outputs[0]
            operands[op.index] = (first, second)
            more[op.index] = sum(_further(written_values, i) for i in op.inputs[:2])
            stays = written_values.kept[result] and result not in handed
            behind[op.index] = {result: written_values.nbytes[result]} if stays else {}
            writes[op.index] = {result} if stays else set()
        elif home[op.index] in behind and op.kind != "loop_ys":
            inside = behind[home[op.index]]
            writes[home[op.index]].update(
                o
                for o in op.outputs
                if written_values.kept[o] and written_values.base[o] not in handed
            )
            read = [written_values.sources[i] for i in op.inputs if i != SCALAR]
            made = {o: written_values.nbytes[o] for o in op.outputs if written_values.kept[o]}
            for v, nbytes in ((v, n) for some in (*read, made) for v, n in some.items()):
                if written_values.base[v] not in handed:
                    inside[written_values.base[v]] = nbytes
    lanes = image_lanes(graph, groups.op_layouts, groups.fuses)
    tile = (device.tile_rows, device.tile_lanes)
    out: dict[int, ProductKernel] = {}
    for index, (first, second) in operands.items():
        op = graph.ops[index]
        output = graph.values[op.outputs[0]]
        padded = padding(output.shape, tile, lanes.get(output.index, ())[:1])
        idle, moves = 1.0, [1.0, 1.0, 1.0]
        entry = groups.op_layouts[index]
        if entry is not None:
            for place, there, best in copied(graph, op, (*entry[1], *entry[2]), tile):
                moves[place] = there if there < FAR * best else 2.0 * there + best
                padded = there if place == 2 else padded
        if op.kind == "conv_general_dilated":
            features = _features(rules[index])
            idle = -(-features // device.tile_lanes) * device.tile_lanes / features
        moved, lanes_s = sum(behind[index].values()), math.prod(output.shape) * device.lane_bytes
        hidden = any(written_values.nbytes[o] >= lanes_s for o in writes[index])
        stored = (moved + (0 if hidden else lanes_s)) * padded
        both = (first * moves[0], second * moves[1])
        size = math.prod(output.shape)
        arrays = more[index] + sum(n >= size for n in behind[index].values()) - 1
        slower = drag(max(0, arrays))
        out[index] = ProductKernel(*both, moved * moves[2], stored, idle, lanes_s, slower)
    return out


def _further(written_values: Written, operand: int) -> int:
    """The arrays, besides the largest, that a product computes an operand from as it reads it."""
    sizes = [] if operand == SCALAR else list(written_values.sources[operand].values())
    return max(0, sum(2 * n >= max(sizes) for n in sizes) - 1)


def _features(rule: FactorRule) -> int:
    """Output features of a convolution: the factors that its second operand and result share."""
    second, result = ({f for dim in x for f in dim} for x in (rule.operands[1], rule.results[0]))
    return max(1, math.prod(rule.sizes[f] for f in second & result))


def seen_shares(
    graph: Graph,
    rules: Sequence[FactorRule],
    home: Sequence[int],
    fused: FusedCalls,
    device: Device,
) -> list[float]:
    """Per operation, the share of its time that is not hidden by the product that absorbs it.

    A split of a product also splits what it absorbs, so the unsharded step gives the share.
    """
    product_s, vector_s = [0.0] * len(graph.ops), [0.0] * len(graph.ops)
    for op in graph.ops:
        at = op.index if op.kind in PRODUCTS else home[op.index]
        if at < 0:
            continue
        flops = op_flops(graph, op, rules[op.index])
        dtype = graph.values[op.outputs[0]].dtype
        if op.kind in PRODUCTS:
            product_s[at] += op_time_s(device, flops, 0.0, dtype, "matmul")
        elif fused.call[op.index] < 0:
            vector_s[at] += op_time_s(device, flops, 0.0, dtype)
    return [
        1.0 if at < 0 else max(0.0, 1.0 - product_s[at] / vector_s[at]) if vector_s[at] else 0.0
        for at in home
    ]
