"""Dead-end elimination: drops strategies that another one beats whatever the neighbors choose.

Goldstein's criterion: strategy s of a node falls to strategy t if

    c[t] - c[s] + sum over neighbors of max_u (E[t, u] - E[s, u]) <= 0,

and, where memory matters, t uses no more bytes than s in every usage.  For each fallen strategy a
surviving one is at least as good, so one optimum stays.

Complexity: O(T * S * sum of neighbor sizes) for S strategies and T candidates t.
Paper: Goldstein, "Efficient rotamer elimination applied to protein side-chains and related spin
glasses", Biophysical Journal 66, 1994.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.search.problem import Array

_WORK = 600_000
"""Maximum table entries per node; bounds how many candidates t are tried."""


def beaten(
    unary: Array, tables: Sequence[Array], repeats: Sequence[int], rows: Sequence[Array]
) -> Array:
    """The strategies of one node that can be dropped.

    Args:
        unary: [S] own costs, finite.
        tables: [S, S_j] distinct edge tables to the neighbors; every row has a finite entry.
        repeats: how many neighbors have each table.
        rows: [S] bytes of each usage that must not grow; empty if memory does not matter.

    Returns:
        [S] mask of the strategies that fall; never all of them.
    """
    size = unary.size
    width = sum(table.shape[1] for table in tables) + 1
    tries = min(size, max(4, _WORK // (size * width)))
    candidates = np.argsort(_typical(unary, tables, repeats), kind="stable")[:tries]
    worse = unary[candidates][:, None] - unary[None, :]
    for table, repeat in zip(tables, repeats, strict=True):
        worse = worse + repeat * _largest_rise(table, candidates)
    good = worse <= 0.0
    for row in rows:
        good &= row[candidates][:, None] <= row[None, :]
    lost = np.zeros(size, dtype=bool)
    for position, winner in enumerate(candidates):
        if not lost[winner]:
            falls = good[position].copy()
            falls[winner] = False
            lost |= falls
    return lost


def _typical(unary: Array, tables: Sequence[Array], repeats: Sequence[int]) -> Array:
    """[S] cost of each strategy at the neighbors' average; a forbidden pair costs twice the top."""
    total = unary.copy()
    for table, repeat in zip(tables, repeats, strict=True):
        finite = np.isfinite(table)
        if finite.all():
            total += repeat * table.mean(axis=1)
        else:
            top = float(table[finite].max()) if finite.any() else 0.0
            total += repeat * np.where(finite, table, 2.0 * abs(top)).mean(axis=1)
    return total


def _largest_rise(table: Array, candidates: Array) -> Array:
    """[T, S] max over u of E[t, u] - E[s, u]; a pair that s forbids does not count."""
    left, right = table[candidates][:, None, :], table[None, :, :]
    if np.isfinite(table).all():
        rise: Array = (left - right).max(axis=2)
        return rise
    with np.errstate(invalid="ignore"):
        rise = np.where(np.isinf(right), -np.inf, left - right).max(axis=2)
    return rise
