"""What a ``shard_map`` region does inside: products of groups of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from planner import make_plan
from planner.rules.kernels.inside import MASKED, MASKED_GRADIENT, held_inside, inside


def struct(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize(("rows", "width"), [(1024, 512), (8192, 512), (1024, 4096)])
def test_each_row_of_a_ragged_product_meets_one_group(rows: int, width: int) -> None:
    groups, made = 8, 256

    def both(x: jax.Array, w: jax.Array, s: jax.Array, c: jax.Array) -> object:
        y, back = jax.vjp(lambda w: jax.lax.ragged_dot(x, w, s), w)
        return y, back(c)[0]

    args = struct(rows, width), struct(groups, width, made), struct(groups, dtype="int32")
    jaxpr = jax.make_jaxpr(both)(*args, struct(rows, made))
    work, _ = inside(jaxpr, {"data": 8})
    found = {kind: (flops, moved) for kind, flops, moved in work}
    once = 2.0 * rows * width * made
    assert found["matmul"][0] == 2 * once  # the product, and the gradient of its matrices
    copied = groups * 2 * rows * width, groups * 2 * rows * (width + made)  # bytes
    assert found[MASKED] == ((groups - 1) * once, 2 * copied[0])
    assert found[MASKED_GRADIENT] == ((groups - 1) * once, 2 * copied[1])
    assert held_inside(jaxpr, masked=True) - held_inside(jaxpr) == copied[1]


def test_a_region_with_ragged_products_is_priced_as_compilers_run_it() -> None:
    axes = (AxisType.Auto,)
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=axes)
    region = jax.shard_map(
        jax.lax.ragged_dot,
        mesh=mesh,
        in_specs=(P("fsdp"), P(), P()),
        out_specs=P("fsdp"),
        check_vma=False,
    )
    groups, rows, width = 16, 8 * 4096, 1024

    def step(w: jax.Array, x: jax.Array, s: jax.Array) -> object:
        grad = jax.grad(lambda w: region(x, w, s).astype(jnp.float32).sum())(w)
        return w - grad, s

    args = struct(groups, width, width), struct(rows, width), struct(groups, dtype="int32")
    plans = {c: make_plan(step, *args, cluster=c, mesh="fsdp=8") for c in ("h100:8", "v5p:2x2x2")}
    told = {
        c: [n for n in p.notes if "all rows by the matrices of all groups" in n]
        for c, p in plans.items()
    }
    assert "there 16 times the flop" in told["h100:8"][0]
    assert told["v5p:2x2x2"][0].startswith("gradients of ragged_dot in shard_map")
    copies = groups * 2 * (rows // 8) * 2 * width  # of rows and cotangents
    assert plans["h100:8"].prediction.peak_bytes > copies > plans["v5p:2x2x2"].prediction.peak_bytes
