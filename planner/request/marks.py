"""Turns all marks of a user into pins: path rules, placed arguments, Flax metadata, marks inside.

If two of them apply to one argument, both must hold. However, a mark inside the model on an
argument itself determines how it is stored only if nothing else does.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import jax

from costmodels import Cluster, ClusterError, parse_cluster
from planner.annotate import EDGE, FREE, Pin, StoredAs, entries_text, mark_entries, placed_entries
from planner.arguments.metadata import Rules, metadata_pins
from planner.errors import PinError, RequestError
from planner.graph.trace import Traced
from planner.request.axes.meshes import counterparts, on_mesh, region_mesh
from planner.request.parsed import Request
from planner.rules.kernels.regions import REGION, is_region, region_axes
from planner.spec import MeshSpec, Sharding

WITHOUT_PINS = frozenset({"STAND_ALONE", "DATA_PARALLEL"})
"""Modes that set all shardings themselves."""


def all_pins(
    traced: Traced,
    args: Sequence[Any],
    shardings: Mapping[str, Any],
    rules: Rules,
    mode: str,
    mesh: MeshSpec | None = None,
) -> tuple[Pin, ...]:
    """The pins of a step under a mode.

    Args:
        traced: the step.
        args: its arguments.
        shardings: rules over argument paths.
        rules: logical axis rules.
        mode: STAND_ALONE and DATA_PARALLEL set all shardings themselves and ignore marks.
        mesh: the given mesh, if any.

    Raises:
        PinError: as for ``rule_pins``.
    """
    if mode in WITHOUT_PINS:
        return ()
    inputs, paths = traced.graph.inputs, traced.graph.input_paths
    ruled = rule_pins(shardings, paths, inputs)
    taken = {pin.value for pin in ruled}
    stored = {pin.value for pin in ruled if pin.storage}
    ours = region_mesh(traced)
    placed = [pin for pin in placed_pins(args, inputs, paths, ours) if pin.value not in taken]
    boxed = metadata_pins(args, inputs, paths, rules, mesh)
    boxed = tuple(dataclasses.replace(pin, storage=pin.value in stored) for pin in boxed)
    named = (*ruled, *placed, *boxed)
    pins = (*marks(traced, {pin.value for pin in named}), *named)
    unit = {n for axes, _ in region_meshes(traced) for n, size in axes if size == 1}
    return tuple(p for p in (without_axes(pin, unit) for pin in pins) if p) if unit else pins


def ignored_marks(traced: Traced, mode: str) -> tuple[str, ...]:
    """The note on marks that a mode of ``WITHOUT_PINS`` ignores; none on one device."""
    if mode not in WITHOUT_PINS or mode == "STAND_ALONE":
        return ()
    origins = dict.fromkeys(
        pin.origin
        for pin in marks(traced, set())
        if any(entry is not None and entry is not FREE for entry in pin.entries)
    )
    if not origins:
        return ()
    count = "1 mark" if len(origins) == 1 else f"{len(origins)} marks"
    return (
        f"mode {mode} sets all shardings: {count} of the model ignored, the first is "
        f"{next(iter(origins))}; AUTO_PARALLEL and SEMI_AUTO_PARALLEL follow marks",
    )


def without_axes(pin: Pin, names: Collection[str]) -> Pin | None:
    """A pin without mesh axes of one device, which leave their dimension free; None if nothing is
    left of it."""
    entries: list[Any] = []
    for entry in pin.entries:
        axes = () if entry is None or entry is FREE else Sharding.of([entry]).dims[0]
        left = tuple(a for a in axes if a not in names)
        if len(left) == len(axes):
            entries.append(entry)
        else:
            entries.append((left if len(left) > 1 else left[0]) if left else FREE)
    says = entries == list(pin.entries) or any(e is not None and e is not FREE for e in entries)
    return dataclasses.replace(pin, entries=tuple(entries)) if says else None


def region_meshes(traced: Traced) -> list[tuple[tuple[tuple[str, int], ...], str]]:
    """The meshes of a step's ``shard_map`` regions, axes and sizes, with the first line of each."""
    first_lines: dict[tuple[tuple[str, int], ...], str] = {}
    for op, eqn in zip(traced.graph.ops, traced.eqns, strict=True):
        if op.kind == REGION and eqn is not None and is_region(eqn):
            axes = tuple(region_axes(eqn).items())
            first_lines.setdefault(axes, f"shard_map ({op.source or 'no line'})")
    return list(first_lines.items())


def marks(traced: Traced, taken: set[int]) -> tuple[Pin, ...]:
    """Pins of the marks in the model. A mark on an argument itself also determines how it is
    stored, unless another pin does (``taken``)."""
    pins = []
    arguments = set(traced.graph.inputs) - taken
    ours = region_mesh(traced)
    for op, eqn in zip(traced.graph.ops, traced.eqns, strict=True):
        entries = None if eqn is None else mark_entries(op.kind, eqn.params)
        if entries is None:
            continue
        what = "shard_map" if op.kind == EDGE else "mark"
        origin = f"{op.source or 'model'}: {what} {entries_text(entries)}"
        sharding = None if eqn is None else eqn.params.get("sharding")
        if ours is not None and isinstance(sharding, jax.sharding.NamedSharding):
            entries = on_mesh(entries, sharding.mesh, ours, origin)
        pins.append(Pin(op.outputs[0], entries, origin))
        if op.kind != EDGE and op.inputs[0] in arguments:
            arguments.discard(op.inputs[0])
            pins.append(Pin(op.inputs[0], entries, origin))
    return tuple(pins)


