"""Latency and bandwidth terms of collectives over axes of a device mesh.

Ring and recursive-doubling costs after Thakur, Rabenseifner and Gropp 2005 ("Optimization of
Collective Communication Operations in MPICH"); torus all-to-all by the load of the middle links.
Devices are numbered row-major over the mesh (last axis fastest) and fill nodes, or the torus in
row-major order, in that order.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, get_args

import numpy as np

from .hardware import Cluster, ClusterError, Link

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]

# Shortest torus dimension with a wrap-around link. Source: Google Cloud TPU v5p page, slices are
# built of 4x4x4 cubes whose opposite faces are joined.
_WRAP_MIN_SIZE = 4

# A covered part of a torus dimension: (members, step between members in chips, wraps around).
_Part = tuple[int, int, bool]


@functools.lru_cache(maxsize=65536)
def collective_coefficients(
    cluster: Cluster, kind: Collective, mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte): seconds = alpha_s + beta_s_per_byte * payload bytes.

    All groups along `axes` communicate at the same time. The payload per device is the gathered
    result (all_gather), the unreduced input (reduce_scatter), the tensor (all_reduce), or the
    local shard (all_to_all, permute; permute shifts by one along the axes). A group of one
    device costs (0, 0). An all-reduce is a reduce-scatter and an all-gather.

    Raises:
        ClusterError: unknown kind, axis outside the mesh or repeated, sizes that are not
            positive, or a mesh with more devices than the cluster.
    """
    _check(cluster, kind, mesh_shape, axes)
    if math.prod(mesh_shape[axis] for axis in axes) == 1:
        return 0.0, 0.0
    if kind == "all_reduce":
        alpha_s, beta = collective_coefficients(cluster, "all_gather", mesh_shape, axes)
        return 2.0 * alpha_s, 2.0 * beta
    if cluster.kind == "torus":
        return _torus(cluster, kind, mesh_shape, axes)
    return _hierarchy(cluster, kind, mesh_shape, axes)


