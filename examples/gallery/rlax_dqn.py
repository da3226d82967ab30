"""Double Q-learning of RLax, for transitions under ``vmap``, on a convolutional network."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import rlax
from flax import linen as nn
from training import normal, tokens, training

CLUSTER = "v5e:2x4"


class Network(nn.Module):
    """Three convolutions and a dense layer, as for Atari."""

    actions: int
    channels: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``x``: [rows, height, width, frames]."""
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            x = nn.relu(nn.Conv(self.channels, (kernel, kernel), (stride, stride))(x))
        x = nn.relu(nn.Dense(8 * self.channels)(x.reshape(len(x), -1)))
        return nn.Dense(self.actions)(x)


def build(real: bool) -> Any:
    """32,768 transitions of Atari, or 16 small ones."""
    rows, size, actions, channels = (32768, 84, 18, 64) if real else (16, 16, 4, 8)
    net = Network(actions, channels)

    def loss(params: Any, batch: Any) -> jax.Array:
        now, then = net.apply(params, batch["seen"]), net.apply(params, batch["next"])
        error = jax.vmap(rlax.double_q_learning)(
            now, batch["action"], batch["reward"], jnp.full(rows, 0.99), then, then
        )
        return jnp.mean(rlax.l2_loss(error))

    def make_batch() -> Any:
        return {
            "seen": normal(rows, size, size, 4), "next": normal(rows, size, size, 4, seed=9),
            "action": tokens(rows, 1, actions)[:, 0], "reward": normal(rows),
        }  # fmt: skip

    make_state, step = training(
        lambda: net.init(jax.random.key(0), jnp.zeros((1, size, size, 4))), loss
    )
    return make_state, step, make_batch
