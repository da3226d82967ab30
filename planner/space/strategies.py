"""The legal strategies of a group on a mesh: the factor that each mesh axis splits.

A strategy of a group is a row of an integer matrix [strategies, mesh axes]: the factor
that the axis splits, or -1 if all devices along the axis do the same. Groups of kind
``input`` have two matrices: the sharding of the value between steps (store), and the one
in which operations read it (use). An axis may split the store but not the use (an
all-gather at use, ZeRO-3 / FSDP), never the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.space.groups import Group

IntArray = NDArray[np.int64]

Decisions = tuple[tuple[str, int], ...]
"""Decisions of a group other than its sharding: name and number of options of each."""

MAX_STRATEGIES = 260
"""The smallest factors of a group are dropped while it has more than twice this many options."""


@dataclass(frozen=True, eq=False)
class StrategySet:
    """``use`` and ``store`` are [S, n] factor indices or -1; identical unless kind is input.

    ``options`` [S, D]: the option that each strategy takes of each of the other ``decisions``.
    """

    use: IntArray
    store: IntArray
    options: IntArray
    decisions: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of strategies."""
        return int(self.use.shape[0])

    def take(self, rows: NDArray[np.bool_] | slice) -> StrategySet:
        """The strategies of some rows."""
        return StrategySet(self.use[rows], self.store[rows], self.options[rows], self.decisions)

    def option(self, decision: str) -> IntArray:
        """[S] the option that each strategy takes; the first if the group has no such decision."""
        if decision not in self.decisions:
            return np.zeros(self.count, np.int64)
        column: IntArray = self.options[:, self.decisions.index(decision)]
        return column

    def times(self, decision: str, count: int) -> StrategySet:
        """Combine every strategy with ``count`` options of a decision, the first option first."""
        use, store, options = (
            np.concatenate([x] * count) for x in (self.use, self.store, self.options)
        )
        choices = np.repeat(np.arange(count), self.count)
        options = np.concatenate([options, choices[:, None]], axis=1)
        return StrategySet(use, store, options, (*self.decisions, decision))


def usable_factors(
    sizes: tuple[int, ...], shardable: tuple[bool, ...], mesh: tuple[int, ...], kind: str
) -> tuple[int, ...]:
    """The factors that strategies may split, without the smallest if there would be too many
    strategies. Mesh axes of one device split nothing."""
    axes = [n for n in mesh if n > 1]
    usable = [f for f, ok in enumerate(shardable) if ok and any(sizes[f] % n == 0 for n in axes)]
    usable.sort(key=lambda f: (-sizes[f], f))
    while usable and len(_options(usable, kind)[0]) ** len(axes) > MAX_STRATEGIES * 2:
        usable.pop()
    return tuple(sorted(usable))


def _options(usable: Sequence[int], kind: str) -> tuple[IntArray, IntArray]:
    """The options of one mesh axis: the factor that it splits in the store, and in use."""
    store, use = [-1, *usable], [-1, *usable]
    if kind == "input":
        store, use = [*store, *usable], [*use, *[-1] * len(usable)]
    return np.asarray(store, np.int64), np.asarray(use, np.int64)


def _combined(usable: Sequence[int], split: Sequence[bool], kind: str) -> StrategySet:
    """All combinations of the options of the mesh axes; ``split``: per axis, whether it may split
    something. Row 0 is "replicated"."""
    store, use = _options(usable, kind)
    rows = np.indices([len(store) if ok else 1 for ok in split]).reshape(len(split), -1).T
    return StrategySet(use[rows], store[rows], np.zeros((len(rows), 0), np.int64))


def _dividing(store: IntArray, sizes: tuple[int, ...], meshes: IntArray) -> NDArray[np.bool_]:
    """[meshes, strategies] whether the axes' sizes divide the factors they split; meshes [M, n]."""
    good = np.ones((len(meshes), len(store)), bool)
    for f in np.unique(store[store >= 0]):
        parts = np.ones(good.shape, np.int64)
        for k in range(store.shape[1]):
            parts *= np.where(store[:, k] == f, meshes[:, k, None], 1)
        good &= sizes[f] % parts == 0
    return good


@lru_cache(maxsize=4096)
def enumerate_strategies(
    sizes: tuple[int, ...],
    shardable: tuple[bool, ...],
    mesh: tuple[int, ...],
    kind: str,
    decisions: Decisions = (),
) -> StrategySet:
    """All strategies of a group with these factors; row 0 is always "replicated".

    ``decisions``: name and number of options of the group's other decisions.

    Complexity: (factors + 1) ** axes, capped by ``MAX_STRATEGIES``.
    """
    if decisions:
        *others, (name, count) = decisions
        return enumerate_strategies(sizes, shardable, mesh, kind, tuple(others)).times(name, count)
    usable = usable_factors(sizes, shardable, mesh, kind)
    strategies = _combined(usable, [n > 1 for n in mesh], kind)
    good = _dividing(strategies.store, sizes, np.asarray([mesh], np.int64))[0]
    return strategies.take(good)


def strategies_of(group: Group, mesh: tuple[int, ...]) -> StrategySet:
    """All strategies of a group on a mesh of these sizes."""
    return enumerate_strategies(group.sizes, group.shardable, mesh, group.kind, group.decisions)


def joint_strategies(
    sizes: tuple[int, ...],
    shardable: tuple[bool, ...],
    meshes: Sequence[tuple[int, ...]],
    kind: str,
    decisions: Decisions = (),
) -> tuple[StrategySet, NDArray[np.bool_]]:
    """The strategies that at least one of several meshes (with equal numbers of axes) has.

    Returns:
        The strategies, "replicated" first, and [meshes, strategies] whether a mesh has a strategy.
        Each mesh has those of ``enumerate_strategies``, in the same order.
    """
    if decisions:
        *others, (name, count) = decisions
        strategies, has = joint_strategies(sizes, shardable, meshes, kind, tuple(others))
        return strategies.times(name, count), np.concatenate([has] * count, axis=1)
    usable = [usable_factors(sizes, shardable, mesh, kind) for mesh in meshes]
    split = [tuple(n > 1 for n in mesh) for mesh in meshes]
    sets = [_combined(*one, kind) for one in dict.fromkeys(zip(usable, split, strict=True))]
    count = len(sizes)
    # in the order of _options: not split, split in store and use, split only in the store
    rows = [np.where(s.use == s.store, s.store, s.store + count) for s in sets]
    option = np.unique(np.concatenate(rows), axis=0)
    store = np.where(option >= count, option - count, option)
    use = np.where(option >= count, -1, option)
    good = _dividing(store, sizes, np.asarray(meshes, np.int64))
    good &= ~((store >= 0)[None] & ~np.asarray(split)[:, None]).any(axis=2)
    for f in range(len(sizes)):
        lacking = np.array([f not in one for one in usable])
        if lacking.any():
            good &= ~(lacking[:, None] & (store == f).any(axis=1))
    return StrategySet(use, store, np.zeros((len(use), 0), np.int64)), good


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
    axis_digits: IntArray = table[assign + 1]
    return axis_digits


def codes(
    assign: IntArray, layout: tuple[int, ...], partial: frozenset[int], rank: int
) -> IntArray:
    """Codes (see ``reshard``) of a value with ``layout`` under every strategy; shape [S]."""
    out = np.zeros(assign.shape[0], np.int64)
    for column in digits(assign, layout, partial, rank).T:
        out = out * (rank + 2) + column
    return out
