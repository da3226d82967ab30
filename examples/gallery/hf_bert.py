"""BERT of Hugging Face transformers, on masked tokens, with dropout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from training import tokens, training
from transformers import BertConfig, FlaxBertForMaskedLM

CLUSTER = "v5e:4x4"


def build(real: bool) -> Any:
    """BERT large (vocabulary 30,522) at 512 tokens, or two small layers."""
    if real:
        config = BertConfig(30522, 1024, 24, 16, 4096)
        rows, length, dtype = 256, 512, jnp.bfloat16
    else:
        config = BertConfig(250, 32, 2, 4, 64, max_position_embeddings=16)
        rows, length, dtype = 16, 16, jnp.float32
    model = FlaxBertForMaskedLM(config, dtype=dtype, _do_init=False)

    def loss(params: Any, batch: Any) -> jax.Array:
        out = model(
            jnp.where(batch["hidden"], 3, batch["ids"]), batch["mask"],
            params=params, dropout_rng=batch["key"], train=True,
        )  # fmt: skip
        each = optax.softmax_cross_entropy_with_integer_labels(
            out.logits.astype(jnp.float32), batch["ids"]
        )
        return jnp.sum(each * batch["hidden"]) / jnp.maximum(jnp.sum(batch["hidden"]), 1)

    make_state, step = training(lambda: model.init_weights(jax.random.key(0), (1, 8)), loss)

    def make_batch() -> Any:
        ids = tokens(rows, length, config.vocab_size)
        return {"ids": ids, "hidden": ids % 7 == 0, "mask": ids % 9 != 0, "key": jax.random.key(2)}

    return make_state, step, make_batch
