"""Translates marks on another mesh of the same devices to the mesh of ``shard_map`` regions.

Some libraries have one mesh for the model (``fsdp=8``) and another for its experts (``ep=8``). A
plan has one mesh, that of the regions. An axis of the other mesh is translated to the axes of this
mesh that split the devices in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from planner.annotate import FREE
from planner.errors import PinError
from planner.graph.trace import Traced
from planner.rules.kernels.regions import REGION, is_region
from planner.spec import Sharding


def region_mesh(traced: Traced) -> Any:
    """The mesh of a step's regions, as written in the step; None if there are none, or several."""
    meshes = [
        eqn.params["mesh"]
        for op, eqn in zip(traced.graph.ops, traced.eqns, strict=True)
        if op.kind == REGION and eqn is not None and is_region(eqn)
    ]
    same = all(_sizes(mesh) == _sizes(meshes[0]) for mesh in meshes)
    return meshes[0] if meshes and same else None


def on_mesh(entries: Sequence[Any], mark_mesh: Any, ours: Any, origin: str) -> tuple[Any, ...]:
    """Entries of a mark on the mesh ``mark_mesh``, with the axis names of ``ours``. They are
    unchanged if the names are those of ``ours``, if the meshes order their devices differently, or
    if an axis has no counterpart.

    Args:
        entries: one per dimension.
        mark_mesh, ours: jax meshes, abstract or of devices.
        origin: source of the mark, for the error.

    Raises:
        PinError: an axis of the mark is one of ``ours`` with another size.
    """
    wanted, known = _sizes(mark_mesh), _sizes(ours)
    if set(wanted.items()) <= set(known.items()):
        return tuple(entries)
    axes = counterparts(wanted, known) if _devices(mark_mesh) == _devices(ours) else {}
    named = {
        a for e in entries if e is not None and e is not FREE for a in Sharding.of([e]).dims[0]
    }
    if not named <= axes.keys():
        for axis in sorted(named & known.keys()):
            if wanted.get(axis) != known[axis]:
                raise PinError(
                    f"{origin}: its mesh has {axis}={wanted.get(axis, 1)}, the step's shard_map "
                    f"regions run on {axis}={known[axis]}: give both the same size, or the axes "
                    "other names"
                )
        return tuple(entries)
    out: list[Any] = []
    for entry in entries:
        if entry is None or entry is FREE:
            out.append(entry)
            continue
        new = [b for a in Sharding.of([entry]).dims[0] for b in axes[a]]
        out.append(tuple(new) if len(new) > 1 else new[0] if new else None)
    return tuple(out)


def counterparts(axes: Mapping[str, int], ours: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Per axis of a mesh, the axes of ``ours`` that split the same devices in the same way; axes
    without counterparts are left out.

    >>> counterparts({"fsdp": 8}, {"dp": 2, "ep": 4})
    {'fsdp': ('dp', 'ep')}
    >>> counterparts({"dp": 4, "tp": 2}, {"dp": 2, "ep": 4})
    {}
    """
    if math.prod(axes.values()) != math.prod(ours.values()):
        return {}
    ends = list(itertools.accumulate(ours.values(), initial=1, func=lambda a, b: a * b))
    out: dict[str, tuple[str, ...]] = {}
    begin = 1
    for name, size in axes.items():
        end = begin * size
        if begin in ends and end in ends:
            out[name] = tuple(ours)[ends.index(begin) : ends.index(end)]
        begin = end
    return out


def _sizes(mesh: Any) -> dict[str, int]:
    """Axes of more than one device."""
    return {str(name): int(size) for name, size in mesh.shape.items() if size > 1}


def _devices(mesh: Any) -> list[Any] | int:
    """The devices in order; of an abstract mesh, their number."""
    if isinstance(mesh, jax.sharding.Mesh):
        return [d.id for d in mesh.devices.flat]
    return int(math.prod(mesh.shape.values()))
