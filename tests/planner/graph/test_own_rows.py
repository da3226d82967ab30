"""Lookups of every row in itself become batching dimensions; values do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from planner import compat
from planner.graph.jaxpr.own_rows import with_own_rows
from planner.graph.trace import trace

N, T, C = 8, 6, 5


def rows(x: Any, y: Any) -> Any:
    return x[jnp.arange(N), y[:, 0]]


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], bool]] = {
    "rows": (rows, (N, C), True),
    "rows of matrices": (lambda x, y: x[jnp.arange(N), y[:, 0]], (N, C, 3), True),
    "two counts": (
        lambda x, y: x[jnp.arange(N)[:, None], jnp.arange(T)[None, :], y],
        (N, T, C),
        True,
    ),
    "another integer type": (
        lambda x, y: x[jnp.arange(N, dtype=jnp.int16), y[:, 0]],
        (N, C),
        True,
    ),
    "the second dimension": (lambda x, y: x[y[:, 0] % C, jnp.arange(N)], (C, N), True),
    "written": (lambda x, y: x.at[jnp.arange(N), y[:, 0]].set(7.0), (N, C), True),
    "added": (lambda x, y: x.at[jnp.arange(N), y[:, 0]].add(7.0), (N, C), True),
    "in a jitted function": (lambda x, y: jax.jit(rows)(x, y), (N, C), True),
    "recomputed": (lambda x, y: jax.checkpoint(rows)(x, y), (N, C), True),
    "in a loop": (
        lambda x, y: jax.lax.scan(lambda c, _: (c + rows(x, y), None), jnp.zeros(N), None, 3)[0],
        (N, C),
        True,
    ),
    "numbers of another package": (lambda x, y: x[np.arange(N), y[:, 0]], (N, C), True),
    "two indices": (lambda x, y: x[jnp.arange(N), y[:, 0], y[:, 1] % 3], (N, C, 3), True),
    "two indices, apart": (
        lambda x, y: x[y[:, 0] % C, jnp.arange(N), y[:, 1] % 3],
        (C, N, 3),
        True,
    ),
    "a warp": (
        lambda x, y: x[np.arange(N)[:, None], y % C, y % 3],
        (N, C, 3),
        True,
    ),
    "two written": (
        lambda x, y: x.at[jnp.arange(N), y[:, 0], y[:, 1] % 3].add(2.0),
        (N, C, 3),
        True,
    ),
    "numbers that wrap around": (
        lambda x, y: x[jax.lax.iota(jnp.int8, 200).astype(jnp.int32), y[0, 0]],
        (200, C),
        False,
    ),
    "some rows": (lambda x, y: x[jnp.arange(N // 2), y[: N // 2, 0]], (N, C), False),
    "from one on": (lambda x, y: x[jnp.arange(1, N + 1) % N, y[:, 0]], (N, C), False),
    "backward": (lambda x, y: x[jnp.arange(N)[::-1], y[:, 0]], (N, C), False),
    "the diagonal": (lambda x, y: x[jnp.arange(N), jnp.arange(N)], (N, N), True),
}


def kinds(jaxpr: Any) -> list[bool]:
    """Of all lookups, whether they have batching dimensions."""
    found = []
    for eqn in compat.body(jaxpr).eqns:
        if "dimension_numbers" in eqn.params and eqn.primitive.name != "dot_general":
            found.append(bool(eqn.params["dimension_numbers"].operand_batching_dims))
        for value in eqn.params.values():
            if hasattr(compat.body(value), "eqns"):
                found += kinds(value)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_same(name: str) -> None:
    function, shape, changes = CASES[name]
    draw = np.random.default_rng(1)
    x = jnp.asarray(draw.normal(size=shape), jnp.float32)
    y = jnp.asarray(draw.integers(0, C, (N, T)), jnp.int32)

    def both(x: Any, y: Any) -> Any:
        return function(x, y), jax.grad(lambda x: jnp.sum(jnp.sin(function(x, y))))(x)

    jaxpr, shapes = compat.make_jaxpr(both, (x, y))
    made = with_own_rows(jaxpr)
    assert (made is not jaxpr) is changes
    if changes and name not in ("in a jitted function", "in a loop"):
        assert all(kinds(made)) and len(kinds(made)) >= 2
    expected = both(x, y)
    found = jax.tree.unflatten(
        jax.tree.structure(shapes), compat.evaluate_body(made, jax.tree.leaves((x, y)))
    )
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_gradient_of_a_jitted_function_is_seen_through() -> None:
    function, shape, _ = CASES["in a jitted function"]
    args = (jnp.ones(shape), jnp.ones((N, T), jnp.int32))
    traced = trace(lambda x, y: jax.grad(lambda x: jnp.sum(jnp.sin(function(x, y))))(x), args)
    assert kinds(traced.jaxpr) == [True, True]


def step(params: Any, x: Any, y: Any) -> Any:
    def loss(p: Any) -> Any:
        chosen = jax.nn.log_softmax(jnp.tanh(x @ p["a"]) @ p["b"])
        return -chosen[jnp.arange(x.shape[0]), y].mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def test_data_parallelism_reduces_no_logits() -> None:
    params = {
        "a": jax.ShapeDtypeStruct((64, 128), jnp.float32),
        "b": jax.ShapeDtypeStruct((128, 4096), jnp.float32),
    }
    batch = (
        jax.ShapeDtypeStruct((8192, 64), jnp.float32),
        jax.ShapeDtypeStruct((8192,), jnp.int32),
    )
    plan = mw.make_plan(step, params, *batch, cluster="h100:8", mode="dp")
    logits = 8192 * 4096 * 4
    assert plan.collectives and max(c.payload_bytes for c in plan.collectives) < logits / 8


@pytest.mark.long
@pytest.mark.devices
@pytest.mark.parametrize("options", [{"mesh": "data=8"}, {"microbatches": 4}, {"mode": "fsdp"}])
def test_such_a_step_runs(options: dict[str, Any]) -> None:
    draw = np.random.default_rng(2)
    params = {
        "a": jnp.asarray(draw.normal(size=(16, 32)), jnp.float32),
        "b": jnp.asarray(draw.normal(size=(32, 8)), jnp.float32),
    }
    x = jnp.asarray(draw.normal(size=(64, 16)), jnp.float32)
    y = jnp.asarray(draw.integers(0, 8, 64), jnp.int32)
    expected = step(params, x, y)
    found = mw.parallelize(step, **options)(params, x, y)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_an_operation_without_results_may_read_such_numbers() -> None:
    def printed(w: jax.Array, x: jax.Array) -> jax.Array:
        rows = jnp.arange(x.shape[0])
        jax.debug.print("rows {}", rows)
        return w - 0.1 * x.T @ (rows[:, None] * (x @ w))

    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((128, 64), jnp.float32)
    assert mw.make_plan(printed, *args, cluster="h100:8").fallbacks
