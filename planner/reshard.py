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

import math
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
        group = math.prod(sizes[k] for k in over)
        if kind == "all_gather":
            share *= group
        payload = nbytes * share
        alpha, beta = model.collective_coefficients(kind, tuple(sizes), over)
        alpha *= COMBINED if combined and kind in COMBINABLE else 1.0
        steps.append(Step(kind, over, payload, alpha + beta * payload))
        if kind == "reduce_scatter":
            share /= group
    return tuple(steps)


NOTHING, SLICE, REDUCE_SCATTER, ALL_REDUCE, MOVE, GATHER, KEEP, REFUSED = range(8)
"""What happens along one mesh axis: the rows of the module's table, with "same" told apart into
unsplit (NOTHING) and split (KEEP); nothing may arrive as a partial sum (REFUSED)."""
TYPES = 8


@dataclass(frozen=True)
class Transitions:
    """Seconds of every *transition* on some meshes: ``alpha_s + nbytes * beta_s_per_byte``.

    A transition is one type per mesh axis, written as a number in base ``TYPES``; what a change
    of sharding costs depends on nothing else. Arrays have shape [meshes, transitions];
    ``combined_alpha_s`` is for gradients. ``changes`` [transitions] counts the axes along which
    the layout changes (anything but an all-reduce).
    """

    alpha_s: NDArray[np.float64]
    combined_alpha_s: NDArray[np.float64]
    beta_s_per_byte: NDArray[np.float64]
    changes: NDArray[np.float64]


def transition_costs(meshes: Sequence[tuple[int, ...]], model: CostModel) -> Transitions:
    """``reshard_steps`` of every transition on meshes of one number of axes (the same
    arithmetic, vectorised)."""
    n = len(meshes[0])
    kind = np.arange(TYPES**n)[:, None] // TYPES ** np.arange(n - 1, -1, -1) % TYPES
    bits = 1 << np.arange(n)
    over = {t: (kind == t) @ bits for t in (SLICE, REDUCE_SCATTER, ALL_REDUCE, MOVE, GATHER, KEEP)}
    # an all-to-all beside a gather or a slice: everything is gathered, then sliced
    whole = (over[MOVE] > 0) & ((over[GATHER] > 0) | (over[SLICE] > 0))
    early = over[MOVE] | over[GATHER] | over[KEEP] | np.where(whole, 0, over[SLICE])
    wanted = {
        "reduce_scatter": over[REDUCE_SCATTER],
        "all_reduce": over[ALL_REDUCE],
        "all_to_all": np.where(whole, 0, over[MOVE]),
        "all_gather": over[GATHER] | np.where(whole, over[MOVE], 0),
    }
    size = np.ones((len(meshes), 1 << n))
    for mask in range(1, 1 << n):
        axes = [k for k in range(n) if mask >> k & 1]
        size[:, mask] = [math.prod(sizes[k] for k in axes) for sizes in meshes]
    share = 1.0 / size[:, early]
    alpha, combined, beta = (np.zeros(share.shape) for _ in range(3))
    for name in KINDS:
        mask = wanted[name]
        a, b = (
            np.stack(c)
            for c in zip(*(coefficients(name, sizes, model) for sizes in meshes), strict=True)
        )
        if name == "all_gather":
            share = share * size[:, mask]
        alpha += a[:, mask]
        combined += a[:, mask] * (COMBINED if name in COMBINABLE else 1.0)
        beta += b[:, mask] * share
        if name == "reduce_scatter":
            share = share / size[:, mask]
    refused = (kind == REFUSED).any(axis=1)
    alpha[:, refused] = combined[:, refused] = np.inf
    changed = (kind == SLICE) | (kind == REDUCE_SCATTER) | (kind == MOVE) | (kind == GATHER)
    changes = (changed | (kind == REFUSED)).sum(axis=1).astype(np.float64)
    return Transitions(alpha, combined, beta, changes)


def transitions(src: NDArray[np.int64], dst: NDArray[np.int64], rank: int) -> NDArray[np.int64]:
    """Transitions between shardings given as digits [..., n], broadcast against each other."""
    kinds = _types(rank)[src, dst]
    out: NDArray[np.int64] = kinds @ TYPES ** np.arange(kinds.shape[-1] - 1, -1, -1)
    return out


@lru_cache(maxsize=64)
def _types(rank: int) -> NDArray[np.int64]:
    """[rank + 2, rank + 2] the type of going from one digit to another."""
    partial = rank + 1
    out = np.full((rank + 2, rank + 2), MOVE, np.int64)
    np.fill_diagonal(out, KEEP)
    out[0, :], out[:, 0] = SLICE, GATHER
    out[partial, :] = REDUCE_SCATTER
    out[partial, 0], out[0, 0] = ALL_REDUCE, NOTHING
    out[:, partial] = REFUSED
    return out


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


@lru_cache(maxsize=64)
def _one_mesh(sizes: tuple[int, ...], model: CostModel) -> Transitions:
    return transition_costs((sizes,), model)


@lru_cache(maxsize=64)
def _all_pairs(rank: int, num_axes: int) -> NDArray[np.int64]:
    """[codes, codes] the transition of every pair of codes."""
    base = rank + 2
    codes = np.arange(base**num_axes)[:, None]
    digits = codes // base ** np.arange(num_axes - 1, -1, -1) % base
    return transitions(digits[:, None], digits[None, :], rank)


@lru_cache(maxsize=256)
def reshard_table(rank: int, sizes: tuple[int, ...], model: CostModel) -> ReshardTable:
    """``reshard_steps`` for all pairs of codes at once."""
    costs, pairs = _one_mesh(sizes, model), _all_pairs(rank, len(sizes))
    return ReshardTable(
        costs.alpha_s[0][pairs],
        costs.combined_alpha_s[0][pairs],
        costs.beta_s_per_byte[0][pairs],
        costs.changes[pairs],
    )


@lru_cache(maxsize=4096)
def coefficients(
    kind: Collective, sizes: tuple[int, ...], model: CostModel
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Latency and seconds per byte of ``kind`` for every subset of axes (bit mask)."""
    rows = [(0.0, 0.0)]
    for mask in range(1, 1 << len(sizes)):
        axes = tuple(k for k in range(len(sizes)) if mask >> k & 1)
        rows.append(model.collective_coefficients(kind, sizes, axes))
    table = np.asarray(rows)
    return table[:, 0], table[:, 1]
