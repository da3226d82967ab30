"""Steps with kernels and shard_map regions, planned and compiled ahead of time.

Per row: bytes that a device sends, by kind of collective, and peak memory, planned / found in the
compiled module. Needs the compilers' packages (``pip install 'meshwright[aot-tpu,aot-gpu]'``).

    python benchmarks/kernels.py
    python benchmarks/kernels.py --cases flash experts
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import common  # noqa: F401
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from rich.console import Console
from rich.table import Table

from costmodels import parse_cluster
from executor.verify.aot import compile_step
from executor.verify.predictions import planned_wire
from planner import make_plan
from planner.graph.trace import trace

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
BATCH, TOKENS, WIDTH, HEADS, LAYERS = 16, 2048, 4096, 32, 2
DEPTH = WIDTH // HEADS
EXPERTS, WIDE = 8, 4096


def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    made = flash_attention(q, k, v, causal=True, sm_scale=DEPTH**-0.5)
    return made  # type: ignore[no-any-return]


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))] * HEADS)
    kernel = kernels.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(q * DEPTH**-0.5, k, v)  # type: ignore[no-any-return]


def triton(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.attention import mha

    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    options: dict[str, Any] = {"sm_scale": DEPTH**-0.5, "causal": True}
    return mha(q, k, v, None, backward_pass_impl="triton", **options).swapaxes(1, 2)  # type: ignore[no-any-return]


def mixture(x: jax.Array, gate: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
    """Top-1 experts of one device's tokens, sent to the experts and back."""
    room = x.shape[0] // EXPERTS * 2
    scores = jax.nn.softmax((x @ gate).astype(jnp.float32))
    expert, weight = jnp.argmax(scores, -1), jnp.max(scores, -1)
    hot = jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32)
    place = (jnp.cumsum(hot, 0) * hot).sum(-1) - 1
    there = (place < room)[:, None]
    at = expert, jnp.minimum(place, room - 1)
    sent = jnp.zeros((EXPERTS, room, x.shape[1]), x.dtype).at[at].add(jnp.where(there, x, 0))
    sent = jax.lax.all_to_all(sent, "expert", 0, 1, tiled=True)
    made = jax.nn.silu(jnp.einsum("ecd,edf->ecf", sent, wi.astype(x.dtype)))
    made = jnp.einsum("ecf,efd->ecd", made, wo.astype(x.dtype))
    made = jax.lax.all_to_all(made, "expert", 1, 0, tiled=True)
    return made[at] * jnp.where(there, weight[:, None], 0).astype(x.dtype)


def decoder(attention: Attention, experts: bool = False) -> tuple[Any, ...]:
    """A train step and its arguments: attention, and an MLP or experts in a ``shard_map``."""
    P, half = PartitionSpec, jnp.bfloat16
    dense = {"in": (WIDTH, 4 * WIDTH), "out": (4 * WIDTH, WIDTH)}
    sparse = {"gate": (WIDTH, EXPERTS), "wi": (EXPERTS, WIDTH, WIDE), "wo": (EXPERTS, WIDE, WIDTH)}
    shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | (sparse if experts else dense)
    if experts:
        mesh = AbstractMesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
        all_axes = P(("data", "expert"))
        options: dict[str, Any] = {"mesh": mesh, "out_specs": all_axes, "check_vma": False}
        attention = jax.shard_map(attention, in_specs=(all_axes,) * 3, **options)
        specs = (all_axes, P(), P("expert"), P("expert"))
        mixed = jax.shard_map(mixture, in_specs=specs, **options)

    def block(x: jax.Array, p: Any) -> jax.Array:
        def heads(name: str) -> jax.Array:
            made = (x @ p[name].astype(half)).reshape(BATCH, TOKENS, HEADS, DEPTH)
            return made.swapaxes(1, 2)

        made = attention(*map(heads, "qkv")).swapaxes(1, 2).reshape(BATCH, TOKENS, WIDTH)
        x = x + made @ p["o"].astype(half)
        if experts:
            rows = x.reshape(-1, WIDTH)
            return x + mixed(rows, p["gate"].astype(half), p["wi"], p["wo"]).reshape(x.shape)
        return x + jax.nn.silu(x @ p["in"].astype(half)) @ p["out"].astype(half)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["table"].astype(half)[tokens]
        for p in params["layers"]:
            x = block(x, p)
        logits = (x @ params["table"].astype(half).T).astype(jnp.float32)
        right = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - right)

    def step(params: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda a, g: a - 1e-3 * g, params, grads), value

    layer = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    table = jax.ShapeDtypeStruct((32000, WIDTH), jnp.float32)
    params = {"table": table, "layers": [layer] * LAYERS}
    return step, params, jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)


@dataclass(frozen=True)
class Case:
    """A step, where it is compiled, and the mesh that is asked for."""

    make: Callable[[], tuple[Any, ...]]
    cluster: str
    mesh: str | None = None


CASES = {
    "flash": Case(lambda: decoder(flash), "v5p:2x2x2"),
    "splash": Case(lambda: decoder(splash), "v5p:2x2x2", "data=2,model=4"),
    "triton": Case(lambda: decoder(triton), "h100:8"),
    "experts": Case(lambda: decoder(flash, experts=True), "v5p:2x2x2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    out = Table(title="MB sent per device and step, GB at the peak: planned / found")
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    for column in ("case", "cluster, mesh", *kinds, "peak", "fallbacks"):
        out.add_column(column)
    for name in parser.parse_args().cases:
        case = CASES[name]
        step, *args = case.make()
        plan = make_plan(step, *args, cluster=case.cluster, mesh=case.mesh, donate_argnums=0)
        cluster = parse_cluster(case.cluster)
        compiled = compile_step(trace(step, args), plan, cluster, donate_argnums=0)
        found = {k: t.wire_bytes for k, t in compiled.module.by_kind().items()}
        planned = {k: sent for k, (_, sent) in planned_wire(plan).items()}
        sent = [f"{planned.get(k, 0) / 1e6:.0f} / {found.get(k, 0) / 1e6:.0f}" for k in kinds]
        peak = f"{plan.prediction.peak_bytes / 1e9:.2f} / {compiled.peak_bytes / 1e9:.2f}"
        where = f"{case.cluster}, {plan.mesh}"
        out.add_row(name, where, *sent, peak, str(len(plan.fallbacks)))
    Console(width=150).print(out)


if __name__ == "__main__":
    main()
