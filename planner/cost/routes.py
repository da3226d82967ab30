"""The collectives that take a tensor from one sharding to another, as in Shardy's partitioner.

A sharding says, per mesh axis, which dimension the axis splits. Shardy (openxla.org/shardy, pass
``sdy-reshard-to-collectives``) slices first, which is free, then permutes shards once if axes are
in the wrong dimension or the wrong order, then moves axes between dimensions by all-to-alls, and
gathers last. The *pattern* of the change determines which of these are needed: the dimension of
each axis before and after, up to renaming dimensions. The bytes that each moves depend on axis
sizes, which stay symbolic here: a payload is the tensor divided by the product of some axes.

To decide whether a permutation is needed, this module simulates the pass on axes of equal size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

PARTIAL = -1
"""In a pattern: the axis holds partial sums."""

Pattern = tuple[tuple[int, int], ...]
"""Per mesh axis, (dimension before, dimension after), 1-based; 0 for none, PARTIAL."""


@dataclass(frozen=True, slots=True)
class Route:
    """The collectives that a pattern needs. Sets of axes are bit masks (axis k is bit k).

    Attributes:
        reduced: axes whose partial sums are combined.
        scattered: whether a reduce-scatter combines them; otherwise, an all-reduce does.
        before: axes that split the tensor before.
        sliced: axes that split it only after (scattered ones among them).
        moves: axes that change their dimension, one mask per all-to-all.
        gathered: axes that split it only before.
        after: axes that split it after.
        permutes: whether shards are permuted.
        shuffled: axes of every dimension that changes.
        dims: per dimension that changes, (axes before, axes after), without the leading axes that
            are the same in both.
    """

    reduced: int
    scattered: bool
    before: int
    sliced: int
    moves: tuple[int, ...]
    gathered: int
    after: int
    permutes: bool
    shuffled: int
    dims: tuple[tuple[int, int], ...]


@lru_cache(maxsize=65536)
def route(pattern: Pattern) -> Route:
    """The route of a pattern.

    >>> route(((PARTIAL, 1),)).scattered, route(((1, 0),)).gathered
    (True, 1)
    """
    before = sliced = gathered = after = reduced = whole = 0
    moves: dict[tuple[int, int], int] = {}
    for k, (s, d) in enumerate(pattern):
        bit = 1 << k
        reduced |= bit if s == PARTIAL else 0
        whole |= bit if s == PARTIAL and d == 0 else 0
        before |= bit if s > 0 else 0
        after |= bit if d > 0 else 0
        sliced |= bit if s <= 0 < d else 0
        if 0 < s != d > 0:
            moves[s, d] = moves.get((s, d), 0) | bit
        gathered |= bit if s > 0 == d else 0
    inside, outside = _difference(pattern)
    permutes = _permutes(inside, outside)
    labels = sorted(inside.keys() | outside.keys())
    dims = tuple((_mask(inside.get(x, ())), _mask(outside.get(x, ()))) for x in labels)
    return Route(
        reduced,
        bool(reduced) and not whole,
        before,
        sliced,
        (sum(moves.values()),) if permutes and moves else tuple(moves.values()),
        gathered,
        after,
        permutes,
        functools.reduce(lambda mask, pair: mask | pair[0] | pair[1], dims, 0),
        tuple(pair for pair in dims if pair != (0, 0)),
    )


Axes = dict[int, tuple[int, ...]]
"""Axes per dimension, major first."""


def _mask(axes: tuple[int, ...]) -> int:
    return sum(1 << k for k in axes)


def _difference(pattern: Pattern) -> tuple[Axes, Axes]:
    """Axes of every dimension before and after, without the leading ones that both share."""
    inside: Axes = {}
    outside: Axes = {}
    for k, (s, d) in enumerate(pattern):
        if s > 0:
            inside[s] = (*inside.get(s, ()), k)
        if d > 0:
            outside[d] = (*outside.get(d, ()), k)
    for dim in inside.keys() & outside.keys():
        a, b = inside[dim], outside[dim]
        while a and b and a[0] == b[0]:
            a, b = a[1:], b[1:]
        inside[dim], outside[dim] = a, b
    return inside, outside


def _permutes(inside: Axes, outside: Axes) -> bool:
    """Whether the pass permutes shards, for axes of equal size."""
    now = {d: list(axes) for d, axes in inside.items()}
    goal = {d: list(axes) for d, axes in outside.items()}
    dims = sorted(now.keys() | goal.keys())
    for d in dims:
        now.setdefault(d, [])
        goal.setdefault(d, [])
    present = {k for axes in now.values() for k in axes}
    room = {d: max(0, len(goal[d]) - len(now[d])) for d in dims}
    target = {k: d for d, axes in goal.items() for k in axes}
    _slice_at_source(now, goal, room, present, target)
    left = []
    for d in dims:
        for k in list(goal[d]):
            if k in present:
                continue
            if not room[d]:
                left.append(k)
                continue
            room[d] -= 1
            if not now[d] and goal[d][0] == k:
                goal[d].remove(k)
                del target[k]
            else:
                now[d].append(k)
                present.add(k)
    for d in dims:
        while left and room[d]:
            k = left.pop(0)
            room[d] -= 1
            now[d].append(k)
            present.add(k)
    return _misplaced(now, goal, present, target)


def _slice_at_source(
    now: dict[int, list[int]],
    goal: dict[int, list[int]],
    room: dict[int, int],
    present: set[int],
    target: dict[int, int],
) -> None:
    """Slice axes in a dimension whose last axes are about to move, so that they move together."""
    for d in sorted(now):
        last = now[d][-1] if now[d] else None
        if last is None or goal[d] or last not in target or now[target[last]]:
            continue
        to = target[last]
        at = goal[to].index(last) + 1
        ahead = goal[to][:at]
        same = 0
        while same < min(len(now[d]), at) and now[d][-1 - same] == ahead[-1 - same]:
            same += 1
        if any(target.get(k) == to for k in now[d][: len(now[d]) - same]):
            continue
        added = list(itertools.takewhile(lambda k: k not in present, goal[to][at:]))
        if not added:
            continue
        now[d].extend(added)
        present.update(added)
        room[to] = max(0, room[to] - same - len(added))


def _misplaced(
    now: dict[int, list[int]],
    goal: dict[int, list[int]],
    present: set[int],
    target: dict[int, int],
) -> bool:
    """``shouldCollectivePermute`` of the pass."""
    missing = extra = False
    for d in sorted(now):
        if now[d] and goal[d]:
            return True
        missing |= any(k not in present for k in goal[d])
        last: int | None = None
        last_at = 0
        seen: set[int] = set()
        for k in now[d]:
            to = target.get(k)
            if to is not None:
                at = goal[to].index(k)
                if (to == d or to in seen) and (last != to or at != last_at + 1):
                    return True
                seen.add(to)
                last_at = at
            elif last is not None and not goal[d]:
                return True
            else:
                extra = True
            last = to
    return missing and extra


IntArray = NDArray[np.int64]
MOST_CODES = 512
"""Number of codes of one side up to which all pairs are tabulated."""


def patterns(src: IntArray, dst: IntArray, rank: int) -> IntArray:
    """[...] the number of the pattern of each change, an index into ``all_patterns``; -1 where the
    result would hold partial sums.

    Args:
        src, dst: [..., n] digits (see ``reshard``), broadcast against each other.
        rank: of the tensor.
    """
    n = src.shape[-1]
    base = rank + 2
    if base**n > MOST_CODES:
        return _patterns(src, dst, rank)
    weights = base ** np.arange(n)
    numbers: IntArray = _pattern_table(n, rank)[src @ weights, dst @ weights]
    return numbers


@lru_cache(maxsize=32)
def _pattern_table(n: int, rank: int) -> IntArray:
    """``patterns`` of every pair of codes, which write the digits in base ``rank`` + 2."""
    base = rank + 2
    every = np.arange(base**n)[:, None] // base ** np.arange(n) % base
    return _patterns(every[:, None], every[None, :], rank)


def _patterns(src: IntArray, dst: IntArray, rank: int) -> IntArray:
    """See ``patterns``."""
    n = src.shape[-1]
    shape = np.broadcast_shapes(src.shape, dst.shape)
    pairs = [np.broadcast_to(x, shape)[..., k] for k in range(n) for x in (src, dst)]
    labels: list[IntArray] = []
    fresh = np.zeros(shape[:-1], np.int64)
    for at, digit in enumerate(pairs):
        label = np.zeros(shape[:-1], np.int64)
        for earlier, known in zip(pairs, labels, strict=False):
            label = np.where(earlier == digit, known, label)
        new = (label == 0) & (digit > 0) & (digit <= rank)
        fresh = fresh + new
        label = np.where(new, fresh, label)
        labels.append(np.where(digit == rank + 1, 2 * n + 1 + at % 2, label))
    code = np.zeros(shape[:-1], np.int64)
    for label in labels:
        code = code * (2 * n + 3) + label
    known_codes, order = _codes(n)
    place = np.minimum(np.searchsorted(known_codes, code), len(known_codes) - 1)
    numbers: IntArray = np.where(known_codes[place] == code, order[place], -1)
    return numbers


@lru_cache(maxsize=8)
def all_patterns(n: int) -> tuple[Pattern, ...]:
    """Every pattern of ``n`` mesh axes, dimensions numbered in order of first appearance."""

    def grow(prefix: tuple[int, ...], top: int) -> Iterator[tuple[int, ...]]:
        if len(prefix) == 2 * n:
            yield prefix
            return
        for digit in range(0 if len(prefix) % 2 else PARTIAL, top + 2):
            yield from grow((*prefix, digit), max(top, digit))

    return tuple(tuple(zip(digits[::2], digits[1::2], strict=True)) for digits in grow((), 0))


@lru_cache(maxsize=8)
def _codes(n: int) -> tuple[IntArray, IntArray]:
    """Codes of all patterns, sorted, and the index of each in ``all_patterns``."""
    digits = np.asarray(all_patterns(n), np.int64).reshape(-1, 2 * n)
    digits = np.where(digits == PARTIAL, 2 * n + 1, digits)
    codes = digits @ (2 * n + 3) ** np.arange(2 * n - 1, -1, -1)
    order = np.argsort(codes)
    return codes[order], order
