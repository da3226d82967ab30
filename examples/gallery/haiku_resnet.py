"""ResNet of Haiku, with batch norm: running means are a state of their own."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from training import normal, tokens

CLUSTER = "v5e:4x4"


def build(real: bool) -> Any:
    """ResNet-50 on ImageNet, or ResNet-18 on small images."""
    kind, rows, size, classes = (
        (hk.nets.ResNet50, 2048, 224, 1000) if real else (hk.nets.ResNet18, 16, 16, 8)
    )
    net = hk.transform_with_state(lambda x: kind(classes)(x, is_training=True))
    optimizer = optax.sgd(0.1, momentum=0.9)

    def make_batch() -> Any:
        return {"image": normal(rows, size, size, 3), "label": tokens(rows, 1, classes)[:, 0]}

    def make_state() -> Any:
        params, state = net.init(jax.random.key(0), jnp.zeros((2, size, size, 3)))
        return params, state, optimizer.init(params)

    def train_step(train_state: Any, batch: Any) -> Any:
        params, state, opt = train_state

        def loss(params: Any) -> Any:
            logits, new = net.apply(params, state, None, batch["image"])
            label = batch["label"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean(), new

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), state, opt), value

    return make_state, train_step, make_batch
