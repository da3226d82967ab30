"""wav2vec 2.0 of Hugging Face transformers, on transcripts: a CTC loss scans over time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from training import normal, tokens, training
from transformers import FlaxWav2Vec2ForCTC, Wav2Vec2Config

CLUSTER = "a100:8"


def build(real: bool) -> Any:
    """wav2vec 2.0 large on ten seconds of sound, or two small layers."""
    if real:
        config = Wav2Vec2Config(
            32, 1024, 24, 16, 4096, do_stable_layer_norm=True, feat_extract_norm="layer"
        )
        rows, length, words, dtype = 64, 160000, 100, jnp.bfloat16
    else:
        config = Wav2Vec2Config(
            12, 32, 2, 4, 64, do_stable_layer_norm=True, feat_extract_norm="layer",
            conv_dim=(16, 16), conv_stride=(4, 4), conv_kernel=(8, 4),
            num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
        )  # fmt: skip
        rows, length, words, dtype = 16, 320, 5, jnp.float32
    model = FlaxWav2Vec2ForCTC(config, (1, 1024), dtype=dtype, _do_init=False)

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model(batch["sound"], params=params).logits.astype(jnp.float32)
        paddings = jnp.zeros(logits.shape[:2])
        return optax.ctc_loss(logits, paddings, batch["ids"], batch["pad"]).mean()

    make_state, step = training(lambda: model.init_weights(jax.random.key(0), (1, 1024)), loss)

    def make_batch() -> Any:
        ids = 1 + tokens(rows, words, config.vocab_size - 1)
        return {"sound": normal(rows, length), "ids": ids, "pad": jnp.zeros((rows, words))}

    return make_state, step, make_batch
