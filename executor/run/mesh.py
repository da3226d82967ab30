"""Plan mesh -> jax mesh over the devices present."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import jax
import numpy as np

from costmodels import find_kind, known_kinds, parse_cluster
from planner.errors import RequestError
from planner.spec import MeshSpec, Sharding

MEMORY_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Variables that say which share of a GPU's memory JAX takes, the newer first."""


def build_mesh(mesh: MeshSpec, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A jax mesh with Auto axes over the first ``mesh.num_devices`` devices, row-major.

    Raises:
        RequestError: fewer devices are present than the mesh needs.
    """
    present = list(jax.devices() if devices is None else devices)
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
    grid = np.asarray(present[: mesh.num_devices]).reshape(mesh.sizes)
    return jax.sharding.Mesh(grid, mesh.names)


def make_cpu_devices(count: int) -> None:
    """Ask jax for virtual CPU devices, unless it has started or ``XLA_FLAGS`` says how many."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # jax has started; who needs them says what to do if there are too few


def named_sharding(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, spec: Sharding, memory: str | None = None
) -> jax.sharding.NamedSharding:
    """A plan's sharding on a jax mesh, in a memory of the devices (None: their own)."""
    spec_ = jax.sharding.PartitionSpec(*spec.entries)
    return jax.sharding.NamedSharding(mesh, spec_, memory_kind=memory)


def lacks_memory(devices: Sequence[jax.Device], kind: str) -> bool:
    """Whether devices say that they have no memory of a kind (described GPUs say nothing)."""
    kinds = [m.kind for m in devices[0].addressable_memories()]
    return bool(kinds) and kind not in kinds


def detect_cluster(devices: Sequence[jax.Device] | None = None) -> str:
    """The cluster text of the devices present, such as ``"cpu:8"`` or ``"h100:8x2"``.

    Raises:
        RequestError: a device kind that the catalog lacks; pass ``cluster=`` then.
    """
    present = list(jax.devices() if devices is None else devices)
    first, count = present[0], len(present)
    if first.platform == "cpu":
        return f"cpu:{count}"
    kind = find_kind(first.device_kind)
    if kind is not None:
        hosts = len({d.process_index for d in present})
        return f"{kind}:{count // hosts}x{hosts}" if hosts > 1 else f"{kind}:{count}"
    raise RequestError(
        f"device kind {first.device_kind!r} is not in the catalog ({', '.join(known_kinds())}); "
        "pass cluster= (a .toml file can describe it)"
    )


def detected_memory(cluster: str, devices: Sequence[jax.Device] | None = None) -> float | None:
    """Bytes per GPU that JAX may take where its environment says so; None leaves the catalog's.

    JAX takes the share ``XLA_CLIENT_MEM_FRACTION`` (formerly ``XLA_PYTHON_CLIENT_MEM_FRACTION``)
    of a GPU's memory.

    Args:
        cluster: from ``detect_cluster``.
        devices: as there.

    Raises:
        RequestError: the variable is no share between 0 and 1.
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
