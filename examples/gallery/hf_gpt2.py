"""GPT-2 of Hugging Face transformers, with dropout; its vocabulary of 50,257 divides by nothing."""

from __future__ import annotations

from typing import Any

import jax
from training import next_token, tokens, training
from transformers import FlaxGPT2LMHeadModel, GPT2Config

CLUSTER = "h100:8"


def build(real: bool) -> Any:
    """GPT-2 XL (25 heads) at 1,024 tokens, or two small layers."""
    if real:
        config = GPT2Config(n_embd=1600, n_layer=48, n_head=25)
        rows, length = 64, 1024
    else:
        config = GPT2Config(vocab_size=257, n_positions=32, n_embd=60, n_layer=2, n_head=5)
        rows, length = 16, 32
    model = FlaxGPT2LMHeadModel(config, _do_init=False)

    def loss(params: Any, batch: Any) -> jax.Array:
        out = model(batch["ids"], params=params, dropout_rng=batch["key"], train=True)
        return next_token(out.logits, batch["ids"])

    make_state, step = training(lambda: model.init_weights(jax.random.key(0), (1, 8)), loss)
    return (
        make_state,
        step,
        lambda: {"ids": tokens(rows, length, config.vocab_size), "key": jax.random.key(1)},
    )
