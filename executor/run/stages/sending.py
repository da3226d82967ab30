"""Sends arrays from the devices of one stage to those of another, within or between processes.

Within one process, ``device_put`` copies them. Between processes, every process that has devices of
either stage runs one small program over both: a collective permute between pairs of devices. All
processes follow the same list of tasks, so they run these programs in the same order, and none
waits for a program that another does not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from executor.run.mesh import spread
from executor.run.stages.places import Places, absent, split_first
from planner.errors import RequestError
from planner.spec import STAGE
from planner.stages.programs.homes import ALL

PAIR = "pair"


class Sender:
    """Moves arrays between places.

    In a process without devices of a place, a ShapeDtypeStruct stands for an array of that place.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self._programs: dict[Any, Any] = {}
        self._blanks: dict[Any, list[jax.Array]] = {}

    def moved(
        self, values: Sequence[Any], before: int, after: int, specs: Sequence[PartitionSpec]
    ) -> list[Any]:
        """Move arrays from one place to another, with the same shardings.

        Args:
            values: the arrays, or their placeholders.
            before, after: the places.
            specs: the sharding of each.
        """
        places = self.places
        if before == after or (ALL not in (before, after) and self._same(before, after)):
            return list(values)
        if before == ALL:
            both = zip(values, specs, strict=True)
            return [self._from_all(x, after, spec) for x, spec in both]
        targets = [places.sharding(after, spec) for spec in specs]
        if len(places.processes(before) | places.processes(after)) == 1:
            if not places.mine(after):
                return [absent(x) for x in values]
            moved: list[Any] = jax.device_put(list(values), targets)
            return moved
        if not (places.mine(before) or places.mine(after)):
            return [absent(x) for x in values]
        keys = [key_impl(x) for x in values]
        bits = [x if k is None else _bits(x) for x, k in zip(values, keys, strict=True)]
        sent = self._sent(bits, before, after, list(specs))
        return [x if k is None else _keys(x, k) for x, k in zip(sent, keys, strict=True)]

    def _same(self, before: int, after: int) -> bool:
        """Whether two stages have the same devices."""
        return self.places.stages[before] is self.places.stages[after]

    def _from_all(self, x: Any, after: int, spec: PartitionSpec) -> Any:
        """An array of all devices, moved to the devices of a stage."""
        places = self.places
        is_placed = getattr(getattr(x, "sharding", None), "mesh", None) == places.mesh
        if is_placed and places.over(x):  # a program that all processes run
            x = jax.device_put(x, places.sharding(ALL, spec))
        if not places.mine(after):
            return absent(x)
        if is_placed:
            return places.view(x, after, spec, x.shape)
        return places.put(x, places.sharding(after, spec))

    def _sent(
        self, values: Sequence[Any], before: int, after: int, specs: list[PartitionSpec]
    ) -> list[Any]:
        places, shapes = self.places, [absent(x) for x in values]
        mesh, one = self._both(before, after), [bool(s.shape) for s in shapes]
        axis = STAGE if after == ALL else PAIR
        whole = [split_first(s, axis) for s in specs]
        count = mesh.shape[axis]
        inputs = []
        for x, shape, spec, long in zip(values, shapes, whole, one, strict=True):
            full = (count * shape.shape[0], *shape.shape[1:]) if long else (count,)
            held = NamedSharding(mesh, spec)
            by_device = {}
            if isinstance(x, jax.Array):
                by_device = {
                    s.device: s.data if long else s.data.reshape(1) for s in x.addressable_shards
                }
            blank = self._blank(held, full, shape.dtype)
            data = [by_device.get(d, b) for d, b in blank.items()]
            inputs.append(jax.make_array_from_single_device_arrays(full, held, data))
        program = self._program(mesh, axis, places.group[before], tuple(whole), tuple(one))
        if places.waits:
            jax.block_until_ready(inputs)
        results = program(inputs)
        if places.waits:
            jax.block_until_ready(results)
        if after == ALL:
            return list(results)
        if not places.mine(after):
            return list(shapes)
        out = []
        for x, shape, spec, long in zip(results, shapes, specs, one, strict=True):
            ours = set(places.stages[after].devices.flat)
            data = [
                s.data if long else s.data.reshape(())
                for s in x.addressable_shards
                if s.device in ours
            ]
            sharding = places.sharding(after, spec)
            out.append(jax.make_array_from_single_device_arrays(shape.shape, sharding, data))
        return out

    def _both(self, before: int, after: int) -> Mesh:
        """The devices of both places."""
        places = self.places
        if after == ALL:
            return places.mesh
        first, second = places.stages[before], places.stages[after]
        return Mesh(np.stack([first.devices, second.devices]), (PAIR, *first.axis_names))

    def _blank(
        self, sharding: NamedSharding, shape: tuple[int, ...], dtype: Any
    ) -> dict[jax.Device, jax.Array]:
        """Zeros on the devices of this process, for those that send nothing."""
        key = sharding, shape, str(dtype)
        if key not in self._blanks:
            part = sharding.shard_shape(shape)
            devices = [d for d in sharding.mesh.devices.flat if self.places.is_local(d)]
            self._blanks[key] = [jax.device_put(np.zeros(part, dtype), d) for d in devices]
        return {next(iter(x.devices())): x for x in self._blanks[key]}

    def _program(
        self,
        mesh: Mesh,
        axis: str,
        group: int,
        specs: tuple[PartitionSpec, ...],
        long: tuple[bool, ...],
    ) -> Any:
        key = mesh, axis, group, specs, long
        if key not in self._programs:

            def permuted(xs: list[Any]) -> list[Any]:
                return [jax.lax.ppermute(x, PAIR, [(0, 1)]) for x in xs]

            def spread(xs: list[Any]) -> list[Any]:
                gathered = [jax.lax.all_gather(x, STAGE)[group] for x in xs]
                return [x if is_long else x[0] for x, is_long in zip(gathered, long, strict=True)]

            outs = [inner(s) for s in specs] if axis == STAGE else list(specs)
            run = jax.shard_map(
                spread if axis == STAGE else permuted,
                mesh=mesh,
                in_specs=(list(specs),),
                out_specs=outs,
                check_vma=False,
            )
            self._programs[key] = jax.jit(run)
        return self._programs[key]


