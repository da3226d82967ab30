"""Strategies: every row is legal, row 0 is replicated, stores relate to uses."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.reshard import encode
from planner.space.strategies import (
    MAX_STRATEGIES,
    codes,
    digits,
    enumerate_strategies,
    joint_strategies,
)
from planner.spec import enumerate_meshes

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 96]
MESHES = [m.sizes for n in (2, 4, 6, 7, 8, 12) for m in enumerate_meshes(n)]


def rows(table: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(map(int, row)) for row in table]


def legal(row: tuple[int, ...], sizes: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
    return all(
        sizes[f] % math.prod(n for g, n in zip(row, mesh, strict=True) if g == f) == 0
        for f in set(row) - {-1}
    )


@st.composite
def cases(draw: st.DrawFn):  # type: ignore[no-untyped-def]
    sizes = tuple(draw(st.lists(st.sampled_from(SIZES), max_size=5)))
    shardable = tuple(draw(st.booleans()) for _ in sizes)
    kind = draw(st.sampled_from(["fused", "anchor", "input", "copy"]))
    return sizes, shardable, draw(st.sampled_from(MESHES)), kind


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_row_is_legal(case) -> None:  # type: ignore[no-untyped-def]
    sizes, shardable, mesh, kind = case
    found = enumerate_strategies(sizes, shardable, mesh, kind)
    assert found.use.shape == found.store.shape == (found.count, len(mesh))
    assert rows(found.use)[0] == rows(found.store)[0] == (-1,) * len(mesh)
    pairs = list(zip(rows(found.use), rows(found.store), strict=True))
    assert len(set(pairs)) == len(pairs)
    for use, store in pairs:
        assert legal(use, sizes, mesh) and legal(store, sizes, mesh)
        assert all(shardable[f] for f in set(store) - {-1})
        # the use never splits what the store does not
        assert all(u in (-1, s) for u, s in zip(use, store, strict=True))
    if kind != "input":
        assert np.array_equal(found.use, found.store)


@pytest.mark.parametrize("mesh", [m.sizes for n in (6, 12) for m in enumerate_meshes(n)])
def test_nothing_legal_is_left_out(mesh: tuple[int, ...]) -> None:
    sizes = (12, 8, 5)
    found = set(rows(enumerate_strategies(sizes, (True,) * 3, mesh, "fused").use))
    every = itertools.product((-1, 0, 1, 2), repeat=len(mesh))
    assert found == {row for row in every if legal(row, sizes, mesh)}


def test_six_and_twelve_devices() -> None:
    three = enumerate_strategies((9,), (True,), (3, 2), "fused")
    assert rows(three.use) == [(-1, -1), (0, -1)]  # 9 = 3 x 3, never halves
    both = enumerate_strategies((6,), (True,), (3, 2), "fused")
    assert rows(both.use) == [(-1, -1), (-1, 0), (0, -1), (0, 0)]
    four = enumerate_strategies((18,), (True,), (2, 3, 2), "anchor")
    assert (0, -1, 0) not in rows(four.use)  # 4 does not divide 18
    assert (0, 0, -1) in rows(four.use) and (-1, 0, 0) in rows(four.use)


def test_inputs_may_be_stored_finer_than_used() -> None:
    found = enumerate_strategies((8, 4), (True, True), (2,), "input")
    pairs = set(zip(rows(found.store), rows(found.use), strict=True))
    assert pairs == {
        ((-1,), (-1,)),
        ((0,), (0,)),
        ((1,), (1,)),
        ((0,), (-1,)),
        ((1,), (-1,)),
    }


def test_blocked_factors_are_never_split() -> None:
    found = enumerate_strategies((8, 8), (False, True), (2, 2), "fused")
    assert 0 not in found.use


def test_many_factors_are_capped_and_the_largest_stay() -> None:
    sizes = (4, 64, 8, 32, 16, 128, 256, 12, 20, 24)
    found = enumerate_strategies(sizes, (True,) * len(sizes), (2, 2, 2), "input")
    assert 1 < found.count <= 2 * MAX_STRATEGIES
    assert {5, 6} <= set(found.store.ravel().tolist())
    assert 0 not in found.store


@settings(max_examples=100, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_codes_are_encoded_digits(case, random) -> None:  # type: ignore[no-untyped-def]
    sizes, shardable, mesh, kind = case
    found = enumerate_strategies(sizes, shardable, mesh, kind)
    factors = list(range(len(sizes)))
    random.shuffle(factors)
    layout = tuple(factors[: random.randint(0, len(factors))][:3])
    partial = frozenset(factors[len(layout) :][:1])
    rank = len(layout)
    got = digits(found.use, layout, partial, rank)
    expected = [
        [layout.index(f) + 1 if f in layout else rank + 1 if f in partial else 0 for f in row]
        for row in rows(found.use)
    ]
    assert got.tolist() == expected
    assert codes(found.use, layout, partial, rank).tolist() == [
        encode(row, rank) for row in expected
    ]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_joint_strategies_are_those_of_every_mesh(case) -> None:  # type: ignore[no-untyped-def]
    sizes, shardable, mesh, kind = case
    meshes = [m for m in MESHES if len(m) == len(mesh)]
    joint, has = joint_strategies(sizes, shardable, meshes, kind)
    assert rows(joint.store)[0] == rows(joint.use)[0] == (-1,) * len(mesh)
    for k, one in enumerate(meshes):
        found = enumerate_strategies(sizes, shardable, one, kind)
        assert rows(joint.use[has[k]]) == rows(found.use)
        assert rows(joint.store[has[k]]) == rows(found.store)
