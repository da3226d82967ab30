"""Masks for sequence parallelism: the batch's second dimension stays split over a mesh axis.

The dimension is followed through the step: a link connects the same dimension of a value in two
groups, and within a group, equal dimensions are one factor. For values between operations that have
the dimension, only strategies remain that split it over the axis. A value that several operations
read (keys and values of attention) may be gathered for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from planner.graph.ir import Graph
from planner.space.groups import Groups
from planner.space.strategies import strategies_of
from planner.spec import MeshSpec

Mask = NDArray[np.bool_]
Place = tuple[int, int]
"""A group and one of its factors."""


def batch_inputs(graph: Graph) -> tuple[int, ...]:
    """Arguments of the batch that have dimensions."""
    known = graph.values
    return tuple(v for v in graph.inputs if known[v].fed and known[v].splits)


def sequences(graph: Graph) -> tuple[int, ...]:
    """Arguments of the batch whose second dimension is a sequence: integer arrays (tokens) of two
    dimensions, and all arrays of three."""
    values = graph.values
    return tuple(
        v
        for v in batch_inputs(graph)
        if len(values[v].shape) == 3
        or (len(values[v].shape) == 2 and values[v].dtype.startswith(("int", "uint")))
    )


def followed(groups: Groups, values: Iterable[int], dim: int) -> frozenset[Place]:
    """All places that a dimension of some values reaches. Linear in links."""
    homes = [groups.home[v] for v in values]
    return reached(groups, {(h[0], h[1][dim]) for h in homes if h is not None and h[1][dim] >= 0})


def reached(groups: Groups, start: Iterable[Place]) -> frozenset[Place]:
    """All places that some factors reach along the links. Linear in links."""
    near: dict[Place, list[Place]] = {}
    for link in groups.links:
        if link.operand == -1:
            continue  # into the state of the next step
        for src, dst in zip(link.src, link.dst, strict=True):
            if src >= 0 and dst >= 0:
                near.setdefault((link.a, src), []).append((link.b, dst))
    places = set(start)
    stack = list(places)
    while stack:
        for there in near.get(stack.pop(), ()):
            if there not in places:
                places.add(there)
                stack.append(there)
    return frozenset(places)


def along_the_sequence(
    axis: str, graph: Graph, groups: Groups, mesh: MeshSpec, hard: Mapping[int, Mask]
) -> dict[int, Mask]:
    """Masks that keep the sequence split over an axis, if strategies for that remain.

    Args:
        axis: a mesh axis.
        graph, groups, mesh: as for ``pins.pin_masks``.
        hard: masks so far.
    """
    places = followed(groups, sequences(graph), 1)
    held = [place for place in places if groups.groups[place[0]].kind == "fused"]
    return axis_masks(axis, held, groups, mesh, hard)


def axis_masks(
    axis: str, places: Iterable[Place], groups: Groups, mesh: MeshSpec, hard: Mapping[int, Mask]
) -> dict[int, Mask]:
    """Masks of the strategies that split one of some factors over an axis, if there are any."""
    at = mesh.names.index(axis)
    having: dict[int, list[int]] = {}
    for group, factor in places:
        having.setdefault(group, []).append(factor)
    masks = dict(hard)
    for group, factors in having.items():
        g = groups.groups[group]
        full = strategies_of(g, mesh.sizes)
        wanted = np.isin(full.use[:, at], factors)
        both = masks[group] & wanted if group in masks else wanted
        if both.any():
            masks[group] = both
    return masks
