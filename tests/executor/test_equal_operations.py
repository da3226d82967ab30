"""What a step computes twice is computed, and resharded, once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import parallelize
from planner.graph.trace import trace

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("optimized")]


def twice(a: jax.Array, b: jax.Array, v: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = jnp.tanh(a), jnp.tanh(b)
    return jnp.concatenate([a, b], 1) @ v, jnp.concatenate([a, b], 1) @ w


def arguments() -> list[jax.Array]:
    shapes = ((64, 32), (64, 32), (64, 48), (64, 48))
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=s), jnp.float32) for s in shapes]


def test_the_compiled_step_concatenates_once() -> None:
    args = arguments()
    run = parallelize(twice, mesh="data=8")
    for got, want in zip(run(*args), twice(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    traced = jax.make_jaxpr(twice)(*args)
    assert (
        str(traced).count("concatenate")
        == 2
        == len([op for op in trace(twice, tuple(args)).graph.ops if op.kind == "concatenate"])
    )
    lowered = str(run.lower(*args).as_text())
    assert lowered.count("stablehlo.concatenate") == 1


def test_other_parameters_are_other_operations() -> None:
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return x[:4] * 2.0, x[4:8] * 2.0, x[:4] * 3.0

    x = jnp.arange(64.0).reshape(8, 8)
    for got, want in zip(parallelize(both, mesh="data=8")(x), both(x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_bodies_do_not_read_what_is_computed_outside() -> None:
    """The same array of zeros is made outside of a loop, in it, and in a recomputed block."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        @jax.checkpoint
        def block(h: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.maximum(jnp.tanh(h @ w), jnp.zeros((64, 8)))

        def loss(w: jax.Array) -> jax.Array:
            start = x + jnp.zeros((64, 8))
            last = jax.lax.scan(
                lambda h, _: (block(h, w) + jnp.zeros((64, 8)), None), start, length=3
            )
            return jnp.mean(block(last[0], w) ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return w - grads, value

    draw = np.random.default_rng(0)
    w, x = (jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((8, 8), (64, 8)))
    for got, want in zip(parallelize(step, mesh="data=8")(w, x), step(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