def inner(spec: PartitionSpec) -> PartitionSpec:
    """The same spec without the axis that ``split_first`` added."""
    first = spec[0]
    axes = () if isinstance(first, str) else tuple(first)[1:]
    entries = [axes if len(axes) > 1 else axes[0] if axes else None, *spec[1:]]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def placed(x: Any, sharding: NamedSharding, path: str) -> jax.Array:
    """Place an argument on the devices of a stage, of which this process may have none.

    Args:
        x: an array that every process has, or one that is distributed over the processes.
        sharding: its sharding on these devices.
        path: name of the argument, for the error.

    Raises:
        RequestError: the array is on other devices, of several processes.
    """
    if getattr(x, "sharding", None) == sharding:
        return x  # type: ignore[no-any-return]
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding.device_set == sharding.device_set:
            moved: jax.Array = jax.device_put(x, sharding)
            return moved
        raise RequestError(
            f"{path} lies on other devices than those of its stage, {x.sharding}; expected "
            f"{sharding}: place it with step.prepare(...).place(...), or pass a host array"
        )
    if any(d.process_index == jax.process_index() for d in sharding.mesh.devices.flat):
        return spread(x, sharding)  # type: ignore[no-any-return]
    return nowhere(jax.eval_shape(lambda a: a, x), sharding)


def nowhere(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array of which this process has no shards."""
    impl = key_impl(x)
    if impl is not None:
        keys: jax.Array = jax.random.wrap_key_data(nowhere(_bits(x), sharding), impl=impl)
        return keys
    array: jax.Array = jax.make_array_from_single_device_arrays(
        x.shape, sharding, [], dtype=x.dtype
    )
    return array


def key_impl(x: Any) -> Any:
    """The PRNG implementation of random keys; None for other arrays."""
    if not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        return None
    return jax.random.key_impl(jax.numpy.empty((0,), x.dtype))


def _bits(x: Any) -> Any:
    """The key data of random keys."""
    if isinstance(x, jax.Array):
        return jax.random.key_data(x)
    return absent(jax.eval_shape(jax.random.key_data, x))


def _keys(x: Any, impl: Any) -> Any:
    if isinstance(x, jax.Array):
        return jax.random.wrap_key_data(x, impl=impl)
    return absent(jax.eval_shape(lambda d: jax.random.wrap_key_data(d, impl=impl), x))
