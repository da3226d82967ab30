"""The devices of stages, and arrays on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from executor.run.mesh import spread
from planner.spec import STAGE
from planner.stages.programs.homes import ALL


@dataclass(frozen=True)
class Places:
    """The devices of all stages (``mesh``, whose first axis is ``stage``) and of each stage. Chunks
    of an interleaved schedule are stages that share devices."""

    mesh: Mesh
    stages: tuple[Mesh, ...]
    group: tuple[int, ...]
    """Per stage, the index of its devices along the axis ``stage``."""

    @functools.cached_property
    def _processes(self) -> dict[int, frozenset[int]]:
        meshes = {ALL: self.mesh, **dict(enumerate(self.stages))}
        return {
            place: frozenset(d.process_index for d in mesh.devices.flat)
            for place, mesh in meshes.items()
        }

    @classmethod
    def of(cls, mesh: Mesh, place: Sequence[int]) -> Places:
        """The places of a mesh with an axis ``stage``; ``place``: each stage's group of devices."""
        at = mesh.axis_names.index(STAGE)
        names = tuple(n for n in mesh.axis_names if n != STAGE)
        rows = mesh.devices.swapaxes(0, at) if at else mesh.devices
        if not names:  # a stage is one device
            names, rows = ("data",), rows.reshape(-1, 1)
        groups = [Mesh(row, names) for row in rows]
        return cls(mesh, tuple(groups[k] for k in place), tuple(place))

    def mesh_of(self, place: int) -> Mesh:
        """The devices of a place."""
        return self.mesh if place == ALL else self.stages[place]

    def sharding(self, place: int, spec: PartitionSpec) -> NamedSharding:
        """A sharding at a place."""
        return NamedSharding(self.mesh_of(place), spec)

    def processes(self, place: int) -> frozenset[int]:
        """The processes that have devices of a place."""
        return self._processes[place]

    def mine(self, place: int) -> bool:
        """Whether this process has devices of a place."""
        return jax.process_index() in self._processes[place]

    @property
    def many(self) -> bool:
        """Whether the devices belong to several processes."""
        return len(self._processes[ALL]) > 1

    @functools.cached_property
    def waits(self) -> bool:
        """Whether a program has to end before the next one begins. So it is on CPUs of several
        processes: each collective blocks a thread while it waits, so there may be no thread for the
        work that it waits for."""
        return self.many and self.mesh.devices.flat[0].platform == "cpu"

    def over(self, x: Any) -> bool:
        """Whether an array is split over the stages."""
        return _uses(spec_of(x), STAGE)

    @staticmethod
    def is_local(device: jax.Device) -> bool:
        """Whether it is a device of this process."""
        return bool(device.process_index == jax.process_index())

    def put(self, x: Any, sharding: NamedSharding) -> Any:
        """Place an array that this process has whole on the devices of a sharding."""
        return spread(x, sharding) if self.many else jax.device_put(x, sharding)

    def view(self, x: jax.Array, stage: int, spec: PartitionSpec, shape: Sequence[int]) -> Any:
        """The part of an array of all devices that a stage's devices hold, without a copy."""
        held = {s.device: s.data for s in x.addressable_shards}
        mesh = self.stages[stage]
        shards = [held[d] for d in mesh.devices.flat if d in held]
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)

    def part(self, x: jax.Array, stage: int) -> Any:
        """A stage's part of the first dimension of an array that is split over the stages."""
        spec = inside(spec_of(x))
        shape = (x.shape[0] // len(self.stages), *x.shape[1:])
        if not self.mine(stage):
            return jax.ShapeDtypeStruct(shape, x.dtype)
        return self.view(x, stage, spec, shape)

    def joined(self, parts: Sequence[Any], spec: PartitionSpec | None) -> Any:
        """One array of all devices from a part of its first dimension on each stage; ``spec``: the
        sharding of the parts, None for that of the first."""
        here = [(k, x) for k, x in enumerate(parts) if isinstance(x, jax.Array)]
        spec = spec_of(here[0][1]) if spec is None else spec_of_entries(spec)
        same = [
            x if spec_of(x) == spec else jax.device_put(x, self.sharding(k, spec)) for k, x in here
        ]
        shape = (sum(x.shape[0] for x in parts), *parts[0].shape[1:])
        shards = [s.data for x in same for s in x.addressable_shards]
        sharding = NamedSharding(self.mesh, over_stages(spec))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def spec_of(x: Any) -> PartitionSpec:
    """The PartitionSpec of an array; empty if it has no NamedSharding."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return PartitionSpec()
    return spec_of_entries(sharding.spec)


def spec_of_entries(spec: PartitionSpec) -> PartitionSpec:
    """A PartitionSpec without the empty entries at its end."""
    entries = list(spec)
    while entries and entries[-1] in (None, ()):
        entries.pop()
    return PartitionSpec(*entries)


def absent(x: Any) -> jax.ShapeDtypeStruct:
    """The placeholder for an array in a process that has none of its devices."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def over_stages(spec: PartitionSpec) -> PartitionSpec:
    """The same spec with the first dimension also split over the stages, as the major axis."""
    return split_first(spec, STAGE)


def split_first(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """The same spec with the first dimension also split along an axis, as the major axis."""
    entries = list(spec) or [None]
    first = entries[0]
    axes = () if first is None else (first,) if isinstance(first, str) else tuple(first)
    return PartitionSpec((axis, *axes), *entries[1:])


def divides(mesh: Mesh, spec: PartitionSpec, shape: Sequence[int]) -> bool:
    """Whether a sharding splits a shape into equal parts."""
    sizes = dict(mesh.shape)
    parts = [math.prod(sizes[a] for a in ((e,) if isinstance(e, str) else e or ())) for e in spec]
    return len(parts) <= len(shape) and all(n % k == 0 for n, k in zip(shape, parts, strict=False))


def inside(spec: PartitionSpec) -> PartitionSpec:
    """The same spec inside a stage: without the axis ``stage``."""
    out: list[Any] = []
    for e in spec:
        axes = tuple(a for a in ((e,) if isinstance(e, str) else e or ()) if a != STAGE)
        out.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*out)


def _uses(spec: PartitionSpec, axis: str) -> bool:
    return any(axis in ((e,) if isinstance(e, str) else e or ()) for e in spec)
