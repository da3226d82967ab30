"""A two-layer Flax Linen LSTM language model, on CPython's own help topics read as bytes.

Shows a loop over time: `nn.RNN` is a `lax.scan` whose weights are shared by every step, so their
gradients add up across the scan. Gradients are clipped by their global norm, which reads every
parameter's shards at once.

    python examples/lstm.py --steps 60
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

LAYERS, WIDTH, SEQ, BATCH, VOCAB = 2, 256, 64, 32, 256
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))


class LanguageModel(nn.Module):
    """Byte embeddings, stacked LSTM layers, and a linear head."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, WIDTH, name="token")(tokens)
        for layer in range(LAYERS):
            x = nn.RNN(nn.OptimizedLSTMCell(WIDTH), name=f"lstm{layer}")(x)
        return nn.Dense(VOCAB, name="head")(x)


def make_state(seed: int = 0) -> State:
    """Fresh parameters and Adam moments."""
    params = LanguageModel().init(jax.random.key(seed), jnp.zeros((1, SEQ), jnp.int32))["params"]
    return {"params": params, "opt": OPTIMIZER.init(params)}


def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
    """One step of clipped Adam on next-byte cross-entropy."""

    def loss_fn(params: Any) -> jax.Array:
        logits = LanguageModel().apply({"params": params}, batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.mean(losses)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def batches(seed: int = 0) -> Iterator[Batch]:
    """Endless random windows of the text, as bytes, with the bytes that follow."""
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
