"""What XLA:TPU writes beside its products and tables: narrowed operands, rows in tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from costmodels import parse_cluster
from planner.graph.trace import trace
from planner.space.groups import build_groups
from planner.step.analysis import analyse
from planner.step.kernels.costs import MOST_SPREAD
from planner.step.memory.materialized import written
from planner.step.memory.tiles import copied, padding


def kept(function: Callable[..., Any], *args: Any) -> dict[str, list[tuple[bool, int]]]:
    """By kind of operation, whether its results are written, and in how many bytes."""
    traced = trace(function, args)
    groups = build_groups(traced.graph, traced.rules)
    found = written(traced.graph, groups.fusable, traced.graph.live_ops(), True)
    out: dict[str, list[tuple[bool, int]]] = {}
    for op in traced.graph.ops:
        value = op.outputs[0]
        out.setdefault(op.kind, []).append((found.kept[value], found.nbytes[value]))
    return out


@pytest.mark.parametrize(("dtype", "writes"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_what_two_products_read_is_narrowed_by_the_product_that_makes_its_source(
    dtype: Any, writes: bool
) -> None:
    """relu(h) of float32 h is written as bfloat16, though h is kept for the derivative: compiled,
    a graph network has both (libtpu 0.0.42). bfloat16 is not narrowed, and is computed again."""

    def step(x: jax.Array, w: jax.Array) -> Any:
        h = x @ w
        r = jnp.maximum(h, 0)
        return r @ w, r.T @ x, jnp.sum(h)

    square = jax.ShapeDtypeStruct((256, 256), dtype)
    found = kept(step, square, square)
    assert found["max"] == [(writes, 2 * 256 * 256)]
    assert found["dot_general"][0][0]


def test_a_mask_is_compared_again() -> None:
    """It has a byte per element and is not what a product takes in: compiled, it is not written."""

    def step(x: jax.Array, w: jax.Array, y: jax.Array) -> Any:
        h = x @ w
        return jnp.where(h > 0, y, 0.0) @ w, jnp.sum(h)

    square = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    assert kept(step, square, square, square)["gt"] == [(False, 256 * 256)]


def tiles(step: Callable[..., Any], rows: int, width: int, device: str) -> float:
    """Bytes that are moved for tiles of a table, per device that has all rows, over those of the
    tiles of ``rows``."""
    table = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    traced = trace(step, (table, jax.ShapeDtypeStruct((4096,), jnp.int32)))
    groups = build_groups(traced.graph, traced.rules)
    found = analyse(traced.graph, traced.rules, groups, (False,) * 2, parse_cluster(device).device)
    moved = [w for f in found.facts for w in f.work if w.kind == "vector" and w.kernels == 0.0]
    return round(sum(w.nbytes for w in moved) / (rows * 128 * 4), 2)


def added(rows: int, width: int, device: str = "v6e:2x2") -> float:
    return tiles(lambda t, ids: t.at[ids].add(1.0), rows, width, device)


def looked_up(rows: int, width: int, device: str = "v6e:2x2") -> float:
    return tiles(lambda t, ids: t[ids], rows, width, device)


def test_rows_of_few_numbers_are_added_up_in_tiles() -> None:
    """Compiled on v6e: 200,000 rows of 4 take 102 MB of tiles and 107 us to copy; 100,000 rows fit
    beside the core; of 300,000 rows the columns lie along lanes (libtpu 0.0.42)."""
    assert added(200_000, 4) == 2
    assert added(100_000, 4) == added(300_000, 4) == added(200_000, 129) == 0
    assert 300_000 * 512 > MOST_SPREAD > 200_000 * 512
    assert added(200_000, 4, "h100:8") == added(200_000, 4, "v4:2x2x1") == 0


def test_rows_of_few_numbers_are_looked_up_in_tiles() -> None:
    """Compiled on v6e: 262,144 rows of 16 are copied in 213 us (two times their 134 MB of tiles),
    65,536 in 19 us; of 1,048,576 rows nothing is, but of the share of a device (libtpu 0.0.42)."""
    assert looked_up(262_144, 16) == 2
    assert looked_up(65_536, 16) == 0.75
    assert looked_up(1_048_576, 16) == 0.5
    assert looked_up(262_144, 128) == looked_up(262_144, 16, "h100:8") == 0


SETS = ((4096, 20, 32), (4096, 32, 20), (4096, 20, 20))
WINDOWS = ((1024, 49, 32), (1024, 32, 49), (1024, 49, 49))
HEADS = ((64, 256, 64), (64, 64, 256), (64, 256, 256))


def product(shapes: Sequence[tuple[int, ...]], dtype: Any = jnp.bfloat16) -> Any:
    """A batched product, traced."""
    a, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes[:2])
    return trace(lambda x, y: x @ y, (a, b))


@pytest.mark.parametrize(
    ("shapes", "wasted"),
    [(SETS, (4.8, 4.8, 6.4)), (WINDOWS, (2.61, 2.61, 2.61)), (HEADS, ())],
    ids=["sets", "windows", "heads"],
)
def test_small_products_are_copied(
    shapes: Sequence[tuple[int, ...]], wasted: Sequence[float]
) -> None:
    """The batch of a product lies on no tile: 20 x 32 numbers take 24 x 128, as compiled (libtpu
    0.0.42)."""
    traced = product(shapes)
    groups = build_groups(traced.graph, traced.rules)
    op = next(o for o in traced.graph.ops if o.kind == "dot_general")
    entry = groups.op_layouts[op.index]
    assert entry is not None
    layouts = (*entry[1], *entry[2])
    found = list(copied(traced.graph, op, layouts, (8, 128)))
    assert [place for place, _, _ in found] == list(range(len(wasted)))
    assert [round(there / best, 2) for _, there, best in found] == list(wasted)
    assert not list(copied(traced.graph, op, layouts, (1, 1)))


@pytest.mark.parametrize(
    ("shapes", "passes"), [(SETS, 2), (WINDOWS, 1)], ids=["copied", "read where they are"]
)
def test_copies_of_small_products_take_memory_and_time(
    shapes: Sequence[tuple[int, ...]], passes: int
) -> None:
    """The copies lie beside what the product reads, while it runs; only large ones take time."""
    traced = product(shapes)
    groups = build_groups(traced.graph, traced.rules)
    device = parse_cluster("v5e:2x2").device
    found = analyse(traced.graph, traced.rules, groups, (False,) * 2, device)
    plain = [2.0 * math.prod(s) for s in shapes]
    ratios = [padding(s[1:], (8, 128)) / padding(s, (8, 128)) for s in shapes]
    best = [padding(s, (8, 128)) for s in shapes]
    (work,) = [w for f in found.facts for w in f.work if w.kind in ("matmul", "batched")]
    for (moved, _), n, r, b in zip(work.traffic, plain, ratios, best, strict=True):
        assert moved == pytest.approx(n * b * (r if passes == 1 else 2 * r + 1))
    op = next(o for o in traced.graph.ops if o.kind == "dot_general")
    at = [b for b in found.buffers if b.at(op.index) and b.end - b.start == 1]
    for value, n, r in zip((*op.inputs, *op.outputs), plain, ratios, strict=True):
        share = r - (value in op.outputs)
        assert any(x.value == value and x.nbytes == pytest.approx(n * share) for x in at)


def test_the_gradient_at_labels_takes_no_tiles() -> None:
    """A scatter of one number a row is compiled as a comparison."""

    def step(logits: jax.Array, labels: jax.Array) -> jax.Array:
        def picked(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.take_along_axis(x, labels[:, None], axis=1))

        return logits - jax.grad(picked)(logits)

    rows = 200_000
    args = (
        jax.ShapeDtypeStruct((rows, 10), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    traced = trace(step, args)
    groups = build_groups(traced.graph, traced.rules)
    device = parse_cluster("v6e:2x2").device
    found = analyse(traced.graph, traced.rules, groups, (False,) * 2, device)
    assert any(op.kind.startswith("scatter") for op in traced.graph.ops)
    assert all(w.nbytes < rows * 512 for f in found.facts for w in f.work)
