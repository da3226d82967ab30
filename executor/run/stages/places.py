"""Arrays between the devices of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from planner.spec import STAGE
from planner.stages.programs.homes import ALL


@dataclass(frozen=True)
class Places:
    """The devices of all stages (``mesh``, whose first axis is ``stage``) and those of each."""

    mesh: Mesh
    stages: tuple[Mesh, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> Places:
        """The places of a mesh with an axis ``stage``."""
        at = mesh.axis_names.index(STAGE)
        names = tuple(n for n in mesh.axis_names if n != STAGE)
        rows = mesh.devices.swapaxes(0, at) if at else mesh.devices
        if not names:  # a stage is one device
            names, rows = ("data",), rows.reshape(-1, 1)
        return cls(mesh, tuple(Mesh(row, names) for row in rows))

    def mesh_of(self, place: int) -> Mesh:
        """The devices of a place."""
        return self.mesh if place == ALL else self.stages[place]

    def sharding(self, place: int, spec: PartitionSpec) -> NamedSharding:
        """A sharding at a place."""
        return NamedSharding(self.mesh_of(place), spec)

    def moved(self, x: Any, before: int, after: int) -> Any:
        """An array of one place at another, split in the same way."""
        if before == after:
            return x
        spec = spec_of(x)
        if before == ALL and getattr(getattr(x, "sharding", None), "mesh", None) == self.mesh:
            if not _uses(spec, STAGE):
                return self.view(x, after, spec, x.shape)
            spec = _without(spec)
        return jax.device_put(x, self.sharding(after, spec))

    def view(self, x: jax.Array, stage: int, spec: PartitionSpec, shape: Sequence[int]) -> Any:
        """What a stage's devices hold of an array of all devices; copies nothing."""
        held = {s.device: s.data for s in x.addressable_shards}
        mesh = self.stages[stage]
        mine = [held[d] for d in mesh.devices.flat if d in held]
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, mine)

    def part(self, x: jax.Array, stage: int) -> Any:
        """A stage's part of the first dimension of an array that is split over the stages."""
        spec = _without(spec_of(x))
        shape = (x.shape[0] // len(self.stages), *x.shape[1:])
        return self.view(x, stage, spec, shape)

    def joined(self, parts: Sequence[Any]) -> Any:
        """One array of all devices from a part of its first dimension on each stage."""
        spec = spec_of(parts[0])
        parts = [
            x if spec_of(x) == spec else jax.device_put(x, self.sharding(k, spec))
            for k, x in enumerate(parts)
        ]
        first = parts[0]
        shape = (sum(x.shape[0] for x in parts), *first.shape[1:])
        shards = [s.data for x in parts for s in x.addressable_shards]
        sharding = NamedSharding(self.mesh, over_stages(spec))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def spec_of(x: Any) -> PartitionSpec:
    """How an array is split; nothing for one that JAX describes otherwise."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return PartitionSpec()
    entries = list(sharding.spec)
    while entries and entries[-1] in (None, ()):
        entries.pop()
    return PartitionSpec(*entries)


def over_stages(spec: PartitionSpec) -> PartitionSpec:
    """The same with the first dimension split over the stages first."""
    entries = list(spec) or [None]
    first = entries[0]
    own = () if first is None else (first,) if isinstance(first, str) else tuple(first)
    return PartitionSpec((STAGE, *own), *entries[1:])


def _without(spec: PartitionSpec) -> PartitionSpec:
    """The same inside of a stage."""
    out: list[Any] = []
    for e in spec:
        own = tuple(a for a in ((e,) if isinstance(e, str) else e or ()) if a != STAGE)
        out.append(own if len(own) > 1 else own[0] if own else None)
    return PartitionSpec(*out)


def _uses(spec: PartitionSpec, axis: str) -> bool:
    return any(axis in ((e,) if isinstance(e, str) else e or ()) for e in spec)
