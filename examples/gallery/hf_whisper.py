"""Whisper of Hugging Face transformers: convolutions over sound, then an encoder and a decoder."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from training import next_token, normal, tokens, training
from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

CLUSTER = "h100:8"


def build(real: bool) -> Any:
    """Whisper large (vocabulary 51,865), or two small layers."""
    if real:
        config = WhisperConfig(
            51865, 80, 32, 20, 32, 20, 5120, 5120, d_model=1280, max_source_positions=1500
        )
        rows, length, dtype = 32, 448, jnp.bfloat16
    else:
        config = WhisperConfig(
            256, 8, 2, 4, 2, 4, 64, 64, d_model=32, max_source_positions=20,
            max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1,
        )  # fmt: skip
        rows, length, dtype = 16, 16, jnp.float32
    frames = 2 * config.max_source_positions
    model = FlaxWhisperForConditionalGeneration(
        config, (1, config.num_mel_bins, frames), dtype=dtype, _do_init=False
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        out = model(batch["sound"], batch["ids"], params=params)
        return next_token(out.logits, batch["ids"])

    shape = (1, config.num_mel_bins, frames)
    make_state, step = training(lambda: model.init_weights(jax.random.key(0), shape), loss)

    def make_batch() -> Any:
        return {
            "sound": normal(rows, config.num_mel_bins, frames),
            "ids": tokens(rows, length, config.vocab_size),
        }

    return make_state, step, make_batch
