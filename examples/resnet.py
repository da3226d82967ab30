"""A small Flax NNX residual network with batch norm, on the scikit-learn digits (8x8 images).

Shows convolutions, Nesterov momentum, and state that the forward pass itself updates: batch-norm
statistics are taken over the whole batch however it is sharded, and their running averages travel
in the training state.

    python examples/resnet.py --steps 60
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

WIDTHS, CLASSES, BATCH = (32, 64, 128), 10, 128
OPTIMIZER = optax.sgd(0.02, momentum=0.9, nesterov=True)


class Residual(nnx.Module):
    """Two 3x3 convolutions beside an identity, or a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
        self.conv1 = conv(inputs, outputs, kernel_size=(3, 3), strides=stride)
        self.norm1 = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.conv2 = conv(outputs, outputs, kernel_size=(3, 3))
        self.norm2 = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        same = inputs == outputs
        self.project = None if same else conv(inputs, outputs, (1, 1), strides=stride)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return nnx.relu(h + (x if self.project is None else self.project(x)))


class ResNet(nnx.Module):
    """A stem, one residual block per width (all but the first halve the image), a classifier."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(1, WIDTHS[0], kernel_size=(3, 3), rngs=rngs)
        pairs = zip(WIDTHS[:1] + WIDTHS, WIDTHS, strict=False)
        self.blocks = nnx.List([Residual(a, b, 1 if a == b else 2, rngs) for a, b in pairs])
        self.head = nnx.Linear(WIDTHS[-1], CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


@functools.cache
def graphdef() -> nnx.GraphDef[ResNet]:
    """The static half of the model; the arrays live in the training state."""
    return nnx.split(nnx.eval_shape(lambda: ResNet(nnx.Rngs(0))))[0]


def make_state(seed: int = 0) -> State:
    """Fresh parameters, batch-norm statistics and momentum."""
    model = ResNet(nnx.Rngs(seed))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    stats = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    return {"params": params, "stats": stats, "opt": OPTIMIZER.init(params)}


def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
    """One step of momentum on the cross-entropy of a batch, updating the running statistics."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef(), params, state["stats"])
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "stats": stats, "opt": opt}, {"loss": loss}


def batches(seed: int = 0) -> Iterator[Batch]:
    """Endless shuffled epochs over the 1797 digits, in full batches."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
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
