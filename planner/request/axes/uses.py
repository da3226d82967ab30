"""Applies pins to uses: the readers of a pinned argument, and the strategies that use it as pinned.

A pin on an argument says how it is stored. It also applies to its use: every product that reads the
argument splits the pinned dimension over the pinned axis, as Megatron's column- and row-parallel
products do (Shoeybi et al. 2019). Two kinds of axes are for storage only, because a product whose
other operand is split over them can't use the argument that way (ZeRO-3): axes named ``data`` or
``fsdp``, and axes over which another pin splits the batch. Pins written as ``StoredAs`` are also
for storage only.

An argument is followed value by value, through casts, transposes, loop borders, slices and
arithmetic with other parameters, as long as every dimension of the value comes from it. Complexity:
linear in the readers of such values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.annotate import MARKS, Pin
from planner.graph.ir import SCALAR, Graph
from planner.request.axes.sequence import Place, batch_inputs, followed, reached
from planner.request.state import DATA_AXES, StateRequest, find_state
from planner.space.factors import Layout
from planner.space.groups import Groups
from planner.space.strategies import strategies_of
from planner.spec import MeshSpec, Sharding

Mask = NDArray[np.bool_]

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})
"""Operations whose results are no longer followed."""
STOPS = PRODUCTS | {"loop_back", "loop_test"}


@dataclass(frozen=True)
class ArgumentReader:
    """An operation that reads a pinned argument: its group, and the group's factor for each
    dimension of the argument (-1: none)."""

    op: int
    group: int
    factors: Layout


@dataclass(frozen=True)
class Use:
    """A pin on an argument, and the operations that mix its dimensions with others."""

    pin: Pin
    readers: tuple[ArgumentReader, ...]


@dataclass(frozen=True)
class Uses:
    """The uses of all pinned arguments. ``batch`` maps an axis that splits the batch to the pin
    that requests it."""

    uses: tuple[Use, ...]
    batch: Mapping[str, str]

    def storage(self, pin: Pin, axis: str) -> str:
        """Why an axis of a pin is for storage only; empty if it is for use as well."""
        if pin.storage:
            return "the pin is for storage only"
        if for_storage(axis):
            return f"an axis named {axis} is for storage"
        if axis in self.batch:
            return f"{axis} splits the batch ({self.batch[axis]})"
        return ""


NO_USES = Uses((), {})


def for_storage(axis: str) -> bool:
    """Whether an axis is for storage by its name: ``data``, ``fsdp``, or names like ``fsdp_2``."""
    return axis.split("_")[0] in DATA_AXES


def find_uses(pins: Sequence[Pin], graph: Graph, groups: Groups) -> Uses:
    """The uses of pinned arguments. Optimizer state is only stored and has none."""
    state = find_state(graph, StateRequest()).others
    inputs = set(graph.inputs)
    argument_pins = [pin for pin in pins if pin.value in inputs and pin.value not in state]
    if not argument_pins:
        return NO_USES
    consumers: list[list[tuple[int, int]]] = [[] for _ in graph.values]
    live = graph.live_ops()
    for op in graph.ops:
        if live[op.index]:
            for position, value in enumerate(op.inputs):
                if value != SCALAR:
                    consumers[value].append((op.index, position))
    marked = {pin.value: pin.entries for pin in pins if pin.value not in inputs}
    walk = _Walk(graph, groups, consumers, marked, _of_batch(graph))
    uses = tuple(walk.use(pin) for pin in argument_pins)
    return Uses(uses, _batch_axes(pins, uses, graph, groups))


def _of_batch(graph: Graph) -> set[int]:
    """Values that depend on an argument of the batch."""
    out = set(batch_inputs(graph))
    size = -1
    while size != len(out):  # more passes if loops carry values around
        size = len(out)
        for op in graph.ops:
            if op.kind == "loop_back":
                if op.inputs[0] in out:
                    out.update(op.inputs[1:])
            elif not out.isdisjoint(op.inputs):
                out.update(op.outputs)
    return out


@dataclass(frozen=True)
class _Walk:
    """Follows arguments, by the readers of every value, the entries of marks, and the values that
    depend on the batch."""

    graph: Graph
    groups: Groups
    consumers: Sequence[Sequence[tuple[int, int]]]
    marked: Mapping[int, tuple[object, ...]]
    of_batch: Set[int]

    def use(self, pin: Pin) -> Use:
        """Follow one argument to the operations that mix its dimensions."""
        rank = len(self.graph.values[pin.value].shape)
        origin = {pin.value: tuple(range(rank))}  # per value and dimension, the argument's
        stack = [pin.value]
        readers: dict[ArgumentReader, None] = {}
        while stack:
            value = stack.pop()
            for index, position in self.consumers[value]:
                entry = self.groups.op_layouts[index]
                if entry is None or self.is_marked_otherwise(index, pin):
                    continue
                group, ins, outs = entry
                factors = [-1] * rank
                for dim, factor in zip(origin[value], ins[position], strict=True):
                    if dim >= 0:
                        factors[dim] = factor
                if self.groups.groups[group].kind == "anchor":
                    readers.setdefault(ArgumentReader(index, group, tuple(factors)))
                known = {f: d for d, f in enumerate(factors) if f >= 0}
                for layout, out in self.followed(index, outs, origin):
                    if known and all(f in known or f < 0 for f in layout) and max(layout) >= 0:
                        origin[out] = tuple(known.get(f, -1) for f in layout)
                        stack.append(out)
        return Use(pin, tuple(readers))

    def is_marked_otherwise(self, index: int, pin: Pin) -> bool:
        """Whether an operation is a mark with other entries, which apply from there on."""
        op = self.graph.ops[index]
        return op.kind in MARKS and self.marked.get(op.outputs[0], pin.entries) != pin.entries

    def followed(
        self, index: int, outs: Sequence[Layout], origin: Mapping[int, object]
    ) -> list[tuple[Layout, int]]:
        """Results of an operation to follow: none for products, or if it also reads the batch."""
        op = self.graph.ops[index]
        others = [v for v in op.inputs if v not in origin and v in self.of_batch]
        if op.kind in STOPS or any(self.graph.values[v].shape for v in others):
            return []
        new = zip(outs, op.outputs, strict=True)
        return [(layout, out) for layout, out in new if layout and out not in origin]


def _batch_axes(
    pins: Sequence[Pin], uses: Sequence[Use], graph: Graph, groups: Groups
) -> dict[str, str]:
    """Axes over which a pin splits the batch at a product whose other operand is pinned over the
    same axis."""
    batch = followed(groups, batch_inputs(graph), 0)
    out: dict[str, str] = {}
    for pin in pins:
        home, first = groups.home[pin.value], Sharding.of(pin.fixed[:1]).axes
        if pin.storage or home is None or (place := (home[0], home[1][0])) not in batch:
            continue
        axes = [a for a in first if a not in out and not for_storage(a)]
        reach = _factors(reached(groups, {place})) if axes else {}
        for axis in axes:
            others = [u for u in uses if u.pin.value != pin.value and not u.pin.storage]
            if any(_meets(use, axis, reach) for use in others):
                out[axis] = pin.origin
    return out


def _factors(places: Iterable[Place]) -> dict[int, set[int]]:
    out: dict[int, set[int]] = {}
    for group, factor in places:
        out.setdefault(group, set()).add(factor)
    return out


def _meets(use: Use, axis: str, reach: Mapping[int, set[int]]) -> bool:
    """Whether a reader would split two of its factors over an axis: the pinned one and another."""
    dims = [d for d, axes in enumerate(Sharding.of(use.pin.fixed).dims) if axis in axes]
    return any(
        reach.get(reader.group, set()) - {reader.factors[d]} and reader.factors[d] >= 0
        for reader in use.readers
        for d in dims
    )


def use_masks(
    uses: Uses,
    color: Sequence[int],
    groups: Groups,
    mesh: MeshSpec,
    storage: Sequence[str],
    hard: Mapping[int, Mask],
) -> dict[int, Mask]:
    """Masks that apply pins where arguments are read, as far as operations and other pins allow.

    Args:
        uses: the uses of the whole step.
        color: per group of the whole step, the index of its group in ``groups``.
        groups: the groups that the masks are for.
        mesh: the logical mesh.
        storage: further axes that are for storage only.
        hard: masks so far.
    """
    demands: dict[tuple[int, tuple[tuple[int, int], ...]], None] = {}
    for use in uses.uses:
        spec = Sharding.of(use.pin.fixed)
        at = {
            mesh.names.index(axis): d
            for d, axes in enumerate(spec.dims)
            for axis in axes
            if axis in mesh.names and axis not in storage and not uses.storage(use.pin, axis)
        }
        for reader in use.readers if at else ():
            wanted = tuple((k, f) for k, d in at.items() if (f := reader.factors[d]) >= 0)
            demands.setdefault((color[reader.group], wanted))
    masks = dict(hard)
    for group, wanted in demands:
        g = groups.groups[group]
        full = strategies_of(g, mesh.sizes)
        each = [full.use[:, k] == f for k, f in wanted if mesh.sizes[k] > 1]
        together = [np.logical_and.reduce(each)] if each else []
        for good in (*together, *each):  # all at once, else one by one
            both = masks[group] & good if group in masks else good
            if both.any():
                masks[group] = both
    return masks
