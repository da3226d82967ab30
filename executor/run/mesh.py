"""Plan mesh -> jax mesh over the devices present."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from costmodels import find_kind, known_kinds, parse_cluster
from planner.errors import RequestError
from planner.plan.plan import Plan
from planner.spec import MeshSpec, Sharding

MEMORY_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables for the share of a GPU's memory that JAX takes, the newer first."""


Axes = Mapping[str, tuple[tuple[str, int], ...]]
"""Per axis of a plan's mesh, the axes of the jax mesh that it stands for, major first: names and
sizes."""


def mesh_axes(plan: Plan) -> Axes:
    """The jax mesh axes of a plan's mesh axes: themselves, or one per torus dimension."""
    dimensions = plan.lowering.dimensions
    return physical_axes(plan.mesh, dimensions) if dimensions else _themselves(plan.mesh)


def _themselves(mesh: MeshSpec) -> Axes:
    return {n: ((n, k),) for n, k in zip(mesh.names, mesh.sizes, strict=True)}


def physical_axes(mesh: MeshSpec, shape: Sequence[int]) -> Axes:
    """The jax mesh axes of each axis of the mesh: one for every dimension of the cluster, or part
    of a dimension, that it covers.

    Devices are numbered in row-major order over ``mesh.sizes`` and over ``shape`` alike, so an axis
    covers consecutive dimensions. If sizes do not divide, the axes stand for themselves.

    >>> axes = physical_axes(MeshSpec(("fsdp", "model"), (8, 8)), (4, 4, 4))
    >>> axes["fsdp"], axes["model"]
    ((('fsdp_0', 4), ('fsdp_1', 2)), (('model_0', 2), ('model_1', 4)))
    """
    left = [n for n in shape if n > 1]
    out: dict[str, tuple[tuple[str, int], ...]] = {}
    for name, size in zip(reversed(mesh.names), reversed(mesh.sizes), strict=True):
        parts: list[int] = []
        while size > 1 and left:
            part = math.gcd(left[-1], size)
            if part < min(left[-1], size):
                return _themselves(mesh)
            parts.insert(0, part)
            size //= part
            left[-1:] = [left[-1] // part] if left[-1] > part else []
        if size > 1:
            return _themselves(mesh)
        names = [f"{name}_{k}" for k in range(len(parts))] if len(parts) > 1 else [name]
        out[name] = tuple(zip(names, parts or [1], strict=True))
    if len({x for parts in out.values() for x, _ in parts}) < sum(map(len, out.values())):
        return _themselves(mesh)  # two axes with the same name
    return {name: out[name] for name in mesh.names}


def without_devices(mesh: MeshSpec) -> jax.sharding.AbstractMesh:
    """A jax mesh of Auto axes that has no devices."""
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.sizes)
    return jax.sharding.AbstractMesh(mesh.sizes, mesh.names, axis_types=auto)


def build_mesh(
    mesh: MeshSpec, devices: Sequence[jax.Device] | None = None, axes: Axes | None = None
) -> jax.sharding.Mesh:
    """A jax mesh with Auto axes over the first ``mesh.num_devices`` devices, row-major (TPUs by
    their coordinates); ``axes``: the jax axes of each mesh axis; by default, itself.

    Raises:
        RequestError: fewer devices are present than the mesh needs.
    """
    present = in_order(jax.devices() if devices is None else devices)
    if len(present) < mesh.num_devices:
        hint = (
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.num_devices} before jax "
            "starts"
            if present[0].platform == "cpu"
            else "plan for the devices that are there"
        )
        raise RequestError(
            f"the plan's mesh ({mesh}) needs {mesh.num_devices} devices, this process sees "
            f"{len(present)} ({present[0].platform}); {hint}"
        )
    parts = [x for name in mesh.names for x in (axes or _themselves(mesh))[name]]
    grid = np.asarray(present[: mesh.num_devices]).reshape([size for _, size in parts])
    return jax.sharding.Mesh(grid, tuple(name for name, _ in parts))


