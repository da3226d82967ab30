"""Learned energies of JAX MD, a Flax NNX module; forces are a gradient inside the loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax_md import energy, space
from training import normal, training

CLUSTER = "h100:8"


def build(real: bool) -> Any:
    """4,096 configurations of 64 atoms, or 16 of 8."""
    rows, atoms, width = (4096, 64, 1024) if real else (16, 8, 8)
    displacement, _ = space.periodic(10.0)
    model = energy.behler_parrinello(
        displacement, key=jax.random.key(0), mlp_sizes=(width, width)
    ).model
    graph, params = nnx.split(model, nnx.Param)

    def loss(params: Any, batch: Any) -> jax.Array:
        energy_of = nnx.merge(graph, params)
        found, slope = jax.vmap(jax.value_and_grad(energy_of))(batch["place"])
        return jnp.mean((found - batch["energy"]) ** 2) + jnp.mean((slope + batch["force"]) ** 2)

    def make_batch() -> Any:
        place = 5 + 2 * jnp.tanh(normal(rows, atoms, 3))
        return {"place": place, "energy": normal(rows), "force": normal(rows, atoms, 3, seed=4)}

    make_state, step = training(lambda: params, loss)
    return make_state, step, make_batch
