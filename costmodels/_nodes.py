"""Collectives on nodes: fast links inside a node, a network between nodes, as NCCL runs them.

Steps and bytes of the ring and the double binary tree follow NCCL's tuning model
(src/graph/tuning.cc) and Sanders, Speck and Traeff 2009 ("Two-tree algorithms for full bandwidth
broadcast, reduction and scan"). Both levels work at once (chunks are pipelined), so the slower one
counts. NCCL changes algorithm and protocol with the size; here one latency and one rate stand for
all sizes: those of the algorithm that is fastest at `REFERENCE_BYTES`.
"""

from __future__ import annotations

import functools

import numpy as np

from .hardware import Cluster

REFERENCE_BYTES = 2.0**26
"""64 MiB, about a layer's gradients or activations. Source: assumption."""
_TREE_SHARE = 0.92
"""Part of the links' rate that a tree reaches. Source: NCCL tuning model."""


def nodes_coefficients(
    cluster: Cluster, kind: str, mesh_shape: tuple[int, ...], axes: tuple[int, ...], inside: int
) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte) of a group with `inside` members in each node it touches.

    All devices of a node drive their shares of the network at once. `kind` is a `Collective`.
    """
    fast, slow = cluster.link, cluster.network or cluster.link
    size = 1
    for axis in axes:
        size *= mesh_shape[axis]
    across = size // inside
    startup_s = fast.startup_s + (slow.startup_s if across > 1 else 0.0)
    rate = fast.bytes_per_s
    if fast.wires and inside > 1:
        rate *= _wired_share(fast.wires, mesh_shape, axes, kind == "permute")
    if kind == "permute":
        latency_s, used = (
            (slow.latency_s, slow.bytes_per_s) if across > 1 else (fast.latency_s, rate)
        )
        return startup_s + latency_s, 1.0 / used
    fast_s = 1.0 / rate if inside > 1 else 0.0
    slow_s = 1.0 / slow.bytes_per_s if across > 1 else 0.0
    if kind == "all_to_all":
        steps_s = _levels(inside) * fast.latency_s + _levels(across) * slow.latency_s
        inner, outer = (inside - 1) / size * fast_s, (size - inside) / size * slow_s
        return startup_s + steps_s, max(inner, outer)
    ring_s = (size - across) * fast.latency_s + (across - 1) * slow.latency_s
    ring_beta = (size - 1) / size * max(fast_s, slow_s / inside)
    if kind != "all_reduce":
        return startup_s + ring_s, ring_beta
    between_s = 2.0 * _levels(across) * slow.latency_s
    between_beta = (1.0 if across == 2 else 2.0) / inside * slow_s
    tree_s = 2.0 * (inside - 1) * fast.latency_s + between_s
    options = [
        (startup_s + 2.0 * ring_s, 2.0 * ring_beta),
        (startup_s + tree_s, max(2.0 * fast_s / _TREE_SHARE, between_beta)),
    ]
    if fast.reduce_bytes_per_s and inside > 1:
        added_beta = (1.0 + 1.0 / inside) / fast.reduce_bytes_per_s
        added_s = fast.reduce_latency_s + (slow.startup_s if across > 1 else 0.0) + between_s
        options.append((added_s, max(added_beta, between_beta)))
    return min(options, key=lambda option: option[0] + option[1] * REFERENCE_BYTES)


def _levels(members: int) -> int:
    """Levels of a binary tree of `members`."""
    return (members - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def _wired_share(
    wires: tuple[tuple[int, ...], ...],
    mesh_shape: tuple[int, ...],
    axes: tuple[int, ...],
    neighbours: bool,
) -> float:
    """Part of a device's links that lead to its group (or only to the next member), at worst.

    Two devices without a direct link count as having one link, through a third device.
    """
    table, count = np.asarray(wires), len(wires)
    size = 1
    for axis in axes:
        size *= mesh_shape[axis]
    devices = np.moveaxis(
        np.arange(np.prod(mesh_shape)).reshape(mesh_shape), axes, range(-len(axes), 0)
    )
    least = count * int(table.max())
    for group in np.sort(devices.reshape(-1, size), axis=1):
        members = group[group < count]
        if len(members) > 1:
            among = table[np.ix_(members, members)]
            used = np.diag(among, 1) if neighbours else among.sum(axis=1)
            least = min(least, int(used.min()))
    return max(1, least) / int(table.sum(axis=1).max())
