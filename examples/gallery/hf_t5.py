"""T5 of Hugging Face transformers: an encoder and a decoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from training import next_token, tokens, training
from transformers import FlaxT5ForConditionalGeneration, T5Config
from transformers.models.t5 import modeling_flax_t5

CLUSTER = "v5p:2x2x2"


def clip(x: Any, *bounds: Any, a_max: Any = None) -> jax.Array:
    """``jnp.clip`` with the argument of older versions of JAX that this T5 names."""
    return jnp.clip(x, *bounds, max=a_max)


modeling_flax_t5.jnp = SimpleNamespace(**{**vars(jnp), "clip": clip})


def build(real: bool) -> Any:
    """T5-3B at 512 and 512 tokens, or two small layers."""
    if real:
        config = T5Config(32128, 1024, 128, 16384, 24, num_heads=32)
        rows, length, dtype = 128, 512, jnp.bfloat16
    else:
        config = T5Config(256, 32, 8, 64, 2, num_heads=4, decoder_start_token_id=0)
        rows, length, dtype = 16, 16, jnp.float32
    config.dropout_rate = 0.0
    model = FlaxT5ForConditionalGeneration(config, dtype=dtype, _do_init=False)

    def loss(params: Any, batch: Any) -> jax.Array:
        out = model(batch["source"], decoder_input_ids=batch["target"], params=params)
        return next_token(out.logits, batch["target"])

    make_state, step = training(lambda: model.init_weights(jax.random.key(0), (1, 8)), loss)

    def make_batch() -> Any:
        ids = tokens(rows, length, config.vocab_size)
        return {"source": ids, "target": ids[:, ::-1]}

    return make_state, step, make_batch
