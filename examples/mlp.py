"""A three-layer Flax NNX perceptron on the scikit-learn digits, planned in one line.

Shows the smallest complete program: a plain train step (`value_and_grad` and Adam), and one call
to `parallelize` that lays it out over every device JAX can see.

    python examples/mlp.py --steps 100
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

PIXELS, WIDTH, CLASSES, BATCH = 64, 512, 10, 128
OPTIMIZER = optax.adam(1e-3)


class MLP(nnx.Module):
    """Two hidden layers of GELU units and a linear classifier."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(PIXELS, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.gelu(self.first(x))
        x = nnx.gelu(self.second(x))
        return self.head(x)


@functools.cache
def graphdef() -> nnx.GraphDef[MLP]:
    """The static half of the model; the arrays live in the training state."""
    return nnx.split(nnx.eval_shape(lambda: MLP(nnx.Rngs(0))))[0]


def make_state(seed: int = 0) -> State:
    """Fresh parameters and Adam moments."""
    params = nnx.to_pure_dict(nnx.state(MLP(nnx.Rngs(seed))))
    return {"params": params, "opt": OPTIMIZER.init(params)}


def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
    """One step of Adam on the cross-entropy of a batch."""

    def loss_fn(params: Any) -> jax.Array:
        logits = nnx.merge(graphdef(), params)(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def batches(seed: int = 0) -> Iterator[Batch]:
    """Endless shuffled epochs over the 1797 digits, in full batches."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            yield {"image": images[rows], "label": labels[rows]}


def example_args() -> tuple[Any, Any]:
    """Shapes and dtypes of `train_step`'s arguments; no state is computed."""
    return jax.eval_shape(make_state), jax.eval_shape(lambda batch: batch, next(batches()))


def main() -> None:
    """Train over all devices and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
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
