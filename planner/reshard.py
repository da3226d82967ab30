"""Resharding: what it takes to go from one sharding of a tensor to another.

A *code* writes a sharding of a rank-r tensor on an n-axis mesh as one integer: digit k
(base r+2) belongs to mesh axis k and is 0 (axis unused), d+1 (splits dimension d) or r+1
(partial sums along this axis). Per axis the step is one of

====================  =================================================
from -> to            collective
====================  =================================================
same -> same          none
none -> dim           slice (free: every device has the data)
partial -> dim        reduce-scatter
partial -> none       all-reduce
dim i -> dim j        all-to-all
dim -> none           all-gather
====================  =================================================

done in this order (data shrinks before it grows), axes of one kind together. Payloads
follow costmodels.collectives: unreduced input, tensor, local shard, gathered result.

XLA's partitioner does an all-to-all only by itself: where another axis is gathered or
sliced in the same step it gathers everything and slices ("involuntary full
rematerialization"), so that is what such a step costs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from costmodels import Collective, CostModel

COMBINED = 0.05
"""Share of a gradient collective's latency that is left when XLA combines it with others."""
COMBINABLE = frozenset({"all_reduce", "reduce_scatter"})

KINDS: tuple[Collective, ...] = ("reduce_scatter", "all_reduce", "all_to_all", "all_gather")


@dataclass(frozen=True)
class Step:
    """One collective: kind, mesh axes (positions), payload bytes per device, seconds."""

    kind: str
    axes: tuple[int, ...]
    payload_bytes: float
    time_s: float


def encode(digits: Sequence[int], rank: int) -> int:
    """Digits (one per mesh axis) to a code."""
    code = 0
    for digit in digits:
        code = code * (rank + 2) + digit
    return code


def digits_of(code: int, rank: int, num_axes: int) -> tuple[int, ...]:
    """The inverse of ``encode``."""
    out = []
    for _ in range(num_axes):
        code, digit = divmod(code, rank + 2)
        out.append(digit)
    return tuple(reversed(out))


def reshard_steps(
    src: Sequence[int],
    dst: Sequence[int],
    rank: int,
    nbytes: float,
    sizes: Sequence[int],
    model: CostModel,
    combined: bool = False,
) -> tuple[Step, ...]:
    """The collectives from ``src`` to ``dst`` digits of a tensor of ``nbytes`` bytes.

    ``combined``: all-reduces share their latency with many others (gradients).
    """
    partial = rank + 1
    share = 1.0
    for digit, n in zip(src, sizes, strict=True):
        if 0 < digit < partial:
            share /= n
    pairs = list(enumerate(zip(src, dst, strict=True)))
    moved = [k for k, (s, d) in pairs if 0 < s < partial and 0 < d < partial and s != d]
    gathered = any(0 < s < partial and d == 0 for s, d in zip(src, dst, strict=True))
    sliced = [k for k, (s, d) in pairs if s == 0 and 0 < d < partial]
    if moved and (gathered or sliced):
        pairs = [(k, (s, 0 if k in moved else d)) for k, (s, d) in pairs]
    else:
        for k in sliced:
            share /= sizes[k]
    axes = {
        "reduce_scatter": [k for k, (s, d) in pairs if s == partial and 0 < d < partial],
        "all_reduce": [k for k, (s, d) in pairs if s == partial and d == 0],
        "all_to_all": [k for k, (s, d) in pairs if 0 < s < partial and 0 < d < partial and s != d],
        "all_gather": [k for k, (s, d) in pairs if 0 < s < partial and d == 0],
    }
    steps = []
    for kind in KINDS:
        over = tuple(axes[kind])
        if not over:
            continue
        group = int(np.prod([sizes[k] for k in over]))
        if kind == "all_gather":
            share *= group
        payload = nbytes * share
        alpha, beta = model.collective_coefficients(kind, tuple(sizes), over)
        alpha *= COMBINED if combined and kind in COMBINABLE else 1.0
        steps.append(Step(kind, over, payload, alpha + beta * payload))
        if kind == "reduce_scatter":
            share /= group
    return tuple(steps)


@dataclass(frozen=True)
class ReshardTable:
    """Seconds of every resharding of rank-r tensors: ``alpha_s + nbytes * beta_s_per_byte``.

    All arrays have shape [codes, codes]; ``combined_alpha_s`` is for gradients. ``changes``
    counts the mesh axes along which the layout changes (anything but an all-reduce).
    """

    alpha_s: NDArray[np.float64]
    combined_alpha_s: NDArray[np.float64]
    beta_s_per_byte: NDArray[np.float64]
    changes: NDArray[np.float64]


@lru_cache(maxsize=256)
def reshard_table(rank: int, sizes: tuple[int, ...], model: CostModel) -> ReshardTable:
    """``reshard_steps`` for all pairs at once (vectorised; the same arithmetic)."""
    n, base, partial = len(sizes), rank + 2, rank + 1
    codes = np.arange(base**n)
    digit = np.stack([(codes // base ** (n - 1 - k)) % base for k in range(n)])
    src, dst = digit[:, :, None], digit[:, None, :]
    is_dim_src, is_dim_dst = (src > 0) & (src < partial), (dst > 0) & (dst < partial)
    size = np.asarray(sizes, np.float64)[:, None, None]
    bits = (1 << np.arange(n))[:, None, None]
    moved = is_dim_src & is_dim_dst & (src != dst)
    sliced = (src == 0) & is_dim_dst
    whole = moved.any(axis=0) & ((is_dim_src & (dst == 0)) | sliced).any(axis=0)
    early = is_dim_src | (sliced & ~whole)
    share = np.prod(np.where(early, 1.0 / size, 1.0), axis=0)
    wanted = {
        "reduce_scatter": (src == partial) & is_dim_dst,
        "all_reduce": (src == partial) & (dst == 0),
        "all_to_all": moved & ~whole,
        "all_gather": (is_dim_src & (dst == 0)) | (moved & whole),
    }
    alpha = np.zeros(share.shape)
    combined = np.zeros(share.shape)
    beta = np.zeros(share.shape)
    for kind in KINDS:
        mask = np.sum(wanted[kind] * bits, axis=0)
        group = np.prod(np.where(wanted[kind], size, 1.0), axis=0)
        a, b = _coefficients(kind, sizes, model)
        if kind == "all_gather":
            share = share * group
        alpha += a[mask]
        combined += a[mask] * (COMBINED if kind in COMBINABLE else 1.0)
        beta += b[mask] * share
        if kind == "reduce_scatter":
            share = share / group
    # a partial sum is never a target: only its producer leaves one
    forbidden = np.any(np.broadcast_to(dst == partial, wanted["all_gather"].shape), axis=0)
    alpha[forbidden] = combined[forbidden] = np.inf
    changes = np.sum((src != dst) & ~((src == partial) & (dst == 0)), axis=0).astype(np.float64)
    return ReshardTable(alpha, combined, beta, changes)


def _coefficients(
    kind: Collective, sizes: tuple[int, ...], model: CostModel
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Latency and seconds per byte of ``kind`` for every subset of axes (bit mask)."""
    rows = [(0.0, 0.0)]
    for mask in range(1, 1 << len(sizes)):
        axes = tuple(k for k in range(len(sizes)) if mask >> k & 1)
        rows.append(model.collective_coefficients(kind, sizes, axes))
    table = np.asarray(rows)
    return table[:, 0], table[:, 1]
