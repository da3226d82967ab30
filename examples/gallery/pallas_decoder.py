"""A decoder with JAX's own flash attention for TPUs, a Pallas kernel, in every layer."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from training import next_token, tokens, training

CLUSTER = "v5p:2x2x2"


class Block(nn.Module):
    """Attention by the kernel and a perceptron."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``x``: [rows, tokens, width]."""
        rows, length, width = x.shape
        parts = nn.Dense(3 * width, use_bias=False, dtype=x.dtype)(nn.RMSNorm(dtype=x.dtype)(x))
        shape = (rows, length, self.heads, width // self.heads)
        q, k, v = (p.reshape(shape).swapaxes(1, 2) for p in jnp.split(parts, 3, -1))
        out = flash_attention(q, k, v, causal=True, sm_scale=shape[-1] ** -0.5)
        x = x + nn.Dense(width, use_bias=False, dtype=x.dtype)(out.swapaxes(1, 2).reshape(x.shape))
        hidden = nn.Dense(4 * width, use_bias=False, dtype=x.dtype)(nn.RMSNorm(dtype=x.dtype)(x))
        return x + nn.Dense(width, use_bias=False, dtype=x.dtype)(nn.gelu(hidden))


class Decoder(nn.Module):
    """Embedding, blocks, head."""

    vocab: int
    width: int
    heads: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Logits of token ids."""
        x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(ids)
        for _ in range(self.layers):
            x = Block(self.heads)(x)
        return nn.Dense(self.vocab, use_bias=False, dtype=self.dtype)(x)


def interpreted(f: Any) -> Any:
    """``f`` with its kernels interpreted, for machines without a TPU."""
    whole = partial(pallas.pallas_call, interpret=True)

    def patched(*args: Any) -> Any:
        with mock.patch.object(pallas, "pallas_call", whole):
            return f(*args)

    return patched


def build(real: bool) -> Any:
    """8 layers of 4,096 at 4,096 tokens, or one small layer, its kernels interpreted."""
    if real:
        model = Decoder(32000, 4096, 32, 8, jnp.bfloat16)
        rows, length = 16, 4096
    else:
        model = Decoder(256, 256, 2, 1, jnp.float32)
        rows, length = 8, 128
    make_state, step = training(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32)),
        lambda params, batch: next_token(model.apply(params, batch), batch),
    )
    if not real:
        make_state, step = interpreted(make_state), interpreted(step)
    return make_state, step, lambda: tokens(rows, length, model.vocab)
