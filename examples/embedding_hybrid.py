"""A next-word model whose large embedding lies on parameter servers, the rest under SPMD.

Words and pairs of words are hashed into one table of 65,536 rows, of which a batch reads a few
thousand. `hybrid` prices the table both ways, puts it on servers, and plans the dense layers over
every device. Adagrad leaves a row without a gradient alone, so the run on servers, which updates
only rows that were read, has the losses of the unsharded one. The text is that of Python's own
`pydoc` topics.

    planner inspect examples/embedding_hybrid.py --placement auto
    python examples/embedding_hybrid.py --steps 60
"""

import argparse
import itertools
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, Any]
Arrays = tuple[np.ndarray, np.ndarray]

ROWS, WIDTH, HIDDEN, CLASSES, BATCH, CONTEXT = 2**18, 64, 256, 512, 256, 4
optimizer = optax.adagrad(0.1)


def make_params(seed: int = 0) -> Params:
    """Fresh parameters; the table as a NumPy array, which takes no device memory."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    return {
        "embed": normal(ROWS, WIDTH, scale=0.1),
        "hidden": normal(WIDTH, HIDDEN, scale=WIDTH**-0.5),
        "out": normal(HIDDEN, CLASSES, scale=HIDDEN**-0.5),
    }


def loss(params: Params, ids: Any, words: Any) -> jax.Array:
    """Mean cross-entropy of the words that follow.

    `ids` [batch, 2 * CONTEXT - 1] are rows of the table, `words` [batch] classes.
    """
    h = jnp.take(params["embed"], ids, axis=0).sum(axis=1)
    logits = jax.nn.relu(h @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, words).mean()


def example_params() -> Params:
    """Shapes of the parameters, for `planner inspect`."""
    shapes = {"embed": (ROWS, WIDTH), "hidden": (WIDTH, HIDDEN), "out": (HIDDEN, CLASSES)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def example_batch() -> tuple[Any, Any]:
    """Shapes of what `loss` takes after the parameters, for `planner inspect`."""
    ids, words = (BATCH, 2 * CONTEXT - 1), (BATCH,)
    return jax.ShapeDtypeStruct(ids, jnp.int32), jax.ShapeDtypeStruct(words, jnp.int32)


def corpus() -> Arrays:
    """Rows of every context, and the class of the word that follows it."""
    from pydoc_data.topics import topics

    words = re.findall(r"[a-z]+", " ".join(topics[name] for name in sorted(topics)).lower())
    frequent = [word for word, _ in Counter(words).most_common(CLASSES - 1)]
    number = {word: k + 1 for k, word in enumerate(frequent)}
    pairs = [f"{a} {b}" for a, b in itertools.pairwise(words)]
    row = {text: zlib.crc32(text.encode()) % ROWS for text in {*words, *pairs}}
    one, two = (np.array([row[text] for text in texts], np.int32) for texts in (words, pairs))
    count = len(words) - CONTEXT
    columns = [one[k : k + count] for k in range(CONTEXT)]
    columns += [two[k : k + count] for k in range(CONTEXT - 1)]
    labels = np.array([number.get(word, 0) for word in words[CONTEXT:]], np.int32)
    return np.stack(columns, axis=1), labels


def batches(data: Arrays, seed: int = 0) -> Iterator[Arrays]:
    """Endless random batches."""
    rng = np.random.default_rng(seed)
    while True:
        at = rng.integers(0, len(data[1]), BATCH)
        yield data[0][at], data[1][at]


def unsharded(data: Arrays, steps: int) -> list[float]:
    """The losses of a plain loop without servers, on one device."""

    @jax.jit
    def step(params: Params, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = make_params()
    state = optimizer.init(params)
    losses = []
    for _, batch in zip(range(steps), batches(data), strict=False):
        params, state, value = step(params, state, *batch)
        losses.append(float(value))
    return losses


def use_devices(count: int) -> None:
    """Simulate `count` CPU devices; must come before JAX starts."""
    jax.config.update("jax_num_cpu_devices", count)


def main() -> None:
    """Train with the table on servers, and compare with the plain loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told = os.environ.get  # by `planner launch`, where that runs this
    parser.add_argument("--steps", type=int, default=60, help="steps to train")
    servers, backend = told("MESHWRIGHT_PS_SERVERS", 2), told("MESHWRIGHT_PS_BACKEND", "local")
    parser.add_argument("--servers", type=int, default=servers, help="parameter servers")
    parser.add_argument("--backend", choices=("local", "ray"), default=backend)
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices of the worker")
    asked = parser.parse_args()
    data, steps = corpus(), asked.steps
    use_devices(asked.devices)

    from executor.parameter_server import hybrid, train

    def loop(server: Any) -> list[float]:
        if asked.backend == "ray":  # a process of its own
            use_devices(asked.devices)
        run = hybrid(loss, make_params(), optimizer, server=server, placement="auto")
        losses = []
        for k, batch in zip(range(steps), batches(data), strict=False):
            losses.append(float(run(*batch)))
            if k == 0:
                print(run.placement, f"the rest: mesh {run.plan.mesh}", sep="\n")
            if k % 10 == 0 or k == steps - 1:
                print(f"step {k:4d}  loss {losses[-1]:.4f}")
        return losses

    done = train(loop, workers=1, servers=asked.servers, optimizer=optimizer, backend=asked.backend)
    expected = unsharded(data, steps)
    apart = max(abs(a - b) for a, b in zip(done.returned[0], expected, strict=True))
    print(f"unsharded: last loss {expected[-1]:.4f}")
    print(f"largest difference from the unsharded losses: {apart:.1e} (over {steps} steps)")
    if not apart <= 1e-2:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