def in_order(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Devices in the numbering of the cost model: TPUs row-major over slice, torus coordinates and
    core; other devices as given."""
    return sorted(devices, key=_place) if _is_torus(devices) else list(devices)


def _is_torus(devices: Sequence[jax.Device]) -> bool:
    return all(d.platform == "tpu" and hasattr(d, "coords") for d in devices)


def _place(device: Any) -> tuple[int, ...]:
    """Slice, coordinates and core of a TPU."""
    core = getattr(device, "core_on_chip", None) or 0
    return (getattr(device, "slice_index", None) or 0, *device.coords, core)


def _torus_text(devices: Sequence[jax.Device]) -> str | None:
    """The shape of TPUs, as ``4x4`` or ``4x4+2``; None if they do not fill whole slices."""
    places = np.asarray([_place(d) for d in devices])
    slices, sizes = len(set(places[:, 0].tolist())), np.ptp(places[:, 1:], axis=0) + 1
    if slices * math.prod(sizes.tolist()) != len(devices):
        return None
    shape = sizes.tolist()
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return "x".join(map(str, shape)) + (f"+{slices}" if slices > 1 else "")


def make_cpu_devices(count: int) -> None:
    """Configure virtual CPU devices, unless jax has started or ``XLA_FLAGS`` sets the number."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # jax has started; callers raise an error if there are too few devices


def named_sharding(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    spec: Sharding,
    memory: str | None = None,
    axes: Axes | None = None,
) -> jax.sharding.NamedSharding:
    """A plan's sharding on a jax mesh, in a memory kind of the devices (None: the default one);
    ``axes``: the jax axes of each mesh axis; by default, itself."""
    if axes is not None:
        dims = tuple(tuple(x for name in dim for x, _ in axes[name]) for dim in spec.dims)
        spec = Sharding(dims)
    spec_ = jax.sharding.PartitionSpec(*spec.entries)
    return jax.sharding.NamedSharding(mesh, spec_, memory_kind=memory)


def lacks_memory(devices: Sequence[jax.Device], kind: str) -> bool:
    """Whether devices lack a memory kind; False if they list none, as described GPUs do."""
    kinds = [m.kind for m in devices[0].addressable_memories()]
    return bool(kinds) and kind not in kinds


def detect_cluster(devices: Sequence[jax.Device] | None = None) -> str:
    """The cluster text of the devices present, such as ``"cpu:8"``, ``"h100:8x2"`` or ``"v5e:4x4"``
    (by the coordinates of TPUs).

    Raises:
        RequestError: the catalog lacks the device kind; pass ``cluster=`` then.
    """
    present = list(jax.devices() if devices is None else devices)
    first, count = present[0], len(present)
    if first.platform == "cpu":
        return f"cpu:{count}"
    kind = find_kind(first.device_kind)
    torus = _torus_text(present) if kind is not None and _is_torus(present) else None
    if torus is not None:
        return f"{kind}:{torus}"
    if kind is not None:
        hosts = len({d.process_index for d in present})
        return f"{kind}:{count // hosts}x{hosts}" if hosts > 1 else f"{kind}:{count}"
    raise RequestError(
        f"device kind {first.device_kind!r} is not in the catalog ({', '.join(known_kinds())}); "
        "pass cluster= (a .toml file can describe it)"
    )


def detected_memory(cluster: str, devices: Sequence[jax.Device] | None = None) -> float | None:
    """Bytes per GPU that JAX may take, if its environment sets them; None: those of the catalog.

    JAX takes the share ``XLA_CLIENT_MEM_FRACTION`` (formerly ``XLA_PYTHON_CLIENT_MEM_FRACTION``)
    of a GPU's memory.

    Args:
        cluster: from ``detect_cluster``.
        devices: as for ``detect_cluster``.

    Raises:
        RequestError: the variable is not a share between 0 and 1.
    """
    name = next((n for n in MEMORY_SHARES if os.environ.get(n)), None)
    present = list(jax.devices() if devices is None else devices)
    if name is None or present[0].platform not in ("gpu", "cuda", "rocm"):
        return None
    try:
        share = float(os.environ[name])
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise RequestError(
            f"{name}={os.environ[name]!r}: expected a share of the memory between 0 and 1, as 0.9; "
            "correct it, or pass memory="
        )
    return share * parse_cluster(cluster).device.memory_bytes


def spread(x: Any, sharding: jax.sharding.Sharding) -> Any:
    """Lay out an array that is local to this process, or to each process, over the devices; other
    arrays are returned unchanged. No communication."""
    if not is_local(x):
        return x
    if jax.numpy.issubdtype(getattr(x, "dtype", np.int32), jax.dtypes.prng_key):
        keys = spread(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(keys, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def is_local(x: Any) -> bool:
    """Whether an array is local to this process: a host array, or one on its devices only."""
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable
