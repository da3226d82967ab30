"""Small programs that run collectives: each kind, with several data sizes and group sizes.

A program runs several collectives of one kind, each of which depends on the previous one. Between
them is an elementwise kernel with an operand that differs between devices, so that no compiler can
simplify the chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp

from costmodels import Cluster, Collective
from costmodels.calibrate import CollectiveCount, KernelCount

CHAIN = 4
"""Number of collectives that a program runs one after another."""
TOGETHER = 24
"""Number of all-reduces that a program runs at once, as a step does for its gradients."""
NAMES = ("outer", "inner")
"""The mesh axes; collectives run over the inner one."""


@dataclass(frozen=True)
class CollectiveProbe:
    """A function of local float32 vectors inside `jax.shard_map`, the lengths of these vectors, and
    the kernels and collectives that the function runs."""

    name: str
    function: Callable[..., Any]
    mesh_shape: tuple[int, int]
    lengths: tuple[int, ...]
    kernels: tuple[KernelCount, ...]
    collectives: tuple[CollectiveCount, ...]


def collective_probes(cluster: Cluster, scale: float = 1.0) -> tuple[CollectiveProbe, ...]:
    """Programs for a cluster, with groups of the smallest, a middle and the largest size; none for
    one device.

    Args:
        cluster: the cluster; the bandwidth of its link determines the data sizes.
        scale: factor for the data sizes; below 1 for a quick run.
    """
    count = cluster.num_devices
    divisors = [n for n in range(2, count + 1) if count % n == 0]
    groups = sorted({divisors[0], divisors[len(divisors) // 2], count}) if divisors else []
    amounts = [4096.0, *(scale * cluster.link.bytes_per_s * s for s in (2e-5, 2e-4, 2e-3))]
    out = []
    for group in groups:
        mesh = (count // group, group)
        sizes = sorted({group * max(1, round(nbytes / 4 / group)) for nbytes in amounts})
        for kind in get_args(Collective):
            out += [_chain(kind, mesh, size) for size in sizes]
        out += [_together(mesh, size) for size in sizes[:2]]
    return tuple(out)


def _chain(kind: Collective, mesh_shape: tuple[int, int], size: int) -> CollectiveProbe:
    """``CHAIN`` collectives with a payload of ``size`` numbers, a multiple of the group size."""
    group = mesh_shape[1]
    local_size = size // group if kind == "all_gather" else size

    def one(x: Any) -> Any:
        axis = NAMES[1]
        if kind == "all_reduce":
            return jax.lax.psum(x, axis)
        if kind == "all_gather":
            return jax.lax.all_gather(x, axis, tiled=True)
        if kind == "reduce_scatter":
            return jax.lax.psum_scatter(x, axis, tiled=True)
        if kind == "all_to_all":
            return jax.lax.all_to_all(x.reshape(group, -1), axis, 0, 0, tiled=True).reshape(-1)
        return jax.lax.ppermute(x, axis, [(k, (k + 1) % group) for k in range(group)])

    def run(x: Any, y: Any) -> Any:
        for _ in range(CHAIN):
            x = one(x + y)
            x = x[:local_size] if kind == "all_gather" else x
            x = jnp.tile(x, group) if kind == "reduce_scatter" else x
        return x

    count = CollectiveCount(kind, mesh_shape, (1,), 4.0 * size, CHAIN)
    add = KernelCount(
        "vector", "float32", CHAIN * local_size, CHAIN * 12.0 * local_size, kernels=CHAIN
    )
    return CollectiveProbe(
        f"{kind} {4 * size} B in {group}",
        run,
        mesh_shape,
        (local_size, local_size),
        (add,),
        (count,),
    )


def _together(mesh_shape: tuple[int, int], size: int) -> CollectiveProbe:
    """``TOGETHER`` all-reduces that do not depend on each other."""

    def run(*xs: Any) -> Any:
        return [jax.lax.psum(x, NAMES[1]) for x in xs]

    count = CollectiveCount("all_reduce", mesh_shape, (1,), 4.0 * size, TOGETHER, combined=True)
    name = f"{TOGETHER} all_reduce of {4 * size} B at once in {mesh_shape[1]}"
    return CollectiveProbe(name, run, mesh_shape, (size,) * TOGETHER, (), (count,))
