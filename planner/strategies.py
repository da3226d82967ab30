"""Group x mesh -> the legal strategies: which factor each mesh axis splits.

A strategy of a group is a row of an integer matrix [strategies, mesh axes]: the factor
that the axis splits, or -1 where every device along the axis does the same. Groups of
kind ``input`` have two matrices: how the value is stored between steps and how it is
handed to operations; the store may split axes that the use does not (an all-gather at
use, ZeRO-3 / FSDP), never the other way round.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

MAX_STRATEGIES = 260
"""Above this many, the factors of least size are no longer offered to the group."""


@dataclass(frozen=True, eq=False)
class StrategySet:
    """``use`` and ``store`` are [S, n] factor indices or -1; identical unless kind is input."""

    use: IntArray
    store: IntArray

    @property
    def count(self) -> int:
        """Number of strategies."""
        return int(self.use.shape[0])


def _divides(row: tuple[int, ...], factors: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
    for factor in set(row) - {-1}:
        parts = math.prod(n for f, n in zip(row, mesh, strict=True) if f == factor)
        if factors[factor] % parts:
            return False
    return True


@lru_cache(maxsize=4096)
def enumerate_strategies(
    sizes: tuple[int, ...], shardable: tuple[bool, ...], mesh: tuple[int, ...], kind: str
) -> StrategySet:
    """All strategies of a group with these factors; row 0 is always "replicated".

    Complexity: (factors + 1) ** axes, capped by ``MAX_STRATEGIES``.
    """
    usable = [f for f, ok in enumerate(shardable) if ok and any(sizes[f] % n == 0 for n in mesh)]
    usable.sort(key=lambda f: (-sizes[f], f))
    per_axis = 2 * len(usable) + 1 if kind == "input" else len(usable) + 1
    while usable and per_axis ** len(mesh) > MAX_STRATEGIES * 2:
        usable.pop()
        per_axis = 2 * len(usable) + 1 if kind == "input" else len(usable) + 1
    usable.sort()
    options = [(-1, -1)] + [(f, f) for f in usable]
    if kind == "input":
        options += [(f, -1) for f in usable]
    store, use = [], []
    for combo in itertools.product(options, repeat=len(mesh)):
        stored, used = tuple(c[0] for c in combo), tuple(c[1] for c in combo)
        if _divides(stored, sizes, mesh):
            store.append(stored)
            use.append(used)
    shape = (len(store), len(mesh))
    return StrategySet(
        np.asarray(use, np.int64).reshape(shape), np.asarray(store, np.int64).reshape(shape)
    )


def digits(
    assign: IntArray, layout: tuple[int, ...], partial: frozenset[int], rank: int
) -> IntArray:
    """Per strategy and axis, the digit of ``reshard.encode``: 0, dimension + 1, or rank + 1."""
    top = int(assign.max(initial=-1)) + 2
    top = max([top, *(f + 2 for f in layout), *(f + 2 for f in partial)])
    table = np.zeros(top, np.int64)
    for factor in partial:
        table[factor + 1] = rank + 1
    for dim, factor in enumerate(layout):
        if factor >= 0:
            table[factor + 1] = dim + 1
    found: IntArray = table[assign + 1]
    return found


def codes(
    assign: IntArray, layout: tuple[int, ...], partial: frozenset[int], rank: int
) -> IntArray:
    """Codes (see ``reshard``) of a value with ``layout`` under every strategy; shape [S]."""
    out = np.zeros(assign.shape[0], np.int64)
    for column in digits(assign, layout, partial, rank).T:
        out = out * (rank + 2) + column
    return out


def shards(assign: IntArray, factors: frozenset[int], mesh: tuple[int, ...]) -> NDArray[np.float64]:
    """Into how many pieces each strategy cuts work that spans ``factors``; shape [S]."""
    hit = np.isin(assign, list(factors)) if factors else np.zeros(assign.shape, bool)
    return np.prod(np.where(hit, np.asarray(mesh, np.float64), 1.0), axis=1)  # type: ignore[no-any-return]
