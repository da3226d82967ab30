"""Turns pins and modes into masks over each group's strategies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from planner.annotate import FLAX, Pin
from planner.errors import PinError, RequestError
from planner.graph.ir import Graph
from planner.request.state import data_axes
from planner.space.groups import Groups
from planner.space.strategies import StrategySet, digits, strategies_of
from planner.spec import Entry, MeshSpec, Sharding

Mask = NDArray[np.bool_]


def axis_names(pins: Sequence[Pin]) -> tuple[str, ...]:
    """Mesh axis names that pins use, in order of first appearance."""
    names: dict[str, None] = {}
    for pin in pins:
        for name in Sharding.of(pin.fixed).axes:
            names.setdefault(name)
    return tuple(names)


def in_pinned_order(names: Sequence[str], pins: Sequence[Pin]) -> tuple[str, ...]:
    """Mesh axes in an order that agrees with the axes of every pinned dimension, if there is one;
    otherwise as they are. A sharding lists the axes of a dimension in mesh order."""
    dims = [axes for pin in pins for axes in Sharding.of(pin.fixed).dims if len(axes) > 1]
    behind = nx.DiGraph(pair for axes in dims for pair in itertools.pairwise(axes))
    behind.add_nodes_from(names)
    place = {name: k for k, name in enumerate(names)}
    try:
        return tuple(nx.lexicographical_topological_sort(behind, key=lambda n: place.get(n, 0)))
    except nx.NetworkXUnfeasible:
        return tuple(names)


def pin_masks(pins: Sequence[Pin], graph: Graph, groups: Groups, mesh: MeshSpec) -> dict[int, Mask]:
    """Masks of the strategies that honor every pin, by group.

    Raises:
        PinError: a pin can't be honored, and is named: an axis that the mesh lacks, a dimension
            that doesn't divide, a dimension that an operation needs whole, or two pins
            that contradict each other.
    """
    masks: dict[int, Mask] = {}
    first: dict[int, str] = {}
    for pin in pins:
        value = graph.values[pin.value]
        try:
            spec = Sharding.of(pin.fixed, len(value.shape))
            spec.check(value.shape, mesh)
        except RequestError as error:
            hint = "; a logical name needs logical_axis_rules" if pin.rule == FLAX else ""
            raise PinError(f"{pin.origin}: {value}: {error}{hint}") from error
        home = groups.home[pin.value]
        if home is None:
            continue
        group, layout = home
        full = _strategies(groups, group, mesh)
        wanted = np.asarray(_digits(spec, mesh, pin.origin))
        got = digits(full.store, layout, frozenset(), len(layout))
        free = (wanted == 0) & np.isin(got, [d + 1 for d in pin.free])
        mask = ((got == wanted) | free).all(axis=1)
        if not mask.any():
            whole = [
                d
                for d, f in enumerate(layout)
                if any(mesh.size(a) > 1 for a in spec.dims[d])
                and (f < 0 or not groups.groups[group].shardable[f])
            ]
            raise PinError(
                f"{pin.origin}: {value} can't be sharded as {pin.text} on mesh ({mesh}): "
                + (
                    f"an operation needs dimension {whole[0]} whole"
                    if whole
                    else "the operations that share its sharding don't allow it"
                )
                + "; mark another dimension or place the mark after that operation"
            )
        combined = masks.get(group, np.ones(full.count, bool)) & mask
        if not combined.any():
            raise PinError(
                f"{pin.origin} ({value} as {pin.text}) contradicts {first[group]}: the two values "
                "share one sharding; change one of the marks"
            )
        masks[group] = combined
        first.setdefault(group, f"{pin.origin} ({value} as {pin.text})")
    return masks


def _strategies(groups: Groups, group: int, mesh: MeshSpec) -> StrategySet:
    g = groups.groups[group]
    return strategies_of(g, mesh.sizes)


def _digits(spec: Sharding, mesh: MeshSpec, origin: str) -> list[int]:
    out = [0] * len(mesh.names)
    for d, axes in enumerate(spec.dims):
        order = [mesh.names.index(a) for a in axes if mesh.size(a) > 1]
        if order != sorted(order):
            raise PinError(
                f"{origin}: axes {axes} of dimension {d} must stand in mesh order ({mesh})"
            )
        for k in order:
            out[k] = d + 1
    return out


def check_rules(given: Any) -> Mapping[str, Any]:
    """Check the rules for arguments; raises RequestError."""
    if given is None or (isinstance(given, Mapping) and all(isinstance(k, str) for k in given)):
        return given or {}
    raise RequestError(
        f"shardings= is a {type(given).__name__}: expected a dict from a regular expression over "
        "the paths of arguments to a PartitionSpec, such as "
        "{r\"\\['kernel'\\]$\": PartitionSpec(None, 'model')}"
    )


def mode_pins(
    mode: str,
    graph: Graph,
    mesh: MeshSpec,
    pinned: Sequence[Pin],
    examples: Mapping[int, int],
) -> tuple[Pin, ...]:
    """The pins that a mode implies for the inputs that the user did not pin.

    DATA_PARALLEL and SEMI_AUTO_PARALLEL split the example dimension of the batch, and of state with
    examples, over the data axes: the first dimension, or that in ``examples``. Every other input is
    replicated. AUTO_PARALLEL implies no pins.
    """
    if mode == "AUTO_PARALLEL":
        return ()
    have = {p.value for p in pinned}
    data = data_axes(mesh)
    parts = math.prod(mesh.size(n) for n in data)
    out = []
    for index, path in zip(graph.inputs, graph.input_paths, strict=True):
        value = graph.values[index]
        if index in have or not value.splits:
            continue
        dim = examples.get(index, 0)
        batch = (
            mode in ("DATA_PARALLEL", "SEMI_AUTO_PARALLEL")
            and value.has_examples
            and value.shape[dim] % parts == 0
            and parts > 1
        )
        entries: tuple[Entry, ...] = (*[None] * dim, data) if batch else ()
        out.append(Pin(index, entries, f"mode {mode} at {path}"))
    return tuple(out)


def soft_masks(
    pins: Sequence[Pin],
    graph: Graph,
    groups: Groups,
    mesh: MeshSpec,
    hard: Mapping[int, Mask],
) -> dict[int, Mask]:
    """Masks of ``mode_pins``; a pin that contradicts the user's pins or operations is dropped."""
    masks = dict(hard)
    for pin in pins:
        try:
            only = pin_masks((pin,), graph, groups, mesh)
        except PinError:
            continue
        for group, mask in only.items():
            both = masks[group] & mask if group in masks else mask
            if both.any():
                masks[group] = both
    return masks
