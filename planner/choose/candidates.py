"""What a request allows: the meshes, and on each mesh the strategies of every group."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from planner.annotate import Pin
from planner.errors import PinError
from planner.modes import PROPAGATION
from planner.request.axes.sequence import along_the_sequence
from planner.request.axes.tensor import along_parameters, off_parameters
from planner.request.axes.uses import use_masks
from planner.request.parsed import Request
from planner.request.pins import (
    Mask,
    axis_names,
    in_pinned_order,
    mode_pins,
    pin_masks,
    soft_masks,
)
from planner.request.state import StateRequest, data_axes, find_state, state_masks
from planner.space.decisions import DECISIONS
from planner.space.groups import Groups
from planner.space.strategies import strategies_of
from planner.spec import STAGE, MeshSpec, enumerate_meshes, factorizations
from planner.step.classes import Quotient

SPLITS = frozenset({"DATA_PARALLEL", "SEMI_AUTO_PARALLEL"})
"""Modes that split the batch over all devices."""


def candidate_meshes(request: Request, pins: Sequence[Pin]) -> tuple[MeshSpec, ...]:
    """The meshes that a request allows: axes that pins name exist, with size > 1 if possible."""
    n = request.cluster.num_devices
    if request.mesh is not None:
        return (request.mesh,)
    if request.tensor:
        return _tensor_meshes(request, pins)
    if request.stages > 1:
        inside = enumerate_meshes(n // request.stages, 2)
        stages = request.stages
        return tuple(MeshSpec((STAGE, *m.names), (stages, *m.sizes)) for m in inside)
    names = axis_names(pins)
    if request.mode == "DATA_PARALLEL":
        return (MeshSpec(("data",), (n,)),)
    if not names:
        return enumerate_meshes(n)
    if "data" not in names and len(names) < 3:
        names = ("data", *names)
    names = in_pinned_order(names, pins)
    splits = {sizes for k in range(1, len(names) + 1) for sizes in _spread(n, len(names), k)}
    pinned = [names.index(name) for name in axis_names(pins)]
    real = {s for s in splits if all(s[k] > 1 for k in pinned)}
    return tuple(MeshSpec(names, s).slim() for s in sorted(real or splits, reverse=True))


def _tensor_meshes(request: Request, pins: Sequence[Pin]) -> tuple[MeshSpec, ...]:
    """One mesh per degree of tensor parallelism. The rest of the devices do data parallelism, and
    other axes that marks name have size 1."""
    n = request.cluster.num_devices // request.stages
    stage = ((STAGE, request.stages),) if request.stages > 1 else ()
    axes = ("data", request.tensor)
    more = tuple(name for name in axis_names(pins) if name not in (*axes, STAGE))
    out = []
    for t in (t for t in range(1, n + 1) if n % t == 0 and (t > 1 or n == 1)):
        names, sizes = zip(*stage, *zip(axes, (n // t, t), strict=True), strict=True)
        out.append(MeshSpec(names, sizes, more))
    return tuple(out)


def _spread(n: int, width: int, parts: int) -> list[tuple[int, ...]]:
    """Factorizations into ``parts`` factors, placed on ``width`` axes with ones elsewhere."""
    out = []
    for sizes in factorizations(n, parts):
        for places in itertools.combinations(range(width), parts):
            row = [1] * width
            for place, size in zip(places, sizes, strict=True):
                row[place] = size
            out.append(tuple(row))
    return out


def batch_axes(request: Request, mesh: MeshSpec) -> tuple[str, ...]:
    """The axes over which a mode splits the batch, besides the pins."""
    return data_axes(mesh) if request.mode == "SEMI_AUTO_PARALLEL" else ()


def decision_masks(
    decided: Mapping[str, Any], groups: Groups, mesh: MeshSpec, hard: Mapping[int, Mask]
) -> dict[int, Mask]:
    """Masks that enforce the decisions that are not left to the search."""
    masks = dict(hard)
    for g in groups.groups:
        for name, _ in g.decisions:
            option = DECISIONS[name].demands(decided[name])
            if option is not None:
                wanted = strategies_of(g, mesh.sizes).option(name) == option
                masks[g.index] = masks[g.index] & wanted if g.index in masks else wanted
    return masks


def examples_alone(
    quotient: Quotient,
    pins: Sequence[Pin],
    request: Request,
    mesh: MeshSpec,
    masks: Mapping[int, Mask],
) -> Mapping[int, Mask] | None:
    """Masks that also hold the data axes of DATA_PARALLEL off the weights' dimensions. None in
    other modes, if the user gives shardings, and on meshes with a tensor axis."""
    if request.mode != "DATA_PARALLEL" or pins or request.search == PROPAGATION:
        return None
    if request.tensor in mesh.names:
        return None
    graph, groups = quotient.part.graph, quotient.part.groups
    parameters = find_state(graph, StateRequest()).parameters
    return off_parameters(data_axes(mesh), parameters, graph, groups, mesh, masks)


def allowed_masks(
    quotient: Quotient, pins: Sequence[Pin], request: Request, mesh: MeshSpec
) -> Mapping[int, Mask]:
    """The strategies of every class that the pins, the requests about the state and the mode
    allow."""
    graph, groups = quotient.part.graph, quotient.part.groups
    try:
        hard = pin_masks(pins, graph, groups, mesh)
    except PinError:
        pin_masks(pins, graph, quotient.whole.groups, mesh)  # raises for the first of equal pins
        raise
    if quotient.state is not None and request.state:
        pinned = frozenset(pin.value for pin in pins)
        hard = state_masks(quotient.state, request.state, pinned, graph, groups, mesh, hard)
    batch = batch_axes(request, mesh)
    hard = use_masks(quotient.uses, quotient.color, groups, mesh, batch, hard)
    hard = decision_masks(request.decided, groups, mesh, hard)
    if request.tensor in mesh.names:
        parameters = find_state(graph, StateRequest()).parameters
        hard = along_parameters(request.tensor, parameters, graph, groups, mesh, hard)
    if request.sequence in mesh.names:
        hard = along_the_sequence(request.sequence, graph, groups, mesh, hard)
    mode = "SEMI_AUTO_PARALLEL" if request.tensor in mesh.names else request.mode
    split = mode in SPLITS
    wishes = mode_pins(mode, graph, mesh, pins, quotient.example_dims if split else {})
    if mode != request.mode:  # apart from matrices, the mode only concerns the batch
        wishes = tuple(w for w in wishes if any(w.entries))
    return soft_masks(wishes, graph, groups, mesh, hard)
