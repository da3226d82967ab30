"""Stages of layers of few operations, beside operations that look like theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import parallelize
from planner.errors import RequestError

LAYERS: dict[str, Callable[[jax.Array, dict[str, jax.Array]], jax.Array]] = {
    "residual": lambda x, w: x + jnp.tanh(x @ w["w"]),
    "residual with bias": lambda x, w: x + jnp.tanh(x @ w["w"] + w["b"]),
    "plain": lambda x, w: jnp.tanh(x @ w["w"] + w["b"]),
}
PLACES = {"nothing around": (), "one before": ("in",), "before and after": ("in", "out")}


@pytest.mark.devices
@pytest.mark.parametrize(("count", "stages"), [(4, 2), (8, 2), (8, 4)])
@pytest.mark.parametrize("around", PLACES)
@pytest.mark.parametrize("layer", LAYERS)
def test_equal_to_the_plain_step(layer: str, around: str, count: int, stages: int) -> None:
    """A projection of the layers' shape is not taken for the first product of a layer. Where the
    first layer reads the batch, its stage computes a gradient that nobody reads."""
    keys = jax.random.split(jax.random.key(0), count + 4)

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return 0.3 * jax.random.normal(key, shape)

    w: Any = {"layers": [{"w": normal(k, 16, 16), "b": normal(k, 16)} for k in keys[:count]]}
    w |= {name: normal(k, 16, 16) for name, k in zip(PLACES[around], keys[count:], strict=False)}
    batch = {"x": normal(keys[-1], 32, 16), "y": normal(keys[-2], 32, 16)}

    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> jax.Array:
            x = batch["x"] @ w["in"] if "in" in w else batch["x"]
            for one in w["layers"]:
                x = LAYERS[layer](x, one)
            x = x @ w["out"] if "out" in w else x
            return jnp.mean((x - batch["y"]) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), value

    found = parallelize(step, microbatches=4, stages=stages)(w, batch)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(w, batch)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.devices
@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_key_that_layers_hand_on_is_named(schedule: str | None) -> None:
    def step(w: Any, x: jax.Array) -> Any:
        def loss(layers: jax.Array) -> Any:
            def layer(carry: Any, one: jax.Array) -> Any:
                h, (key, mine) = carry[0], jax.random.split(carry[1])
                return (h + jnp.tanh(h @ one) * jax.random.bernoulli(mine, 0.9, h.shape), key), None

            (h, key), _ = jax.lax.scan(layer, (x, w["key"]), layers)
            return jnp.mean(h**2), key

        (value, key), g = jax.value_and_grad(loss, has_aux=True)(w["layers"])
        return {"layers": w["layers"] - 0.1 * g, "key": key}, value

    w = {"layers": jnp.ones((4, 16, 16)) / 16, "key": jax.random.key(0)}
    said = r"test_stages_short_layers.py:\d+: a result of scan is returned .* split keys before"
    options = {} if schedule is None else {"schedule": schedule}
    with pytest.raises(RequestError, match=said):
        parallelize(step, microbatches=4, stages=2, **options)(w, jnp.ones((32, 16)))


@pytest.mark.devices
def test_layers_that_are_not_equal_may_be_programs_of_their_own() -> None:
    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            h = x
            for one in w:
                h = jnp.tanh(h @ one)
            return jnp.mean(h**2)

        value, g = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), value

    w = [jnp.ones((16, 8)), jnp.ones((8, 24)), jnp.ones((24, 4))]
    with pytest.raises(RequestError, match='With schedule="1f1b" each stage is a program'):
        parallelize(step, microbatches=4, stages=2)(w, jnp.ones((32, 16)))
