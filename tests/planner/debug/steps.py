"""Two small steps whose stages are golden files. A changed line here changes the files."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp_step(state: Any, batch: Any) -> Any:
    """Two layers, sum of absolute errors, momentum."""

    def loss(params: Any) -> jax.Array:
        hidden = jnp.sin(batch["x"] @ params["up"])
        error = hidden @ params["down"] - batch["y"]
        return jnp.sum(jnp.abs(error))

    params, speed = state["params"], state["speed"]
    value, grads = jax.value_and_grad(loss)(params)
    speed = {k: 0.9 * speed[k] + grads[k] for k in params}
    params = {k: params[k] - 0.01 * speed[k] for k in params}
    return {"params": params, "speed": speed}, value


def mlp_arguments() -> tuple[Any, Any]:
    params = {"up": struct(1024, 4096), "down": struct(4096, 1024)}
    batch = {"x": struct(4096, 1024), "y": struct(4096, 1024)}
    return {"params": params, "speed": dict(params)}, batch


def decoder_step(params: Any, batch: Any) -> Any:
    """A scan over four equal blocks with attention of one head, sum of absolute values, SGD."""

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        scores = jnp.exp(jnp.einsum("btd,bsd->bts", x @ layer["ask"], x))
        x = x + jnp.einsum("bts,bsd->btd", scores, x)
        return x + jnp.sin(x @ layer["up"]), None

    def loss(params: Any) -> jax.Array:
        x, _ = jax.lax.scan(block, batch, params)
        return jnp.sum(jnp.abs(x))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value


def decoder_arguments() -> tuple[Any, jax.ShapeDtypeStruct]:
    return {"ask": struct(4, 512, 512), "up": struct(4, 512, 512)}, struct(64, 256, 512)


train_step, example_args = mlp_step, mlp_arguments
