"""The vision transformer of Hugging Face transformers; 197 patches divide by nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from training import normal, tokens, training
from transformers import FlaxViTForImageClassification, ViTConfig

CLUSTER = "a100:8"


def build(real: bool) -> Any:
    """ViT-L/16 at 224 pixels, or two small layers."""
    if real:
        config = ViTConfig(1024, 24, 16, 4096, num_labels=1000)
        rows, dtype = 512, jnp.bfloat16
    else:
        config = ViTConfig(32, 2, 4, 64, image_size=16, patch_size=4, num_labels=10)
        rows, dtype = 16, jnp.float32
    model = FlaxViTForImageClassification(config, dtype=dtype, _do_init=False)
    size = config.image_size

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model(batch["image"], params=params).logits.astype(jnp.float32)
        labels = batch["label"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    make_state, step = training(
        lambda: model.init_weights(jax.random.key(0), (1, size, size, 3)), loss
    )

    def make_batch() -> Any:
        labels = tokens(rows, 1, config.num_labels)[:, 0]
        return {"image": normal(rows, 3, size, size), "label": labels}

    return make_state, step, make_batch
