"""Llama of Hugging Face transformers, trained on next tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from training import next_token, tokens, training
from transformers import FlaxLlamaForCausalLM, LlamaConfig

CLUSTER = "h100:8x4"


def build(real: bool) -> Any:
    """Llama-3-8B at 4,096 tokens, or two small layers."""
    if real:
        config = LlamaConfig(128256, 4096, 14336, 32, 32, num_key_value_heads=8)
        rows, length, dtype = 64, 4096, jnp.bfloat16
    else:
        config = LlamaConfig(256, 64, 128, 2, 8, num_key_value_heads=4)
        rows, length, dtype = 16, 32, jnp.float32
    config.max_position_embeddings = length
    model = FlaxLlamaForCausalLM(config, dtype=dtype, _do_init=False)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return next_token(model(batch, params=params).logits, batch)

    make_state, step = training(lambda: model.init_weights(jax.random.key(0), (1, 8)), loss)
    return make_state, step, lambda: tokens(rows, length, config.vocab_size)
