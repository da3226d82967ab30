"""Resharding: the collectives that change one sharding of a tensor into another.

A *code* writes a sharding of a rank-r tensor on an n-axis mesh as one integer: digit k
(base r+2) belongs to mesh axis k and is 0 (axis unused), d+1 (splits dimension d) or r+1
(partial sums along this axis). A change takes these collectives, in this order, if needed:

===============  ==========================================================================
slice            free: every device has the data
reduce-scatter   of partial sums whose axes all split a dimension afterwards, or, if the
                 executor separates them (``splits_sums``), over those axes that do
all-reduce       of other partial sums
permute          shards trade places: axes in another dimension, or in another order
all-to-all       axes go from one dimension to another
all-gather       axes that split nothing afterwards
===============  ==========================================================================

`route` determines which are needed, following Shardy's pass. Payloads follow
costmodels.collectives: unreduced input, tensor, local shard, gathered result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels import Cluster, Collective, CostModel
from planner.cost.routes import PARTIAL, Pattern, Route, all_patterns, patterns, route

COMBINABLE = frozenset({"all_reduce", "reduce_scatter", "all_gather"})
"""Kinds of collectives that XLA combines with others of their kind for parameters and gradients."""

AFTER_SUM = 6.0
"""Additional memory traffic of a sum that a collective separates from a product, in multiples of
its bytes, on devices where products absorb what follows them. The sum is written and read, and its
successor is written, each as 32-bit lanes: three times two for bfloat16."""

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class ReshardStep:
    """One collective: kind, mesh axes (positions), payload bytes per device, seconds."""

    kind: str
    axes: tuple[int, ...]
    payload_bytes: float
    time_s: float


def encode(digits: Sequence[int], rank: int) -> int:
    """Digits (one per mesh axis) to a code.

    >>> encode((1, 0), rank=2), digits_of(4, rank=2, num_axes=2)
    (4, (1, 0))
    """
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


def pattern_of(src: Sequence[int], dst: Sequence[int], rank: int) -> Pattern:
    """The pattern of a change: dimensions numbered in order of first appearance."""
    names: dict[int, int] = {}
    out = []
    for s, d in zip(src, dst, strict=True):
        before = PARTIAL if s == rank + 1 else names.setdefault(s, len(names) + 1) if s else 0
        out.append((before, names.setdefault(d, len(names) + 1) if d else 0))
    return tuple(out)


@lru_cache(maxsize=64)
def _skipping(n: int, ones: int) -> IntArray:
    """[patterns + 1] for every pattern of n axes, the number of the pattern without ``ones``."""
    known = {pattern: k for k, pattern in enumerate(all_patterns(n))}
    out = []
    for pattern in known:
        pairs = [(0, 0) if ones >> k & 1 else pair for k, pair in enumerate(pattern)]
        dims = max(max(pair) for pair in pattern)
        before = [dims + 1 if s == PARTIAL else s for s, _ in pairs]
        out.append(known[pattern_of(before, [d for _, d in pairs], dims)])
    return np.asarray([*out, len(out)], np.int64)


def splits_sums(cluster: Cluster) -> bool:
    """Whether the executor reduce-scatters along some axes and then all-reduces along others, as in
    the default lowering of a plan (`planner.plan.compiled.lowering`)."""
    if cluster.kind == "torus":
        return sum(length > 1 for length in cluster.shape) > 1
    return cluster.device.kind != "cpu"


def collectives_of(
    way: Route, sizes: Sequence[int], splits: bool = True
) -> list[tuple[Collective, int, float]]:
    """The collectives of a route on mesh axes of the given sizes: kind, mask of axes, and payload
    as a share of the tensor. ``splits``: see `splits_sums`."""

    def size(mask: int) -> int:
        return math.prod(n for k, n in enumerate(sizes) if mask >> k & 1)

    room = math.prod(size(b) // math.gcd(size(a), size(b)) for a, b in way.dims)
    split = size(way.before) * min(size(way.sliced), room)
    wanted: list[tuple[Collective, int, float]] = []
    if way.reduced:
        early = way.before | way.sliced & ~way.reduced
        scattered = way.reduced & way.sliced if splits or way.scattered else 0
        wanted.append(("reduce_scatter", scattered, 1.0 / size(early)))
        wanted.append(("all_reduce", way.reduced & ~scattered, 1.0 / size(early | scattered)))
    if way.permutes:
        wanted.append(("permute", way.shuffled, 1.0 / split))
    if room > size(way.sliced):
        wanted += [("all_to_all", mask, 1.0 / split) for mask in way.moves]
    if way.gathered and split > size(way.after):
        wanted.append(("all_gather", way.gathered, 1.0 / size(way.after)))
    return [row for row in wanted if size(row[1]) > 1]


def reshard_steps(
    src: Sequence[int],
    dst: Sequence[int],
    rank: int,
    nbytes: float,
    sizes: Sequence[int],
    model: CostModel,
    combined: bool = False,
) -> tuple[ReshardStep, ...]:
    """The collectives from ``src`` to ``dst`` digits of a tensor of ``nbytes`` bytes.

    ``combined``: they share their latency with many others (parameters and gradients).
    """
    src, dst = ([d if n > 1 else 0 for d, n in zip(x, sizes, strict=True)] for x in (src, dst))
    way = route(pattern_of(src, dst, rank))
    steps: list[ReshardStep] = []
    unsaid = after_sum_s(model) if way.reduced else 0.0
    for kind, over, share in collectives_of(way, sizes, splits_sums(model.cluster)):
        payload = nbytes * share
        axes = tuple(k for k in range(len(sizes)) if over >> k & 1)
        alpha, beta = model.collective_coefficients(kind, tuple(sizes), axes)
        alpha *= model.combined_latency if combined and kind in COMBINABLE else 1.0
        seconds = alpha + beta * payload
        if unsaid and kind in ("all_reduce", "reduce_scatter"):
            pieces = math.prod(n for k, n in enumerate(sizes) if way.after >> k & 1)
            seconds += unsaid * nbytes / pieces
            unsaid = 0.0
        steps.append(ReshardStep(kind, axes, payload, seconds))
    return tuple(steps)


def after_sum_s(model: CostModel) -> float:
    """Seconds per byte of a shard of a sum, see ``AFTER_SUM``."""
    device = model.cluster.device
    if not device.fuses_operands:
        return 0.0
    return AFTER_SUM / (device.memory_bytes_per_s * device.memory_efficiency)


@dataclass(frozen=True)
class Transitions:
    """Seconds of every *transition* on some meshes: ``alpha_s + nbytes * beta_s_per_byte``.

    A transition is a pattern (see ``route``), numbered as in ``all_patterns``. The last column
    (index -1) is for changes to partial sums, which are not allowed. Arrays have shape [meshes,
    transitions]; ``combined_alpha_s`` is for parameters and gradients. ``changes`` [transitions]
    counts the axes along which the layout changes (anything but an all-reduce); ``sums``
    [transitions]: whether partial sums are reduced, and nothing else.
    """

    alpha_s: NDArray[np.float64]
    combined_alpha_s: NDArray[np.float64]
    beta_s_per_byte: NDArray[np.float64]
    changes: NDArray[np.float64]
    sums: NDArray[np.bool_]

    def shares(self, share: float) -> NDArray[np.float64]:
        """[transitions] the factor on the seconds of a link with this ``GroupLink.share``."""
        return np.where(self.sums, share, 1.0)


@dataclass(frozen=True, eq=False)
class _Routes:
    """The routes of all patterns of n axes, as arrays [patterns] of masks and flags.

    ``moves`` is [patterns, n]. ``free`` are the axes that dimensions gain that lose none; ``full``
    [patterns, n, 2] are the axes lost and gained, for each dimension that has both.
    """

    reduced: IntArray
    scattered: NDArray[np.bool_]
    before: IntArray
    sliced: IntArray
    moves: IntArray
    gathered: IntArray
    after: IntArray
    shuffled: IntArray
    permutes: NDArray[np.bool_]
    free: IntArray
    full: IntArray
    changes: NDArray[np.float64]


@lru_cache(maxsize=8)
def _routes(n: int) -> _Routes:
    routes = [route(pattern) for pattern in all_patterns(n)]
    full = np.zeros((len(routes), n, 2), np.int64)
    moves = np.zeros((len(routes), n), np.int64)
    for row, way in enumerate(routes):
        pairs = [pair for pair in way.dims if pair[0] and pair[1]]
        full[row, : len(pairs)] = np.reshape(pairs, (-1, 2))
        moves[row, : len(way.moves)] = way.moves

    def masks(name: str) -> IntArray:
        return np.asarray([getattr(way, name) for way in routes], np.int64)

    changes = [
        sum(s != d and not (s == PARTIAL and d == 0) for s, d in pattern)
        for pattern in all_patterns(n)
    ]
    return _Routes(
        masks("reduced"),
        masks("scattered") > 0,
        masks("before"),
        masks("sliced"),
        moves,
        masks("gathered"),
        masks("after"),
        masks("shuffled"),
        masks("permutes") > 0,
        np.asarray([sum(b for a, b in way.dims if not a) for way in routes], np.int64),
        full,
        np.asarray(changes, np.float64),
    )


def transition_costs(meshes: Sequence[tuple[int, ...]], model: CostModel) -> Transitions:
    """``reshard_steps`` of every transition, on meshes with the same number of axes (the same
    arithmetic, vectorized)."""
    n = len(meshes[0])
    ways = _routes(n)
    size = np.ones((len(meshes), 1 << n), np.int64)
    for mask in range(1, 1 << n):
        axes = [k for k in range(n) if mask >> k & 1]
        size[:, mask] = [math.prod(sizes[k] for k in axes) for sizes in meshes]
    room: Any = size[:, ways.free]
    for pair in range(n):
        left, come = size[:, ways.full[:, pair, 0]], size[:, ways.full[:, pair, 1]]
        room = room * (come // np.gcd(left, come))
    split = size[:, ways.before] * np.minimum(size[:, ways.sliced], room)
    reduced = ways.reduced > 0
    splits = splits_sums(model.cluster)
    into = np.where(splits | ways.scattered, ways.reduced & ways.sliced, 0)
    whole = ways.reduced & ~into
    early = ways.before | ways.sliced & ~ways.reduced
    steps: list[tuple[Collective, IntArray, Any, IntArray]] = [
        ("reduce_scatter", into, into > 0, size[:, early]),
        ("all_reduce", whole, whole > 0, size[:, early | into]),
        ("permute", ways.shuffled, ways.permutes, split),
        *(("all_to_all", ways.moves[:, k], room > size[:, ways.sliced], split) for k in range(n)),
        ("all_gather", ways.gathered, split > size[:, ways.after], size[:, ways.after]),
    ]
    shape = (len(meshes), len(ways.before) + 1)
    alpha, combined, beta = (np.zeros(shape) for _ in range(3))
    known = {
        name: [
            np.stack(c) for c in zip(*(coefficients(name, m, model) for m in meshes), strict=True)
        ]
        for name in {step[0] for step in steps}
    }
    for name, over, wanted, pieces in steps:
        a, b = known[name]
        needed = wanted & (size[:, over] > 1)
        latency = np.where(needed, a[:, over], 0.0)
        alpha[:, :-1] += latency
        combined[:, :-1] += latency * (model.combined_latency if name in COMBINABLE else 1.0)
        beta[:, :-1] += np.where(needed, b[:, over] / pieces, 0.0)
    summed = reduced & (size[:, ways.reduced] > 1)
    beta[:, :-1] += np.where(summed, after_sum_s(model) / size[:, ways.after], 0.0)
    alpha[:, -1] = combined[:, -1] = np.inf
    for row, sizes in enumerate(meshes):
        if 1 in sizes:
            at = _skipping(n, sum(1 << k for k, m in enumerate(sizes) if m == 1))
            alpha[row], combined[row], beta[row] = alpha[row, at], combined[row, at], beta[row, at]
    changes = np.append(ways.changes, 1.0)
    more = ways.permutes | (ways.moves > 0).any(axis=1) | (ways.gathered > 0)
    return Transitions(alpha, combined, beta, changes, np.append(reduced & ~more, False))


@dataclass(frozen=True)
class ReshardTable:
    """Seconds of every resharding of rank-r tensors: ``alpha_s + nbytes * beta_s_per_byte``.

    All arrays have shape [codes, codes]; ``combined_alpha_s`` is for parameters and
    gradients. ``changes`` counts the mesh axes along which the layout changes (anything but an
    all-reduce); ``sums``: whether partial sums are reduced, and nothing else.
    """

    alpha_s: NDArray[np.float64]
    combined_alpha_s: NDArray[np.float64]
    beta_s_per_byte: NDArray[np.float64]
    changes: NDArray[np.float64]
    sums: NDArray[np.bool_]


@lru_cache(maxsize=64)
def _one_mesh(sizes: tuple[int, ...], model: CostModel) -> Transitions:
    return transition_costs((sizes,), model)


@lru_cache(maxsize=64)
def _all_pairs(rank: int, num_axes: int) -> NDArray[np.int64]:
    """[codes, codes] the transition of every pair of codes."""
    base = rank + 2
    codes = np.arange(base**num_axes)[:, None]
    digits = codes // base ** np.arange(num_axes - 1, -1, -1) % base
    return patterns(digits[:, None], digits[None, :], rank)


@lru_cache(maxsize=256)
def reshard_table(rank: int, sizes: tuple[int, ...], model: CostModel) -> ReshardTable:
    """``reshard_steps`` for all pairs of codes at once."""
    costs, pairs = _one_mesh(sizes, model), _all_pairs(rank, len(sizes))
    return ReshardTable(
        costs.alpha_s[0][pairs],
        costs.combined_alpha_s[0][pairs],
        costs.beta_s_per_byte[0][pairs],
        costs.changes[pairs],
        costs.sums[pairs],
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
