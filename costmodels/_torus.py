"""Collectives on a torus, and on several torus slices that a slower network connects.

Collectives run as rings over all torus dimensions that a group covers, at the same time. The time
of an all-to-all follows from the load of the middle links. Source: jax-ml scaling book, "Sharded
matrices and how to multiply them".
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

    `kind` is any `Collective` except all_reduce, which is a reduce-scatter and an all-gather.
    Between slices, every device sends its part: an all-gather of B bytes first exchanges B / inside
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

    A reduce-scatter over a whole slice becomes an all-reduce whose result is sliced, if the slice
    has three dimensions or is a square with at least four chips per side. An all-gather over a
    whole slice becomes a sum of padded parts, if the slice has three dimensions that all wrap
    around. The same holds inside each of several slices. Source: modules compiled for 16 groups of
    v5e, v6e and v5p, and for two slices of v5p and v5e, by libtpu 0.0.42.1
    (docs/explanation/collectives.md).
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

    A part that wraps around uses two links per device; a line uses one. If the members of a part
    are `step` chips apart, `step` groups share its links.
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

    The part between slices is left out. A group that does not align with the torus dimensions
    becomes one line without wrap-around, whose links are shared with every group in between. This
    is a conservative estimate.
    """
    spans: list[tuple[int, int]] = []  # device numbers [low, high) that neighboring axes span
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
