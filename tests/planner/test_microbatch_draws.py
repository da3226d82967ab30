"""Random numbers for the batch inside loops and recomputed blocks, in microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from planner.microbatch.rewrite import microbatched

LAYERS, WIDTH, N = 4, 16, 32


def dropped(h: Any, w: Any, key: Any) -> Any:
    return jnp.tanh(h @ w) * jax.random.bernoulli(key, 0.9, h.shape)


def scanned(w: Any, keys: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, wk: (dropped(h, *wk), None), x, (w, keys))[0]


def recomputed(w: Any, keys: Any, x: Any) -> Any:
    for k in range(LAYERS):
        x = jax.checkpoint(dropped)(x, w[k], keys[k])
    return x


def both(w: Any, keys: Any, x: Any) -> Any:
    block = jax.checkpoint(lambda h, wk: (dropped(h, *wk), None))
    return jax.lax.scan(block, x, (w, keys))[0]


def numbered(w: Any, keys: Any, x: Any) -> Any:
    """What is made of the examples' numbers alone is made for the whole batch, too."""

    def block(h: Any, wk: Any) -> Any:
        noise = jax.random.normal(wk[1], h.shape[:1]) + jnp.arange(h.shape[0])
        return jnp.tanh(h @ wk[0]) + noise[:, None] / N, None

    return jax.lax.scan(block, x, (w, keys))[0]


def nested(w: Any, keys: Any, x: Any) -> Any:
    def pair(h: Any, wk: Any) -> Any:
        inner = jax.lax.scan(lambda h, wk: (dropped(h, *wk), None), h, wk)[0]
        return inner, None

    two = jax.tree.map(lambda a: a.reshape(2, LAYERS // 2, *a.shape[1:]), (w, keys))
    return jax.lax.scan(pair, x, two)[0]


def jitted(w: Any, keys: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, wk: (jax.jit(dropped)(h, *wk), None), x, (w, keys))[0]


MODELS = (scanned, recomputed, both, numbered, nested, jitted)


def step_of(model: Callable[..., Any]) -> Callable[..., Any]:
    def step(state: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(model(w, jax.random.split(state["key"], LAYERS), x) ** 2)

        value, grad = jax.value_and_grad(loss)(state["w"])
        key = jax.random.split(state["key"])[0]
        return {"w": state["w"] - 0.1 * grad, "key": key}, value

    return step


def arguments(raw: bool) -> Any:
    key = jax.random.PRNGKey(3) if raw else jax.random.key(3)
    w = 0.3 * jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH))
    return {"w": w, "key": key}, jax.random.normal(jax.random.key(2), (N, WIDTH))


def same(a: Any, b: Any) -> None:
    for x, y in zip(
        jax.tree.leaves((a[0]["w"], a[1])), jax.tree.leaves((b[0]["w"], b[1])), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("raw", [False, True], ids=["key", "raw key"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
@pytest.mark.parametrize(("parts", "replicas"), [(2, 1), (4, 2), (16, 1)])
def test_they_are_those_of_the_whole_batch(
    model: Callable[..., Any], parts: int, replicas: int, raw: bool
) -> None:
    step, args = step_of(model), arguments(raw)
    made = microbatched(step, args, parts, replicas=replicas)
    same(jax.jit(made)(*args), jax.jit(step)(*args))


@pytest.mark.long
@pytest.mark.devices
@pytest.mark.parametrize("model", [scanned, both], ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 4, "mesh": "data=8"},
        {"microbatches": 2, "remat": "full"},
        {"microbatches": 4, "stages": 2},
        {"microbatches": 4, "stages": 2, "schedule": "1f1b"},
    ],
    ids=str,
)
def test_such_steps_run(model: Callable[..., Any], options: dict[str, Any]) -> None:
    step, args = step_of(model), arguments(raw=False)
    same(mw.parallelize(step, **options)(*args), jax.jit(step)(*args))
