"""A Flax NNX decoder whose feed-forward is a top-2 routed mixture of eight experts.

Shows expert parallelism: tokens go to experts and back through dense dispatch and combine einsums
with a fixed capacity (as in GShard), so the experts are one more axis a plan can split. A
load-balancing loss is added to next-byte cross-entropy on CPython's own help topics.

    python examples/moe.py --steps 60
"""

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

State = dict[str, Any]
Batch = dict[str, Any]

LAYERS, WIDTH, HEADS, SEQ, BATCH, VOCAB = 2, 64, 4, 64, 16, 256
EXPERTS, TOP, CAPACITY = 8, 2, 24  # CAPACITY: tokens an expert takes from one sequence
OPTIMIZER = optax.adam(2e-3)


class Experts(nnx.Module):
    """Route each token to its TOP best experts; an expert with no room left skips the token."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, 4 * WIDTH)))
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, 4 * WIDTH, WIDTH)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jax.nn.softmax(self.router(x))  # batch, seq, expert
        weights, chosen = jax.lax.top_k(gates, TOP)
        picks = jax.nn.one_hot(chosen, EXPERTS)  # batch, seq, top, expert
        queue = picks.reshape(picks.shape[0], -1, EXPERTS)
        places = (jnp.cumsum(queue, axis=1) - 1).reshape(picks.shape).astype(jnp.int32)
        slots = picks[..., None] * jax.nn.one_hot(places, CAPACITY)  # all zero: no room left
        combine = jnp.einsum("bst,bstec->bsec", weights, slots)
        dispatch = jnp.sum(slots, axis=2)
        inputs = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
        hidden = nnx.gelu(jnp.einsum("ebcd,edf->ebcf", inputs, self.up[...]))
        outputs = jnp.einsum("ebcf,efd->ebcd", hidden, self.down[...])
        share, belief = jnp.mean(picks, axis=(0, 1, 2)), jnp.mean(gates, axis=(0, 1))
        return jnp.einsum("bsec,ebcd->bsd", combine, outputs), EXPERTS * jnp.sum(share * belief)


class Decoder(nnx.Module):
    """Embeddings, blocks of causal attention and experts, and a linear head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.position = nnx.Embed(SEQ, WIDTH, rngs=rngs)
        attention = functools.partial(nnx.MultiHeadAttention, HEADS, WIDTH, decode=False, rngs=rngs)
        self.attention = nnx.List([attention() for _ in range(LAYERS)])
        self.experts = nnx.List([Experts(rngs) for _ in range(LAYERS)])
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2 * LAYERS + 1)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.token(tokens) + self.position(jnp.arange(SEQ))
        mask, balance = nnx.make_causal_mask(jnp.ones(SEQ)), jnp.zeros(())
        for i, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            x = x + attention(self.norms[2 * i](x), mask=mask)
            y, extra = experts(self.norms[2 * i + 1](x))
            x, balance = x + y, balance + extra
        return self.head(self.norms[-1](x)), balance / LAYERS


@functools.cache
def graphdef() -> nnx.GraphDef[Decoder]:
    """The static half of the model; the arrays live in the training state."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))))[0]


def make_state(seed: int = 0) -> State:
    """Fresh parameters and Adam moments."""
    params = nnx.to_pure_dict(nnx.state(Decoder(nnx.Rngs(seed))))
    return {"params": params, "opt": OPTIMIZER.init(params)}


def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
    """One step of Adam on cross-entropy plus a hundredth of the load-balancing loss."""

    def loss_fn(params: Any) -> jax.Array:
        logits, balance = nnx.merge(graphdef(), params)(batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.mean(losses) + 0.01 * balance

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
