"""Microbatches of steps that flatten or repeat examples: several rows of an array for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.microbatch.errors import NotExactError
from planner.microbatch.rewrite import microbatched

EXAMPLES, TOKENS, WIDTH = 16, 3, 4
Loss = Callable[[Any, Any, Any], Any]


def dropout_of_tokens(w: Any, x: Any, key: Any) -> Any:
    h = x.reshape(-1, WIDTH)
    return jnp.mean((h * jax.random.bernoulli(key, 0.5, h.shape) @ w) ** 2)


def positions_of_tokens(w: Any, x: Any, key: Any) -> Any:
    h = x.reshape(-1, WIDTH)
    return jnp.mean((h * jnp.cos(1.0 * jnp.arange(h.shape[0]))[:, None] @ w) ** 2)


def two_samples_each(w: Any, x: Any, key: Any) -> Any:
    h = jnp.repeat(x[:, 0], 2, 0)
    return jnp.mean((jnp.tanh(h + jax.random.normal(key, h.shape)) @ w) ** 2)


def drawn_flat(w: Any, x: Any, key: Any) -> Any:
    h = x @ w
    return jnp.mean((h * jax.random.normal(key, (h.size,)).reshape(h.shape)) ** 2)


def labels_of_tokens(w: Any, x: Any, key: Any) -> Any:
    h = (x @ w).reshape(-1, 2)
    return jnp.mean(h[:, 0] * jax.random.categorical(key, jax.lax.stop_gradient(h)))


def drawn_in_a_loop(w: Any, x: Any, key: Any) -> Any:
    def body(c: Any, k: Any) -> tuple[Any, None]:
        h = c.reshape(-1, WIDTH)
        return (h * jax.random.bernoulli(k, 0.9, h.shape)).reshape(c.shape), None

    c, _ = jax.lax.scan(body, x, jax.random.split(key, 3))
    return jnp.mean((c @ w) ** 2)


def in_another_order(w: Any, x: Any, key: Any) -> Any:
    h = jnp.tile(x[:, 0], (2, 1))
    return jnp.mean((jnp.tanh(h + jax.random.normal(key, h.shape)) @ w) ** 2)


def step_of(loss: Loss) -> Callable[[Any, Any, Any], Any]:
    def step(w: Any, x: Any, key: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x, key)
        return w - 0.1 * gradient, value

    return step


def arguments() -> tuple[Any, Any, Any]:
    x = np.random.default_rng(0).normal(size=(EXAMPLES, TOKENS, WIDTH)).astype(np.float32)
    return jnp.full((WIDTH, 2), 0.3), jnp.asarray(x), jax.random.key(1)


@pytest.mark.long
@pytest.mark.parametrize(("parts", "replicas"), [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    "loss",
    [
        dropout_of_tokens,
        positions_of_tokens,
        two_samples_each,
        drawn_flat,
        labels_of_tokens,
        drawn_in_a_loop,
    ],
)
def test_rows_of_an_example_stay_together(loss: Loss, parts: int, replicas: int) -> None:
    step, args = step_of(loss), arguments()
    cut = microbatched(step, args, parts, replicas=replicas)
    for got, expected in zip(cut(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_rows_in_another_order_are_refused() -> None:
    with pytest.raises(NotExactError, match="mixes examples"):
        microbatched(step_of(in_another_order), arguments(), 2)


@pytest.mark.long
@pytest.mark.parametrize("rows", [EXAMPLES // 2, EXAMPLES * 3 // 2])
def test_draws_that_belong_to_no_example_are_dealt_out(rows: int) -> None:
    """Beside statistics of a microbatch; of the whole batch, they are refused."""

    def spread(w: Any, x: Any) -> Any:
        return jnp.mean(((y := x @ w) - y.mean(0)) ** 2)

    def loss(w: Any, x: Any, key: Any) -> Any:
        drawn = jax.random.normal(key, (rows * x.shape[0] // EXAMPLES,))
        return spread(w, x) + jnp.mean(jnp.tanh(drawn * w[0, 0]))

    step, (w, x, key) = step_of(loss), arguments()
    cut = microbatched(step, (w, x, key), 2, statistics="per-microbatch")
    drawn = jax.random.normal(key, (rows,))

    def part(w: Any, k: int) -> Any:
        return spread(w, x[k::2]) + jnp.mean(jnp.tanh(drawn[k::2] * w[0, 0]))

    value, gradient = jax.value_and_grad(lambda w: (part(w, 0) + part(w, 1)) / 2)(w)
    got = cut(w, x, key)
    np.testing.assert_allclose(got[0], w - 0.1 * gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], value, rtol=1e-5)
    with pytest.raises(NotExactError):
        microbatched(step, (w, x, key), 2)
