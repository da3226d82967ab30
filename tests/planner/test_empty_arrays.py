"""Arrays without elements have nothing to shard, and take no sharding from their neighbors."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner import Plan, make_plan

X = jax.ShapeDtypeStruct((64, 128, 512), jnp.float32)
W = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in (("a", (512, 2048)), ("b", (2048, 512)))}


def chunked(h: jax.Array, chunk: int) -> jax.Array:
    """States handed on between chunks of the sequence, as in Mamba-2; none are with one chunk."""
    batch, length, width = h.shape
    parts = h.reshape(batch, length // chunk, chunk, width)
    states = jnp.cumsum(parts.sum(2), axis=1)
    first = jnp.zeros((batch, 1, width), h.dtype)
    before = jnp.concatenate([first, states[:, :-1]], axis=1)
    return (parts + before[:, :, None]).reshape(h.shape)


def concatenated(h: jax.Array) -> jax.Array:
    return jnp.concatenate([h[:, :0], h], axis=1)


def scanned(h: jax.Array) -> jax.Array:
    """An associative scan over one element slices arrays of none."""
    return jax.lax.associative_scan(jnp.add, h[:, None], axis=1)[:, 0]


def train(between: Any) -> Any:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((between(jnp.tanh(between(x) @ w["a"])) @ w["b"]) ** 2)

    def step(w: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    return step


def planned(between: Any) -> Plan:
    return make_plan(train(between), W, X, cluster="h100:8")


@pytest.mark.parametrize(
    "between", [lambda h: chunked(h, 128), concatenated, scanned], ids=["chunk", "concat", "scan"]
)
def test_nothing_is_replicated_for_them(between: Any) -> None:
    plan, bare = planned(between), planned(lambda h: h)
    assert not plan.fallbacks
    assert plan.prediction.communication_s <= 1.01 * bare.prediction.communication_s
    assert plan.prediction.compute_s <= 1.5 * bare.prediction.compute_s


def test_an_empty_argument_is_stored_whole_and_shards_nothing() -> None:
    none = jax.ShapeDtypeStruct((64, 0, 512), jnp.float32)
    plan = make_plan(
        lambda w, x, n: train(lambda h: h)(w, jnp.concatenate([n, x], axis=1)),
        W,
        X,
        none,
        cluster="h100:8",
    )
    assert not plan.inputs[-1].spec.axes and plan.inputs[-1].nbytes_per_device == 0
    assert plan.inputs[-2].spec.axes


@pytest.mark.parametrize("search", ["auto", "recursive_programming", "dynamic_programming"])
def test_a_scan_of_length_zero_has_finite_prices(search: str) -> None:
    def step(p: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            h, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["layers"])
            return jnp.mean((h @ p["out"]) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    shapes = {"layers": (0, 256, 256), "out": (256, 256)}
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = make_plan(step, params, x, cluster="h100:8", search=search)
    assert np.isfinite(plan.prediction.step_s) and plan.search.gap < 1e-6
