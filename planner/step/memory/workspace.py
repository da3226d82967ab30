"""The memory that operations allocate besides their operands and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from planner.graph.ir import PRODUCTS, RAGGED, SCALAR, Graph, Op
from planner.rules.kernels.regions import REGION
from planner.space.factors import Layout
from planner.space.groups import GroupLink, Groups
from planner.step.kernels.flops import masked_operands, ragged_groups
from planner.step.memory.materialized import Written
from planner.step.memory.tiles import copied
from planner.step.op_kinds import FOLDED, extents


class Extra(NamedTuple):
    """A copy of a value, or ``share`` times its bytes, in a layout of a group from moment ``first``
    until before ``last``; ``stored``: laid out as the value is stored."""

    group: int
    first: int
    last: int
    value: int
    layout: Layout
    share: float = 1.0
    stored: bool = False


def workspaces(
    graph: Graph,
    groups: Groups,
    written_values: Written,
    live: Sequence[bool],
    tile: tuple[int, int],
    moves: Callable[[GroupLink], bool],
) -> Iterator[Extra]:
    """The extra memory of all operations, for the compiler whose kernels are ``written_values``;
    ``tile``: rows and lanes; ``moves``: whether a link makes a copy."""
    if written_values.merges:
        yield from _uneven(graph, groups, written_values, live)
        yield from _masked(graph, groups, written_values, live)
    else:
        yield from _narrowed(graph, groups, written_values, live, moves)
        yield from _copied(graph, groups, written_values, live, tile)
    yield from _regions(graph, groups, written_values, live)


def _regions(
    graph: Graph, groups: Groups, written_values: Written, live: Sequence[bool]
) -> Iterator[Extra]:
    """The memory inside a ``shard_map``, which is already that of one device."""
    for op in graph.ops:
        entry = groups.op_layouts[op.index]
        held = op.held[written_values.merges]
        if op.kind != REGION or entry is None or not live[op.index] or not held:
            continue
        at, sized = (
            written_values.time[op.index],
            [v for v in op.outputs if written_values.nbytes[v]],
        )
        if sized:
            layout = entry[2][op.outputs.index(sized[0])]
            yield Extra(
                entry[0], at, at + 1, sized[0], layout, held / written_values.nbytes[sized[0]]
            )


def _narrowed(
    graph: Graph,
    groups: Groups,
    written_values: Written,
    live: Sequence[bool],
    moves: Callable[[GroupLink], bool],
) -> Iterator[Extra]:
    """Copies in bfloat16 of float32 stacks whose slices only products read: XLA:TPU converts them
    once, before the first loop that reads them, or before they are sent into an outer loop."""
    sent = {
        x.value
        for x in groups.links
        if x.operand >= 0
        and graph.ops[x.op].kind == "loop_const"
        and x.nbytes < graph.values[x.value].nbytes
        and moves(x)
    }
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for i in set(op.inputs) if live[op.index] else ():
            readers.setdefault(i, []).append(op)

    def multiplied(value: int) -> bool:
        reading = readers.get(value, [])
        return bool(reading) and all(
            r.kind in PRODUCTS
            or (r.kind in FOLDED and multiplied(r.outputs[0]))
            or (r.kind == "convert_element_type" and graph.values[r.outputs[0]].dtype == "bfloat16")
            for r in reading
        )

    def arrives(value: int) -> bool:
        """Whether a value comes converted from outside of an outer loop."""
        while value != SCALAR and (maker := graph.values[value].op) >= 0:
            op = graph.ops[maker]
            if op.kind not in ("loop_const", "optimization_barrier"):
                break
            value = op.inputs[op.outputs.index(value)]
            if value in sent:
                return True
        return False

    begin, stop = extents(graph, written_values.time)
    spans: dict[int, tuple[int, int]] = {}
    for op in graph.ops:
        if op.kind != "loop_xs" or not live[op.index] or op.inputs[0] == SCALAR:
            continue
        stack = graph.values[op.inputs[0]]
        if stack.dtype == "float32" and not arrives(stack.index) and multiplied(op.outputs[0]):
            region = readers[op.outputs[0]][0].region
            first, last = spans.get(stack.index, (begin[region], 0))
            spans[stack.index] = min(first, begin[region]), max(last, stop[region] + 1)
    for value, (first, last) in spans.items():
        home = groups.home[value]
        if home is not None:
            yield Extra(home[0], first, last, value, home[1], 0.5, stored=True)


def _copied(
    graph: Graph,
    groups: Groups,
    written_values: Written,
    live: Sequence[bool],
    tile: tuple[int, int],
) -> Iterator[Extra]:
    """The copies of products of many small matrices: copies of operands, padding of results."""
    for op in graph.ops:
        entry = groups.op_layouts[op.index]
        if entry is None or not live[op.index]:
            continue
        at, layouts = written_values.time[op.index], (*entry[1], *entry[2])
        for place, there, best in copied(graph, op, layouts, tile):
            value = (*op.inputs, *op.outputs)[place]
            if written_values.kept[value]:
                share = there / best - (place >= len(op.inputs))
                yield Extra(entry[0], at, at + 1, value, layouts[place], share)


def _uneven(
    graph: Graph, groups: Groups, written_values: Written, live: Sequence[bool]
) -> Iterator[Extra]:
    """The padded copies that strided convolutions read, each until the last reader of the value.

    GPU libraries pad both sides equally; ``SAME`` with a stride pads one side more
    (openxla/xla, conv_padding_legalization).
    """
    readers: dict[int, list[int]] = {}
    for op in graph.ops:
        if op.kind == "conv_general_dilated" and live[op.index]:
            for i in set(op.inputs):
                readers.setdefault(i, []).append(written_values.time[op.index])
    for op in graph.ops:
        entry = groups.op_layouts[op.index]
        if entry is None or not live[op.index] or op.kind != "conv_general_dilated":
            continue
        shapes = [graph.values[v].shape for v in (*op.inputs, *op.outputs)]
        if pads_unevenly(shapes, (*entry[1], *entry[2])):
            stop = max(readers[op.inputs[0]]) + 1
            yield Extra(entry[0], written_values.time[op.index], stop, op.inputs[0], entry[1][0])


def _masked(
    graph: Graph, groups: Groups, written_values: Written, live: Sequence[bool]
) -> Iterator[Extra]:
    """The masked copies of ragged products, one per group: of the rows, and for gradients of both
    operands (XLA:GPU)."""
    for op in graph.ops:
        entry = groups.op_layouts[op.index]
        if entry is None or not live[op.index] or op.kind not in RAGGED:
            continue
        at, many = written_values.time[op.index], float(ragged_groups(graph, op))
        count = masked_operands(graph, op)
        for value, layout in zip(op.inputs[:count], entry[1], strict=False):
            if value != SCALAR:
                yield Extra(entry[0], at, at + 1, value, layout, many)


def pads_unevenly(shapes: Sequence[tuple[int, ...]], layouts: Sequence[Layout]) -> bool:
    """Whether a convolution with a stride pads one end of a dimension more than the other.

    Args:
        shapes: those of the image, the kernel and the result.
        layouts: their factors. The kernel's spatial dimensions are those that it shares with
            neither; of the others' dimensions that it does not share, the first is the batch.
    """
    image, kernel, result = (set(layout) - {-1} for layout in layouts)

    def apart(k: int, others: set[int]) -> list[int]:
        return [n for n, f in zip(shapes[k], layouts[k], strict=True) if f not in others]

    ends = zip(apart(0, kernel)[1:], apart(1, image | result), apart(2, kernel)[1:], strict=False)
    for before, window, after in ends:
        stride = before // max(after, 1)
        total = (after - 1) * stride + window - before
        if stride > 1 and before == stride * after and total > 0 and total % 2:
            return True
    return False
