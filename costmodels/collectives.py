"""Latency and bandwidth terms of collectives over axes of a device mesh.

Devices are numbered row-major over the mesh (last axis fastest). In that order they fill node after
node, or slice after slice, each in row-major order of its torus.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, get_args

import numpy as np

from ._nodes import nodes_coefficients
from ._torus import torus_coefficients
from .hardware import Cluster, ClusterError

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]


@functools.lru_cache(maxsize=65536)
def collective_coefficients(
    cluster: Cluster, kind: Collective, mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte): seconds = alpha_s + beta_s_per_byte * payload bytes.

    All groups along `axes` communicate at the same time. The payload per device is the gathered
    result (all_gather), the unreduced input (reduce_scatter), the tensor (all_reduce), or the
    local shard (all_to_all, permute; permute shifts by one along the axes). A group of one
    device costs (0, 0).

    Raises:
        ClusterError: unknown kind, axis outside the mesh or repeated, sizes that are not
            positive, or a mesh with more devices than the cluster.
    """
    _check(cluster, kind, mesh_shape, axes)
    if math.prod(mesh_shape[axis] for axis in axes) == 1:
        return 0.0, 0.0
    inside = _members_per_node(cluster.devices_per_node, mesh_shape, axes)
    if cluster.kind == "hierarchy":
        return nodes_coefficients(cluster, kind, mesh_shape, axes, inside)
    if kind == "all_reduce":
        alpha_s, beta = torus_coefficients(cluster, "all_gather", mesh_shape, axes, inside)
        return 2.0 * alpha_s - cluster.link.startup_s, 2.0 * beta
    return torus_coefficients(cluster, kind, mesh_shape, axes, inside)


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


@functools.lru_cache(maxsize=65536)
def _members_per_node(node_size: int, mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """Members of a group that share a node; 1 if the nodes split the groups unevenly."""
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
    """The same as ``_members_per_node``, counted over all devices."""
    nodes = np.arange(math.prod(mesh_shape)).reshape(mesh_shape) // node_size
    size = math.prod(mesh_shape[axis] for axis in axes)
    groups = np.sort(np.moveaxis(nodes, axes, range(-len(axes), 0)).reshape(-1, size), axis=1)
    inside = int(np.count_nonzero(groups[0] == groups[0, 0]))
    if size % inside:
        return 1
    runs = groups.reshape(len(groups), size // inside, inside)
    even = np.all(runs == runs[:, :, :1]) and np.all(runs[:, 1:, 0] > runs[:, :-1, 0])
    return inside if even else 1
