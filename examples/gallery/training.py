"""What the programs of the gallery share: an optimizer around a loss, and data of a shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

# As much as keeps rounding of small gradients from being blown up when two runs are compared.
EPS = 1e-5


def training(
    init: Callable[[], Any], loss: Callable[[Any, Any], jax.Array]
) -> tuple[Callable[[], Any], Callable[[Any, Any], Any]]:
    """The initial state and the train step of a loss under AdamW.

    Args:
        init: gives the parameters.
        loss: of parameters and a batch.
    """
    optimizer = optax.adamw(1e-3, eps=EPS)

    def make_state() -> Any:
        params = init()
        return {"params": params, "opt": optimizer.init(params)}

    def train_step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return make_state, train_step


def next_token(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of each token given those before it."""
    logits = logits[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def tokens(rows: int, length: int, vocab: int) -> jax.Array:
    """Token ids, ``int32[rows, length]``."""
    return jax.random.randint(jax.random.key(7), (rows, length), 0, vocab)


def normal(*shape: int, seed: int = 8, dtype: Any = jnp.float32) -> jax.Array:
    """Normal numbers of a shape."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)
