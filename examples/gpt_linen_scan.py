"""A Flax Linen decoder whose layers are one `nn.scan` over stacked, rematerialised parameters.

Shows that a plan reaches inside loops: every layer's parameters are slices of one leading axis,
the scan body is planned once, and its backward pass recomputes the forward (`nn.remat`).

    python examples/gpt_linen_scan.py --steps 60
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

State = dict[str, Any]
Batch = dict[str, Any]

LAYERS, WIDTH, HEADS, SEQ, BATCH, VOCAB = 6, 128, 4, 128, 16, 256
OPTIMIZER = optax.adam(1e-3)


class Block(nn.Module):
    """Pre-norm causal attention and a GELU feed-forward, in the shape `nn.scan` wants."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        attention = nn.MultiHeadDotProductAttention(HEADS, name="attention")
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, name="down")(h), None


class Decoder(nn.Module):
    """Embeddings, the scanned blocks, and a separate output head."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = self.param("positions", nn.initializers.normal(0.02), (SEQ, WIDTH))
        x = nn.Embed(VOCAB, WIDTH, name="token")(tokens) + positions
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = blocks(name="blocks")(x, nn.make_causal_mask(tokens[:1]))
        return nn.Dense(VOCAB, use_bias=False, name="head")(nn.LayerNorm()(x))


def make_state(seed: int = 0) -> State:
    """Fresh parameters and Adam moments."""
    params = Decoder().init(jax.random.key(seed), jnp.zeros((1, SEQ), jnp.int32))["params"]
    return {"params": params, "opt": OPTIMIZER.init(params)}


def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
    """One step of Adam on next-byte cross-entropy."""

    def loss_fn(params: Any) -> jax.Array:
        logits = Decoder().apply({"params": params}, batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.mean(losses)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def batches(seed: int = 0) -> Iterator[Batch]:
    """Endless random windows of CPython's help topics, as bytes, with the bytes that follow."""
    from pydoc_data.topics import topics

    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - SEQ, size=(BATCH, 1))
        window = text[starts + np.arange(SEQ + 1)].astype(np.int32)
        yield {"tokens": window[:, :-1], "targets": window[:, 1:]}


def example_args() -> tuple[Any, Any]:
    """Shapes and dtypes of `train_step`'s arguments; no state is computed."""
    return jax.eval_shape(make_state), jax.eval_shape(lambda batch: batch, next(batches()))


def main() -> None:
    """Train over all devices and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps

    from meshwright import parallelize, set_parallel_mode

    set_parallel_mode("AUTO_PARALLEL")
    step = parallelize(train_step, donate_argnums=0)
    state = make_state()
    for i, batch in zip(range(steps), batches(), strict=False):
        state, metrics = step(state, batch)
        print(f"step {i:4d}  loss {float(metrics['loss']):.4f}")


if __name__ == "__main__":
    main()
