"""Long sequences for 8 v5e, compiled ahead of time: temporaries with and without chunks.

    python benchmarks/long_context.py [--tokens 16384]

Needs the extra ``aot-tpu``; nothing runs. One attention (8 heads of 128, causal, with its backward
pass) whose tokens are split over the devices, and two layers of a Llama-like decoder of 1B with one
sequence. Target: temporaries at most 0.3 of those of "XLA alone": ``jax.jit`` of the attention as
written, with its arguments and results split by tokens and no plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import example
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from costmodels import parse_cluster
from executor.verify.aot import compile_function, compile_step, devices_of
from planner import StoredAs, make_plan
from planner.errors import MeshwrightError
from planner.graph.trace import trace
from planner.recipes import rewritten

CLUSTER = "v5e:2x4"
HEADS, WIDTH = 8, 128


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """[1, tokens, heads, width] each; a loss and its gradients."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
        mask = jnp.tril(jnp.ones(scores.shape[2:], bool))
        weights = jax.nn.softmax(jnp.where(mask, scores / math.sqrt(WIDTH), -1e30), -1)
        out = jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


def programs(tokens: int) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """By name, a step, the shapes of its arguments, and options."""
    x = jax.ShapeDtypeStruct((1, tokens, HEADS, WIDTH), jnp.bfloat16)
    split = {"mesh": "tokens=8", "shardings": {r"\[[012]\]": StoredAs(P(None, "tokens"))}}
    llama = example("llama")
    small = dataclasses.replace(llama.SIZES["1b"], layers=2, batch=1, seq=tokens, vocab=32768)
    make_state, step, batch = llama.build(small)
    return {
        "attention": (attention, (x, x, x), split),
        "llama, 2 layers": (step, (jax.eval_shape(make_state), batch), {"donate_argnums": 0}),
    }


def alone(tokens: int) -> str:
    """The row of the attention without a plan."""
    mesh = Mesh(np.array(devices_of(parse_cluster(CLUSTER))), ("tokens",))
    split, whole = NamedSharding(mesh, P(None, "tokens")), NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((1, tokens, HEADS, WIDTH), jnp.bfloat16, sharding=split)
    jitted = jax.jit(attention, out_shardings=(whole, (split,) * 3))
    found = compile_function(jitted, (x, x, x), parse_cluster(CLUSTER))
    return f"{'XLA alone':16} {'':6} {found.temp_bytes / 1e6:12.0f} {found.peak_bytes / 1e6:9.0f}"


def line(name: str, program: Any, chunks: int) -> str:
    """One row of the table."""
    step, args, options = program
    donated = options.get("donate_argnums", ())
    try:
        plan = make_plan(step, *args, cluster=CLUSTER, chunks=chunks, memory="2TB", **options)
        traced = trace(rewritten(step, args, plan.recipe), args)
        found = compile_step(traced, plan, parse_cluster(CLUSTER), donate_argnums=donated)
    except MeshwrightError as error:
        return f"{name:16} {chunks:6}  {str(error).splitlines()[0]}"
    planned, step_s = plan.prediction.peak_bytes / 1e6, plan.prediction.step_s
    return (
        f"{name:16} {chunks:6} {found.temp_bytes / 1e6:12.0f} {found.peak_bytes / 1e6:9.0f} "
        f"{planned:9.0f} {1e3 * step_s:9.1f}"
    )


def main() -> None:
    """Print a line as soon as it is known."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384)
    tokens = parser.parse_args().tokens
    print(
        f"{'program':16} {'chunks':>6} {'temporaries':>12} {'peak':>9} {'planned':>9} {'step':>9}"
    )
    print(f"{'':16} {'':6} {'MB':>12} {'MB':>9} {'MB':>9} {'ms':>9}")
    print(alone(tokens), flush=True)
    for name, program in programs(tokens).items():
        for chunks in (1, 8, 32):
            print(line(name, program, chunks), flush=True)


if __name__ == "__main__":
    main()
