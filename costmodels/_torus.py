"""Collectives on a torus, and on several slices of one that a slower network joins.

Rings over the torus dimensions that a group covers, all of them used at once; all-to-all by the
load of the middle links. Source: jax-ml scaling book, "Sharded matrices and how to multiply them".
"""

from __future__ import annotations

import math

from .hardware import Cluster

# A covered part of a torus dimension: (members, step between members in chips, wraps around).
_Part = tuple[int, int, bool]


def torus_coefficients(
    cluster: Cluster, kind: str, mesh_shape: tuple[int, ...], axes: tuple[int, ...], inside: int
) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte) of a group with `inside` members in each slice it touches.

    `kind` is any `Collective` but all_reduce, which is a reduce-scatter and an all-gather. Between
    slices every device sends its own part: an all-gather of B bytes first exchanges B / inside
    per device between slices, then completes inside the slices.
    """
    size = math.prod(mesh_shape[axis] for axis in axes)
    across, link, network = size // inside, cluster.link, cluster.network or cluster.link
    parts = _parts(cluster, mesh_shape, axes) if inside > 1 else []
    alpha_s, beta = _inside(cluster, kind, parts)
    alpha_s += link.startup_s
    if kind == "all_to_all":
        beta *= inside / size
    if across > 1:
        steps = across - 1 if kind in ("all_gather", "reduce_scatter") else 1
        alpha_s += network.startup_s + steps * network.latency_s
        share = {"permute": 1.0, "all_to_all": (size - inside) / size}
        beta += share.get(kind, (across - 1) / size) / network.bytes_per_s
    return alpha_s, beta


def reduces_instead(
    cluster: Cluster, kind: str, mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> bool:
    """Whether XLA:TPU runs an all-reduce in place of a reduce-scatter or an all-gather.

    Over a whole slice it reduces and cuts the result, instead of a reduce-scatter, if the slice
    has three dimensions or is a square of at least four chips a side; where all of three
    dimensions wrap around it also sums padded parts instead of an all-gather; so it does in each
    slice of several. Source: modules compiled for 16 groups of v5e, v6e and v5p, and for two slices
    of v5p and v5e, by libtpu 0.0.42.1 (docs/explanation/collectives.md).
    """
    if cluster.kind != "torus":
        return False
    shape = [length for length in cluster.shape if length > 1]
    members = math.prod(mesh_shape[axis] for axis in axes)
    ends = [math.prod(mesh_shape[axis:]) for axis in axes if mesh_shape[axis] > 1]
    if members != math.prod(shape) or max(ends, default=0) > members:
        return False
    if kind == "all_gather":
        return len(shape) == 3 and all(n % cluster.wrap_multiple == 0 for n in shape)
    square = len(shape) == 2 and shape[0] == shape[1] >= 4
    return kind == "reduce_scatter" and (len(shape) == 3 or square)


def _inside(cluster: Cluster, kind: str, parts: list[_Part]) -> tuple[float, float]:
    """Seconds of hops, and seconds per byte, within a slice.

    A part that wraps around uses two links per device, a line one; parts whose members lie
    `step` chips apart share their links with the `step` groups in between.
    """
    if not parts:
        return 0.0, 0.0
    hop_s, rate = cluster.link.latency_s, cluster.link.bytes_per_s
    links = [(2.0 if wraps else 1.0) / step for _, step, wraps in parts]
    if kind == "permute":
        hops = sum(step * (1 if wraps else count - 1) for count, step, wraps in parts)
        return hops * hop_s, max(step for _, step, _ in parts) / rate
    hops = sum(step * (count // 2 if wraps else count - 1) for count, step, wraps in parts)
    if kind == "all_to_all":
        load = max(
            (count * count // 4) / count / share
            for (count, _, _), share in zip(parts, links, strict=True)
        )
        return hops * hop_s, load / rate
    size = math.prod(count for count, _, _ in parts)
    return hops * hop_s, (size - 1) / size / (sum(links) * rate)


def _parts(cluster: Cluster, mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> list[_Part]:
    """Parts of torus dimensions that the group covers, matched from the last dimension on.

    What lies between slices is left out. A group that does not fall on the torus dimensions
    becomes one line without wrap-around, whose links are shared with every group in between: a
    cautious figure.
    """
    spans: list[tuple[int, int]] = []  # device numbers [low, high) that neighbouring axes span
    for axis in sorted(axes, reverse=True):
        stride = math.prod(mesh_shape[axis + 1 :])
        if mesh_shape[axis] > 1:
            joined = bool(spans) and spans[-1][1] == stride
            spans.append((spans.pop()[0] if joined else stride, stride * mesh_shape[axis]))
    slice_size = math.prod(cluster.shape)
    spans = [(low, min(high, slice_size)) for low, high in spans if low < slice_size]
    parts: list[_Part] = []
    for first, last in spans:
        parts_of_span: list[_Part] = []
        aligned, stride = True, 1
        for length in reversed(cluster.shape):
            low, high = max(first, stride), min(last, stride * length)
            if high > low:
                aligned &= low % stride == 0 and high % low == 0 and stride * length % high == 0
                wraps = high == stride * length and length % cluster.wrap_multiple == 0
                parts_of_span.append((high // low, low // stride, wraps))
            stride *= length
        covered = math.prod(count for count, _, _ in parts_of_span)
        if not aligned or covered != last // first:
            parts_of_span = [(last // first, first, False)]
        parts.extend(parts_of_span)
    return parts
