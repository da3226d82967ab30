"""The loss of proximal policy optimization in Brax: advantages by a scan back through time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from brax.training.acme import running_statistics, specs
from brax.training.agents.ppo import losses, networks
from brax.training.types import Transition
from training import normal, training

CLUSTER = "a100:8"


def build(real: bool) -> Any:
    """65,536 trajectories of 20 steps of a humanoid, or 16 of 5."""
    rows, length, seen, actions, layers = (
        (65536, 20, 244, 17, (1024,) * 4) if real else (16, 5, 12, 3, (32, 32))
    )
    network = networks.make_ppo_networks(
        seen, actions, running_statistics.normalize, policy_hidden_layer_sizes=layers,
        value_hidden_layer_sizes=layers,
    )  # fmt: skip
    normalizer = running_statistics.init_state(specs.Array((seen,), jnp.dtype("float32")))

    def loss(params: Any, data: Transition) -> jax.Array:
        return losses.compute_ppo_loss(
            params, normalizer, data, jax.random.key(3), network, entropy_cost=1e-2,
            discounting=0.97, reward_scaling=0.1,
        )[0]  # fmt: skip

    def init() -> Any:
        one, two = jax.random.split(jax.random.key(0))
        return losses.PPONetworkParams(
            policy=network.policy_network.init(one), value=network.value_network.init(two)
        )

    def make_batch() -> Transition:
        return Transition(
            observation=normal(rows, length, seen),
            action=jnp.tanh(normal(rows, length, actions)),
            reward=normal(rows, length),
            discount=jnp.ones((rows, length)),
            next_observation=normal(rows, length, seen, seed=4),
            extras={
                "policy_extras": {
                    "raw_action": normal(rows, length, actions),
                    "log_prob": normal(rows, length, seed=5),
                    "distribution_params": normal(rows, length, 2 * actions, seed=6),
                },
                "state_extras": {"truncation": jnp.zeros((rows, length))},
            },
        )

    make_state, step = training(init, loss)
    return make_state, step, make_batch
