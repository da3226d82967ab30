"""Every element is on exactly one server, bytes are even, and any layout gives the tree back."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.parameter_server import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    layout_of,
)
from executor.parameter_server.placement.layout import layout_from
from planner.errors import RequestError

DTYPES = ("float32", "bfloat16", "int8", "float16")


@st.composite
def trees(draw: st.DrawFn) -> Any:
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    leaves = [
        np.asarray(jnp.asarray(rng.integers(-99, 99, size=shape), draw(st.sampled_from(DTYPES))))
        for shape in shapes
    ]
    return {"first": leaves[0], "rest": leaves[1:]}


@settings(deadline=None, max_examples=150)
@given(trees(), st.integers(1, 5), st.integers(1, 5), st.integers(1, 64), st.none() | st.just(3))
def test_any_layout_gives_the_tree_back(
    tree: Any, servers: int, others: int, split: int, parts: int | None
) -> None:
    partition = None if parts is None else FixedShardsPartitioner(parts)
    layout = layout_of(tree, servers, split_bytes=split, partition=partition)
    seen = [np.zeros(np.size(x), int) for x in jax.tree.leaves(tree)]
    for piece in layout.pieces:
        seen[piece.leaf][piece.begin : piece.end] += 1
        width = np.dtype(layout.dtypes[piece.leaf]).itemsize
        assert parts is not None or piece.size * width <= split or piece.size == 1
    assert all((x == 1).all() for x in seen)
    flats = layout.scatter(tree)
    held = [sum(x.nbytes for x in flat.values()) for flat in flats]
    assert tuple(held) == layout.bytes_of_server
    again = layout.gather(flats)
    moved = layout_of(tree, others, split_bytes=split)
    for found in (again, moved.gather(moved.scatter(again))):  # to another number of servers
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


def test_bytes_are_even() -> None:
    sizes = (5_000_000, 30, 700_000, 256, 1_000_000, 12)
    tree = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]
    held = layout_of(tree, 3, split_bytes=2**18).bytes_of_server
    assert sum(held) == 4 * sum(sizes) and max(held) - min(held) <= 2**18


def test_what_does_not_fit_is_named() -> None:
    layout = layout_of({"w": np.zeros((3, 4), np.float32)}, 2)
    with pytest.raises(RequestError, match=r"\['w'\]: got float32\[4, 3\], expected float32\[3, 4"):
        layout.scatter({"w": np.zeros((4, 3), np.float32)})
    for leaf, kind in ((1.0, "float"), (jax.ShapeDtypeStruct((3, 4), "float32"), "ShapeDtypeS")):
        text = rf"\['w'\]: got {kind}.*, expected float32\[3, 4\], an array"
        with pytest.raises(RequestError, match=text):
            layout.scatter({"w": leaf})
    with pytest.raises(RequestError, match="got a pytree of the form"):
        layout.scatter([np.zeros((3, 4), np.float32)])
    with pytest.raises(RequestError, match=r"\['a'\]: got str, expected an array"):
        layout_of({"a": "text"}, 1)
    with pytest.raises(RequestError, match="servers=0"):
        layout_of({}, 0)


class ByNumpy:
    """A user's own partitioner, whose numbers are NumPy's."""

    def pieces(self, elements: int, width: int) -> int:
        return np.int64(3)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("ours", "numpys", "options"),
    [
        (FixedShardsPartitioner(3), FixedShardsPartitioner(np.int64(3)), {}),  # type: ignore[arg-type]
        (MinSizePartitioner(40, 4), MinSizePartitioner(np.int8(40), np.uint8(4)), {}),  # type: ignore[arg-type]
        (MaxSizePartitioner(40, 9), MaxSizePartitioner(np.int8(40), np.int64(9)), {}),  # type: ignore[arg-type]
        (FixedShardsPartitioner(3), ByNumpy(), {}),
        (None, None, {"split_bytes": np.int64(40)}),
    ],
)
def test_numpys_numbers_are_as_good_as_pythons(ours: Any, numpys: Any, options: Any) -> None:
    tree = {"w": jax.ShapeDtypeStruct((30, 10), jnp.float32)}
    expected = layout_of(tree, 2, **{k: int(x) for k, x in options.items()}, partition=ours)
    found = layout_of(tree, np.int64(2), **options, partition=numpys)  # type: ignore[arg-type]
    assert found == expected and len(found.pieces) > 2
    assert layout_from(json.loads(json.dumps(found.about))).pieces == expected.pieces


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 5000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 9000), st.integers(1, 9))
def test_partitioners_keep_their_bounds(elements: int, width: int, bound: int, most: int) -> None:
    nbytes = elements * width

    def smallest(count: int) -> int:
        return elements // count * width

    def largest(count: int) -> int:
        return -(-elements // count) * width

    count = MinSizePartitioner(bound, most).pieces(elements, width)
    assert count == 1 or (smallest(count) >= bound and count <= most)
    if count < most and nbytes >= bound:  # not one more
        assert smallest(count + 1) < bound
    count = MaxSizePartitioner(bound).pieces(elements, width)
    assert largest(count) <= max(bound, width)
    assert count == 1 or largest(count - 1) > bound
    assert MaxSizePartitioner(bound, most).pieces(elements, width) == min(most, count)
    assert FixedShardsPartitioner(most).pieces(elements, width) == min(most, elements)


def test_a_layout_cuts_as_its_partitioner_says() -> None:
    tree = {"w": jax.ShapeDtypeStruct((3, 100), jnp.float32), "b": jax.ShapeDtypeStruct((), "int8")}
    layout = layout_of(tree, 2, partition=MinSizePartitioner(256, max_shards=4))
    assert sorted(p.size for p in layout.pieces) == [1, 75, 75, 75, 75]
    with pytest.raises(RequestError, match="MinSizePartitioner: got max_shards=0, expected a"):
        MinSizePartitioner(max_shards=0)
    with pytest.raises(RequestError, match="FixedShardsPartitioner: got num_shards=0"):
        FixedShardsPartitioner(0)
    with pytest.raises(RequestError, match="MaxSizePartitioner: got max_shard_bytes='9', expected"):
        MaxSizePartitioner("9")  # type: ignore[arg-type]
    for wrong in (4, FixedShardsPartitioner):
        with pytest.raises(RequestError, match=r"partition=.*expected a partitioner, such as Fix"):
            layout_of(tree, 2, partition=wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"split_bytes=2.5: expected whole numbers"):
        layout_of(tree, 2, split_bytes=2.5)  # type: ignore[arg-type]
