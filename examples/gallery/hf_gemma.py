"""Gemma of Hugging Face transformers: a tied embedding of 256,000 words and one key head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from training import next_token, tokens, training
from transformers import FlaxGemmaForCausalLM, GemmaConfig

CLUSTER = "v5e:4x8"


def build(real: bool) -> Any:
    """Gemma-2B at 2,048 tokens, or two small layers."""
    if real:
        config = GemmaConfig(256000, 2048, 16384, 18, 8, 1, 256, max_position_embeddings=2048)
        rows, length, dtype = 128, 2048, jnp.bfloat16
    else:
        config = GemmaConfig(256, 32, 64, 2, 4, 1, 8, max_position_embeddings=16)
        rows, length, dtype = 16, 16, jnp.float32
    model = FlaxGemmaForCausalLM(config, dtype=dtype, _do_init=False)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return next_token(model(batch, params=params).logits, batch)

    make_state, step = training(lambda: model.init_weights(jax.random.key(0), (1, 8)), loss)
    return make_state, step, lambda: tokens(rows, length, config.vocab_size)
