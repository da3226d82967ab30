"""Random layers, repeated or scanned, under every policy: equal to the step as it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from planner.graph.trace import trace
from planner.recipes import Recipe, rewritten
from planner.remat.rewrite import rematerialized
from tests.executor.random_jaxprs import Arrays, instructions, outcomes_of, run
from tests.zoo.running import difference

ROWS, LAYERS = 16, 4


def train_step(body: Any, scanned: bool) -> Any:
    """A step through equal layers of random operations, each with weights of its own."""

    def layer(h: jax.Array, weights: list[jax.Array], i: Any) -> jax.Array:
        arrays = Arrays([h, *weights], [i])
        run(arrays, body)
        outs = arrays.floats[1 + len(weights) :][-3:]
        return h + jnp.tanh(
            sum((jnp.mean(jnp.sin(x)) for x in outs), jnp.float32(0)) + h @ weights[0]
        )

    def step(params: list[Any], batch: tuple[Any, Any]) -> Any:
        def loss(params: list[Any]) -> Any:
            x, i = batch
            if scanned:
                x, _ = jax.lax.scan(lambda h, w: (layer(h, w, i), None), x, params)
            else:
                for k in range(LAYERS):
                    x = layer(x, [p[k] for p in params], i)
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    return step


def outcome(body: Any, scanned: bool, policy: str) -> str:
    """Whether a random step computes something again; its results are equal either way."""
    draw = np.random.default_rng(len(body))
    shapes = ((LAYERS, 6, 6), (LAYERS, 6))
    params = [jnp.asarray(draw.uniform(-1, 1, s), jnp.float32) for s in shapes]
    x = jnp.asarray(draw.uniform(-1, 1, (ROWS, 6)), jnp.float32)
    args = (params, (x, jnp.asarray(draw.integers(0, 64, (ROWS, 2)), jnp.int32)))
    step = train_step(body, scanned)
    again, lines = rematerialized(step, trace(step, args), args, policy)
    assert difference(jax.jit(again)(*args), jax.jit(step)(*args)) <= 2e-5
    return "again" if lines else "left"


def outcomes(seed: int, count: int) -> Counter[str]:
    """How many random steps computed something again, all of them with equal results."""
    return outcomes_of(
        outcome,
        seed,
        count,
        body=st.lists(instructions, min_size=2, max_size=6),
        scanned=st.booleans(),
        policy=st.sampled_from(["full", "dots", "20", "200"]),
    )


def test_random_steps() -> None:
    assert outcomes(0, 10)["again"] >= 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_random_steps(seed: int) -> None:
    assert outcomes(seed, 50)["again"] >= 15


def test_both_together() -> None:
    """Microbatches whose forward pass is computed again."""

    def step(params: list[Any], batch: Any) -> Any:
        def loss(params: list[Any]) -> Any:
            x, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch, params[0])
            return jnp.mean((x @ params[1]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    draw = np.random.default_rng(0)
    params = [jnp.asarray(draw.uniform(-1, 1, s), jnp.float32) for s in ((4, 6, 6), (6, 3))]
    x = jnp.asarray(draw.uniform(-1, 1, (ROWS, 6)), jnp.float32)
    made = rewritten(step, (params, x), Recipe(4, "full"))
    assert difference(jax.jit(made)(params, x), jax.jit(step)(params, x)) <= 2e-6
