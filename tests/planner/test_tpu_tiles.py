"""What XLA:TPU writes beside its products and tables: narrowed operands, rows in tiles."""

from __future__ import annotations

from collections.abc import Callable
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


def spread(rows: int, width: int, device: str = "v6e:2x2") -> float:
    """Bytes that are moved for tiles of a table's gradient, per device that has all rows."""

    def step(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.grad(lambda t: jnp.sum(t[ids] ** 2))(table)

    table = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    traced = trace(step, (table, jax.ShapeDtypeStruct((4096,), jnp.int32)))
    groups = build_groups(traced.graph, traced.rules)
    found = analyse(traced.graph, traced.rules, groups, (False,) * 2, parse_cluster(device).device)
    tiles = 2.0 * rows * 128 * 4
    return sum(w.nbytes for f in found.facts for w in f.work if w.nbytes == tiles)


def test_rows_of_few_numbers_are_added_up_in_tiles() -> None:
    """Compiled on v6e: 200,000 rows of 4 take 102 MB of tiles and 107 us to copy; 100,000 rows fit
    beside the core; of 300,000 rows the columns lie along lanes (libtpu 0.0.42)."""
    assert spread(200_000, 4) == 2 * 200_000 * 128 * 4
    assert spread(100_000, 4) == spread(300_000, 4) == spread(200_000, 129) == 0
    assert 300_000 * 512 > MOST_SPREAD > 200_000 * 512
    assert spread(200_000, 4, "h100:8") == spread(200_000, 4, "v4:2x2x1") == 0


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
