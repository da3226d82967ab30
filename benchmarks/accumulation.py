"""Microbatches from the plain step against manual gradient accumulation, on 8 virtual CPU devices.

    python benchmarks/accumulation.py [--parts 4] [--rounds 14]

``examples/gpt.py`` with 32 examples, planned on the same mesh both ways. Steps are interleaved in
random order; the ratio is of medians. Target: at most 1.05.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import example
from flax import nnx

from executor import parallelize

MESHES = ("data=8", "data=4,model=2")


def manual_step(gpt: Any, config: Any, parts: int) -> Any:
    """The step of ``examples/gpt.py`` with a loop over microbatches in it."""
    optimizer = optax.adamw(1e-3, weight_decay=0.01)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, nnx.Rngs(0))))

    def loss_of(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(graphdef, params)(batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.mean(losses)

    def step(state: Any, batch: Any) -> Any:
        def one(carry: Any, part: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_of)(state["params"], part)
            return (carry[0] + loss, jax.tree.map(jnp.add, carry[1], grads)), None

        def cut(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)

        start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state["params"]))
        (loss, grads), _ = jax.lax.scan(one, start, jax.tree.map(cut, batch))
        grads = jax.tree.map(lambda g: g / parts, grads)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss / parts}

    return step


def main() -> None:
    """Print the medians and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=14)
    options = parser.parse_args()
    gpt = example("gpt")
    config = gpt.Config(batch=32)
    make_state, step, _ = gpt.build(config)
    batch = next(gpt.batches(config=config))
    hand = manual_step(gpt, config, options.parts)
    entries: dict[tuple[str, str], list[Any]] = {}
    for mesh in MESHES:
        common: Any = {"donate_argnums": 0, "mesh": mesh}
        for name, run in (
            ("planned", parallelize(step, microbatches=options.parts, **common)),
            ("manual", parallelize(hand, microbatches=1, remat="none", **common)),
        ):
            state = make_state()
            for _ in range(2):
                state, metrics = run(state, batch)
            print(f"{mesh}  {name}: loss {float(metrics['loss']):.6f} after two steps")
            entries[mesh, name] = [run, state, []]
    order = list(entries)
    for _ in range(options.rounds):
        random.shuffle(order)
        for key in order:
            run, state, times = entries[key]
            begun = time.perf_counter()
            entries[key][1], metrics = jax.block_until_ready(run(state, batch))
            times.append(time.perf_counter() - begun)
    for mesh in MESHES:
        ours, theirs = (statistics.median(entries[mesh, n][2]) for n in ("planned", "manual"))
        print(
            f"{mesh}: {1e3 * ours:.1f} ms planned, {1e3 * theirs:.1f} manual: {ours / theirs:.3f}"
        )


if __name__ == "__main__":
    main()