def _check(cluster: Cluster, kind: str, mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    if kind not in get_args(Collective):
        raise ClusterError(
            f"unknown collective {kind!r}; expected one of: {', '.join(get_args(Collective))}"
        )
    if any(size <= 0 for size in mesh_shape):
        raise ClusterError(f"mesh sizes must be positive, got {mesh_shape}; use 1 or more")
    if math.prod(mesh_shape) > cluster.num_devices:
        raise ClusterError(
            f"mesh {mesh_shape} needs {math.prod(mesh_shape)} devices, but cluster "
            f"{cluster.text} has {cluster.num_devices}; make the mesh smaller"
        )
    if len(set(axes)) != len(axes) or any(not 0 <= axis < len(mesh_shape) for axis in axes):
        raise ClusterError(
            f"bad mesh axes {axes}; expected distinct numbers from 0 to {len(mesh_shape) - 1}"
        )


def _steps(members: int) -> int:
    """Steps of a recursive-doubling exchange among `members` devices."""
    return (members - 1).bit_length()


@functools.lru_cache(maxsize=65536)
def _members_per_node(node_size: int, mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """Members of a group that share a node, or 1 where the nodes cut the groups unevenly."""
    nested, inside, stride = True, 1, 1
    for axis in reversed(range(len(mesh_shape))):
        span = stride * mesh_shape[axis]
        nested &= node_size % span == 0 or span % node_size == 0
        if axis in axes:
            inside *= min(span, max(node_size, stride)) // stride
        stride = span
    if nested:  # every axis lies within a node, across nodes, or cuts them evenly
        return inside
    return _counted_per_node(node_size, mesh_shape, axes)


def _counted_per_node(node_size: int, mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """``_members_per_node`` by looking at every device."""
    nodes = np.arange(math.prod(mesh_shape)).reshape(mesh_shape) // node_size
    size = math.prod(mesh_shape[axis] for axis in axes)
    groups = np.sort(np.moveaxis(nodes, axes, range(-len(axes), 0)).reshape(-1, size), axis=1)
    inside = int(np.count_nonzero(groups[0] == groups[0, 0]))
    if size % inside:
        return 1
    runs = groups.reshape(len(groups), size // inside, inside)
    even = np.all(runs == runs[:, :, :1]) and np.all(runs[:, 1:, 0] > runs[:, :-1, 0])
    return inside if even else 1


def _hierarchy(
    cluster: Cluster, kind: Collective, mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[float, float]:
    """Two levels: every device of a node drives its own share of the network at once.

    An all-gather of B bytes over `inside` members in each of `across` nodes first exchanges
    B / inside per device across nodes, then completes inside the node. Groups that node
    boundaries cut unevenly are charged wholly to the network.
    """
    fast, slow = cluster.link, cluster.network or cluster.link
    size = math.prod(mesh_shape[axis] for axis in axes)
    inside = _members_per_node(cluster.devices_per_node, mesh_shape, axes)
    across = size // inside
    if kind == "permute":
        used: Link = slow if across > 1 else fast
        return used.latency_s, 1.0 / used.bytes_per_s
    alpha_s = _steps(inside) * fast.latency_s + _steps(across) * slow.latency_s
    if kind == "all_to_all":
        fast_share, slow_share = (inside - 1) / size, (size - inside) / size
    else:
        fast_share, slow_share = (inside - 1) / inside, (across - 1) / across / inside
    return alpha_s, fast_share / fast.bytes_per_s + slow_share / slow.bytes_per_s


def _torus(
    cluster: Cluster, kind: Collective, mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[float, float]:
    """Rings over the torus dimensions that the group covers, all of them used at once.

    A part that wraps around uses two links per device, a line one; parts whose members lie
    `step` chips apart share their links with the `step` groups in between.
    """
    size = math.prod(mesh_shape[axis] for axis in axes)
    parts = _parts(cluster.shape, mesh_shape, axes)
    hop_s, link = cluster.link.latency_s, cluster.link.bytes_per_s
    links = [(2.0 if wraps else 1.0) / step for _, step, wraps in parts]
    if kind == "permute":
        hops = sum(step * (1 if wraps else count - 1) for count, step, wraps in parts)
        return hops * hop_s, max(step for _, step, _ in parts) / link
    hops = sum(step * (count // 2 if wraps else count - 1) for count, step, wraps in parts)
    if kind == "all_to_all":
        load = max(
            (count * count // 4) / count / share
            for (count, _, _), share in zip(parts, links, strict=True)
        )
        return hops * hop_s, load / link
    return hops * hop_s, (size - 1) / size / (sum(links) * link)


def _parts(
    torus: tuple[int, ...], mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> list[_Part]:
    """Parts of torus dimensions that the group covers, matched from the last dimension on.

    A group that does not fall on the torus dimensions becomes one line without wrap-around,
    whose links are shared with every group in between: a cautious figure.
    """
    spans: list[tuple[int, int]] = []  # device numbers [low, high) that neighbouring axes span
    for axis in sorted(axes, reverse=True):
        stride = math.prod(mesh_shape[axis + 1 :])
        if mesh_shape[axis] > 1:
            joined = bool(spans) and spans[-1][1] == stride
            spans.append((spans.pop()[0] if joined else stride, stride * mesh_shape[axis]))
    parts: list[_Part] = []
    for first, last in spans:
        parts_of_span: list[_Part] = []
        aligned, stride = True, 1
        for length in reversed(torus):
            low, high = max(first, stride), min(last, stride * length)
            if high > low:
                aligned &= low % stride == 0 and high % low == 0 and stride * length % high == 0
                wraps = high == stride * length and length >= _WRAP_MIN_SIZE
                parts_of_span.append((high // low, low // stride, wraps))
            stride *= length
        covered = math.prod(count for count, _, _ in parts_of_span)
        if not aligned or covered != last // first:
            parts_of_span = [(last // first, first, False)]
        parts.extend(parts_of_span)
    return parts
