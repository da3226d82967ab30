"""What a step computes twice is computed, and resharded, once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import parallelize
from planner.graph.trace import trace

pytestmark = pytest.mark.devices


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
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
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
