"""CLIP of Hugging Face transformers: a contrastive loss couples all examples of a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from training import normal, tokens, training
from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig, FlaxCLIPModel

CLUSTER = "v5e:4x4"


def build(real: bool) -> Any:
    """CLIP ViT-L/14, or two small layers of each tower."""
    if real:
        text = CLIPTextConfig(49408, 768, 3072, 768, 12, 12)
        image = CLIPVisionConfig(1024, 4096, 768, 24, 16, image_size=224, patch_size=14)
        rows, width, dtype = 512, 768, jnp.bfloat16
    else:
        text = CLIPTextConfig(128, 32, 64, 16, 2, 4, max_position_embeddings=12)
        image = CLIPVisionConfig(32, 64, 16, 2, 4, image_size=16, patch_size=4)
        rows, width, dtype = 16, 16, jnp.float32
    config = CLIPConfig(text.to_dict(), image.to_dict(), projection_dim=width)
    model = FlaxCLIPModel(config, dtype=dtype, _do_init=False)
    size, length = image.image_size, text.max_position_embeddings

    def loss(params: Any, batch: Any) -> jax.Array:
        out = model(batch["ids"], batch["image"], params=params)
        logits, labels = out.logits_per_text.astype(jnp.float32), jnp.arange(rows)
        by_text = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        by_image = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
        return (by_text + by_image).mean() / 2

    shapes = ((1, length), (1, size, size, 3))
    make_state, step = training(lambda: model.init_weights(jax.random.key(0), shapes), loss)

    def make_batch() -> Any:
        return {
            "ids": tokens(rows, length, text.vocab_size),
            "image": normal(rows, 3, size, size),
        }

    return make_state, step, make_batch