def rule_pins(
    rules: Mapping[str, Any], paths: Sequence[str], inputs: Sequence[int]
) -> tuple[Pin, ...]:
    """Pins of ``{"regex over path": PartitionSpec(...) or NamedSharding}``, each of them bare or as
    ``StoredAs``; the first matching rule wins. A key that equals a printed path is taken literally.

    Raises:
        PinError: a rule matches no input (names the nearest), or is not a regular expression.
    """
    pins: dict[int, Pin] = {}
    for pattern, spec in rules.items():
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise PinError(f"shardings: {pattern!r} is no regular expression: {error}") from error
        storage = isinstance(spec, StoredAs)
        spec = spec.spec if storage else spec
        spec = spec.spec if isinstance(spec, jax.sharding.NamedSharding) else spec
        wanted = re.compile(re.escape(pattern) + "$") if pattern in paths else wanted
        hits = [(p, v) for p, v in zip(paths, inputs, strict=True) if wanted.search(p)]
        if not hits:
            near = get_close_matches(pattern, paths, 3, 0.3) or paths[:3]
            raise PinError(
                f"shardings: no argument path matches {pattern!r}; the nearest are "
                + ", ".join(repr(p) for p in near)
            )
        rule = f"shardings[{pattern!r}]"
        for path, value in hits:
            origin = f"{rule} at {path}"
            pins.setdefault(value, Pin(value, tuple(spec), origin, storage, rule))
    return tuple(pins.values())


def placed_pins(
    args: Sequence[Any], inputs: Sequence[int], paths: Sequence[str], ours: Any = None
) -> tuple[Pin, ...]:
    """Pins of arguments that carry a ``jax.sharding.NamedSharding`` over some axis of more than one
    device, as arrays put on a mesh and ``ShapeDtypeStruct(..., sharding=...)`` do. ``ours``: the
    mesh of the step's regions, if it has some."""
    pins = []
    for k, x in enumerate(jax.tree_util.tree_leaves(tuple(args))):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding) and any(sharding.spec):
            entries = placed_entries(sharding)
            if entries is not None:
                origin = f"sharding of argument {paths[k]}"
                if ours is not None:
                    entries = on_mesh(entries, sharding.mesh, ours, origin)
                rule = "sharding of the argument"
                pins.append(Pin(inputs[k], entries, origin, rule=rule))
    return tuple(pins)


def placed_mesh(args: Sequence[Any], cluster: str | Cluster) -> dict[str, int] | None:
    """The mesh of all NamedShardings of the arguments; None unless it is one for all and has the
    cluster's device count."""
    sizes = {
        tuple(x.sharding.mesh.shape.items())
        for x in jax.tree_util.tree_leaves(tuple(args))
        if isinstance(getattr(x, "sharding", None), jax.sharding.NamedSharding)
        and any(x.sharding.spec)
    }
    if len(sizes) != 1:
        return None
    try:
        devices = (parse_cluster(cluster) if isinstance(cluster, str) else cluster).num_devices
    except ClusterError:
        return None  # reported when the request is parsed
    mesh = dict(sizes.pop())
    return mesh if math.prod(mesh.values()) == devices else None


def on_region_mesh(traced: Traced, request: Request) -> Request:
    """A request with the mesh on which the step's regions run; without regions it is unchanged.

    Raises:
        RequestError: regions run on different meshes, on another number of devices than the cluster
            has, or on another mesh than the requested one.
    """
    devices = request.cluster.num_devices
    for op, eqn in zip(traced.graph.ops, traced.eqns, strict=True):
        if op.kind != REGION or eqn is None:
            continue
        one = not is_region(eqn) and isinstance(eqn.params["mesh"], jax.sharding.Mesh)
        where = f"shard_map ({op.source or 'no line'})"
        if one and devices > 1:
            raise RequestError(
                f"{where} runs on a mesh of 1 device; the cluster {request.cluster.text} has "
                f"{devices}: build a mesh with the same number, or a jax.sharding.AbstractMesh"
            )
        if is_region(eqn) and request.mode == "STAND_ALONE":
            raise RequestError(
                f"mode STAND_ALONE runs on one device, {where} on {_text(region_axes(eqn).items())}"
            )
    if request.mode in WITHOUT_PINS:
        return request
    first_lines: dict[tuple[tuple[str, int], ...], str] = {}
    for every, where in region_meshes(traced):
        first_lines.setdefault(tuple((n, k) for n, k in every if k > 1), where)
    if not first_lines:
        return request
    (axes, where), *others = first_lines.items()
    if others:
        raise RequestError(
            f"{where} runs on a mesh of {_text(axes)}, {others[0][1]} on one of "
            f"{_text(others[0][0])}: a step has one mesh; build both regions on it"
        )
    region_devices = math.prod(k for _, k in axes)
    if region_devices != devices:
        raise RequestError(
            f"{where} runs on a mesh of {_text(axes)}, {region_devices} devices; the cluster "
            f"{request.cluster.text} has {devices}: build a mesh with the same number, or plan "
            f"for {region_devices}"
        )
    if request.mesh is not None:
        given = {n: k for n, k in zip(request.mesh.names, request.mesh.sizes, strict=True) if k > 1}
        alike = request.placed and counterparts(given, dict(axes)).keys() == given.keys()
        if given != dict(axes) and not alike:
            raise RequestError(
                f"{where} runs on a mesh of {_text(axes)}, mesh= says {request.mesh}: give the "
                "same axes, or leave mesh= out"
            )
    return dataclasses.replace(
        request, mesh=MeshSpec(tuple(n for n, _ in axes), tuple(k for _, k in axes))
    )


def _text(axes: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"{name}={size}" for name, size in axes)
