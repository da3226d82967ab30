"""An equivariant network of e3nn: tensor products along the edges of a molecule."""

from __future__ import annotations

from typing import Any

import e3nn_jax as e3nn
import haiku as hk
import jax
import jax.numpy as jnp
from training import normal, tokens, training

CLUSTER = "h100:8"


def build(real: bool) -> Any:
    """131,072 atoms and a million edges, or 32 and 128."""
    atoms, edges, width, rounds = (1 << 17, 1 << 20, 64, 3) if real else (32, 128, 8, 2)
    inner = e3nn.Irreps(f"{width}x0e + {width}x1o + {width}x2e")

    def network(positions: jax.Array, kinds: jax.Array, ends: jax.Array) -> jax.Array:
        arrow = e3nn.IrrepsArray("1o", positions[ends[:, 0]] - positions[ends[:, 1]])
        angles = e3nn.spherical_harmonics("0e + 1o + 2e", arrow, normalize=True)
        distance = jnp.sqrt(1e-3 + jnp.sum(arrow.array**2, -1, keepdims=True))
        x = e3nn.IrrepsArray(f"{width}x0e", hk.Embed(8, width)(kinds))
        for n in range(rounds):
            message = e3nn.tensor_product(x[ends[:, 0]], angles).filter(inner)
            scale = hk.nets.MLP([width, message.irreps.num_irreps], name=f"radial{n}")(distance)
            total = e3nn.scatter_sum(message * scale, dst=ends[:, 1], output_size=atoms)
            x = e3nn.haiku.Linear(inner, name=f"mix{n}")(total)
        return e3nn.haiku.Linear("0e", name="energy")(x).array.sum()

    net = hk.without_apply_rng(hk.transform(network))

    def loss(params: Any, batch: Any) -> jax.Array:
        energy, slope = jax.value_and_grad(
            lambda place: net.apply(params, place, batch["kinds"], batch["ends"])
        )(batch["place"])
        return jnp.mean((slope + batch["force"]) ** 2) + 1e-6 * energy**2

    def make_batch() -> Any:
        return {
            "place": normal(atoms, 3), "force": normal(atoms, 3, seed=5),
            "kinds": tokens(atoms, 1, 8)[:, 0], "ends": tokens(edges, 2, atoms),
        }  # fmt: skip

    def init() -> Any:
        batch = make_batch()
        return net.init(jax.random.key(0), batch["place"], batch["kinds"], batch["ends"])

    make_state, step = training(init, loss)
    return make_state, step, make_batch
