"""Masks for tensor parallelism: every product must split the parameter it reads, or must not.

Parameters with two or more dimensions are followed, through casts and transposes, to the operations
that mix their dimensions. For these operations and for the parameters, only strategies remain that
split a dimension of the parameter over the axis: the columns of a matrix, or its rows, as in
Megatron (Shoeybi et al. 2019). The search chooses which of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from planner.graph.ir import Graph
from planner.request.axes.sequence import Place, axis_masks
from planner.request.state import is_value_group
from planner.space.groups import Groups
from planner.space.strategies import strategies_of
from planner.spec import MeshSpec

Mask = NDArray[np.bool_]


def along_parameters(
    axis: str,
    parameters: Iterable[int],
    graph: Graph,
    groups: Groups,
    mesh: MeshSpec,
    hard: Mapping[int, Mask],
) -> dict[int, Mask]:
    """Masks that split the parameters' dimensions over an axis, if the axis divides them.

    Args:
        axis: a mesh axis.
        parameters: graph values.
        graph, groups, mesh: as for ``pins.pin_masks``.
        hard: masks so far.
    """
    return axis_masks(axis, _places(parameters, graph, groups), groups, mesh, hard)


def off_parameters(
    axes: Iterable[str],
    parameters: Iterable[int],
    graph: Graph,
    groups: Groups,
    mesh: MeshSpec,
    hard: Mapping[int, Mask],
) -> dict[int, Mask]:
    """Masks that prevent the readers of parameters from splitting the parameters' dimensions over
    some axes, if these axes can split another dimension: data parallelism splits only examples. A
    dimension that the operands share and the result has, as of a batch of matrices, stays open.

    Args:
        axes: mesh axes.
        parameters: graph values.
        graph, groups, mesh: as for ``pins.pin_masks``.
        hard: masks so far.
    """
    read: dict[int, set[int]] = {}
    for group, factor in _places(parameters, graph, groups):
        if groups.groups[group].kind == "anchor":
            read.setdefault(group, set()).add(factor)
    for group, shared in _shared(groups, read).items():
        read[group] -= shared - groups.groups[group].reduction
    masks = dict(hard)
    for group, factors in read.items():
        g = groups.groups[group]
        use = strategies_of(g, mesh.sizes).use[:, [mesh.names.index(axis) for axis in axes]]
        barred = np.isin(use, sorted(factors))
        others = ((use >= 0) & ~barred).any(axis=0)
        both: Mask = np.asarray(~(barred & others).any(axis=1))
        if group in masks:
            both = both & masks[group]
        if both.any():
            masks[group] = both
    return masks


def _shared(groups: Groups, read: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """Per group, the factors that more than one operand has."""
    seen: dict[int, dict[int, set[int]]] = {}
    for link in groups.links:
        if link.b in read and link.operand >= 0:
            factors = seen.setdefault(link.b, {}).setdefault(link.operand, set())
            factors.update(f for f in link.dst if f >= 0)
    return {
        group: {
            f
            for f in set().union(*by_operand.values())
            if sum(f in x for x in by_operand.values()) > 1
        }
        for group, by_operand in seen.items()
    }


def _places(parameters: Iterable[int], graph: Graph, groups: Groups) -> set[Place]:
    """The dimensions of matrices among the parameters, where these are stored and read."""
    near: dict[int, list[tuple[dict[int, int], int]]] = {}
    for link in groups.links:
        if link.operand != -1:
            pairs = {f: g for f, g in zip(link.src, link.dst, strict=True) if min(f, g) >= 0}
            near.setdefault(link.a, []).append((pairs, link.b))
    places: set[Place] = set()
    for value in parameters:
        home = groups.home[value]
        if home is not None and len(graph.values[value].shape) > 1:
            places |= _reached(groups, near, home[0], home[1])
    return places


def _reached(
    groups: Groups,
    near: Mapping[int, list[tuple[dict[int, int], int]]],
    group: int,
    layout: tuple[int, ...],
) -> set[Place]:
    """A parameter's dimensions, where it is stored, passed on and read; empty if no operation that
    mixes dimensions reads it."""
    if not is_value_group(groups.groups[group], layout):
        return set()
    places = {(group, f) for f in layout if f >= 0}
    stack, read = [group], False
    while stack:
        here = stack.pop()
        for pairs, there in near.get(here, ()):
            new = {(there, g) for f, g in pairs.items() if (here, f) in places} - places
            if not new:
                continue
            reader = groups.groups[there]
            factors = tuple(g for _, g in new)
            if reader.kind == "anchor":
                read = True
                places |= new
            elif is_value_group(reader, factors):
                places |= new
                stack.append(there)
    return places if read else set()
