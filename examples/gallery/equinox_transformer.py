"""Equinox: modules of one example under ``vmap``, attention and a multi-layer perceptron."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from training import EPS, next_token, tokens

CLUSTER = "h100:8"


class Block(eqx.Module):
    """Attention and a perceptron, each behind a norm."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: jax.Array):
        one, two = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=one)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=two)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x``: [tokens, width]."""
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(len(y), dtype=bool))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Decoder(eqx.Module):
    """Embedding, blocks, head."""

    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, vocab: int, width: int, heads: int, layers: int, key: jax.Array):
        first, last, *keys = jax.random.split(key, layers + 2)
        self.embed = eqx.nn.Embedding(vocab, width, key=first)
        self.blocks = [Block(width, heads, key) for key in keys]
        self.head = eqx.nn.Linear(width, vocab, key=last)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Logits of one sequence."""
        x = jax.vmap(self.embed)(ids)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def build(real: bool) -> Any:
    """A decoder of 1.3B parameters at 1,024 tokens, or two small layers."""
    vocab, width, heads, layers, rows, length = (
        (32000, 2048, 16, 24, 128, 1024) if real else (256, 32, 4, 2, 16, 16)
    )
    optimizer = optax.adamw(1e-3, eps=EPS)

    def make_state() -> Any:
        model = eqx.filter(Decoder(vocab, width, heads, layers, jax.random.key(0)), eqx.is_array)
        return model, optimizer.init(model)

    skeleton = eqx.filter_eval_shape(Decoder, vocab, width, heads, layers, jax.random.key(0))
    static = eqx.filter(skeleton, lambda x: not isinstance(x, jax.ShapeDtypeStruct))

    def train_step(state: Any, batch: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return next_token(jax.vmap(eqx.combine(params, static))(batch), batch)

        value, grads = jax.value_and_grad(loss)(state[0])
        updates, opt = optimizer.update(grads, state[1], state[0])
        return (eqx.apply_updates(state[0], updates), opt), value

    return make_state, train_step, lambda: tokens(rows, length, vocab)
