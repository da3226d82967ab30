"""Decoder train steps for published runs: shapes only, sharded by marks.

One microbatch's gradients (``microbatch``) and one optimizer step (``update``) are traced apart, so
that gradient accumulation is a multiplication.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from published_case import Case, is_leaf, mark, parameters
from published_layers import gathered, layer, linear, lookup, needed, norm

Array = jax.Array

# Values that a recompute policy keeps; everything else of a layer is computed again.
DOTS = ("query", "key", "value", "out", "gate", "up", "down")
KEPT = {
    "selective-op": ("query", "value", "mixed", "gate", "down"),  # torchtitan: every other product
    "minimal": DOTS,
    "minimal_flash": (*DOTS, "mixed"),
    "offload": ("query", "key", "value"),
    "offload+out": ("query", "key", "value", "out"),
}


def loss(params: Any, tokens: Array, targets: Array, c: Case) -> Array:
    m, d, k = c.model, c.degrees, c.kernels
    specs = parameters(c)
    seq = d.on("context", "model") if d.sequence else d.on("context")
    low = "bfloat16" if k.matmul.startswith("float8") else k.matmul
    between = d.spec(d.batch, seq, None)
    x = mark(lookup(params["embed"], tokens, specs["embed"][1], specs["embed"][3], low), between)
    if m.positions:
        x = k.stop(x + params["position"].astype(low))

    def run(x: Array, p: Any, spec: Any) -> Array:
        y = mark(layer(x, p, spec, c), between)
        return needed(y) if c.recompute == "whole" else y

    for p, spec in zip(params["layers"], specs["layers"], strict=True):
        once = functools.partial(run, spec=spec)
        if c.recompute in ("full", "whole"):
            once = jax.checkpoint(once)
        elif c.recompute != "none":
            names = KEPT[c.recompute]
            once = jax.checkpoint(
                once, policy=jax.checkpoint_policies.save_only_these_names(*names)
            )
        x = once(x, p)
    x = norm(x, params, "norm", _plain(c))
    x = gathered(x, d.spec(d.batch, d.on("context"), None), between)
    name = "embed" if m.tied else "head"
    plain = dataclasses.replace(k, matmul=low)
    logits = linear("bsd,vd->bsv", x, params[name], specs[name][1], specs[name][3], plain, "logits")
    logits = mark(logits, d.spec(d.batch, d.on("context"), d.on("model")))
    wide = k.stop(logits.astype(jnp.float32))
    sure = k.stop(wide - jax.nn.logsumexp(wide, axis=-1, keepdims=True))
    return -jnp.mean(jnp.take_along_axis(sure, targets[..., None], axis=-1))


def _plain(c: Case) -> Case:
    return dataclasses.replace(c, model=dataclasses.replace(c.model, bias=False))


def microbatch(c: Case) -> tuple[Any, tuple[Any, ...], dict[str, PartitionSpec]]:
    """(function, arguments, pins) of one microbatch's gradients; added to sums if accumulated."""
    tree = parameters(c)
    shapes = _shapes(tree, c.kernels.stored)
    tokens = jax.ShapeDtypeStruct((c.batch, c.model.seq), jnp.int32)

    def gradients(params: Any, sums: Any, tokens: Array, targets: Array) -> Any:
        grads = jax.grad(loss)(params, tokens, targets, c)
        return jax.tree.map(jnp.add, sums, grads) if c.accumulate else grads

    sums = shapes if c.accumulate else None
    pins = _pins("[0]", tree, 2)
    if c.accumulate:
        pins |= _pins("[1]", tree, 3)
    for place in () if c.degrees.free else (2, 3):
        pins[rf"^\[{place}\]"] = PartitionSpec(c.degrees.batch, c.degrees.on("context"))
    return gradients, (shapes, sums, tokens, tokens), pins


def update(c: Case) -> tuple[Any, tuple[Any, ...], dict[str, PartitionSpec]]:
    """(function, arguments, pins) of AdamW (Loshchilov and Hutter 2019).

    Parameters stored in 16 bits have a float32 copy beside them. Under ZeRO-1 that copy and the
    moments are sharded, and the parameters are gathered after the step.
    """
    tree = parameters(c)
    low = c.kernels.stored != "float32"
    tied = [x[2] for x in jax.tree.leaves(tree, is_leaf=is_leaf)]

    def step(state: Any, grads: Any) -> Any:
        def one(p: Array, m: Array, v: Array, g: Array) -> Any:
            g = g.astype(jnp.float32)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            return p - 3e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v

        parts = jax.tree.map(one, state["p"], state["m"], state["v"], grads)
        p, m, v = jax.tree.transpose(
            jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), parts
        )
        if not low:
            return {"p": p, "m": m, "v": v}
        leaves, structure = jax.tree.flatten(p)
        used = [
            mark(x.astype(c.kernels.stored), spec) for x, spec in zip(leaves, tied, strict=True)
        ]
        return {"p": p, "m": m, "v": v}, jax.tree.unflatten(structure, used)

    state = dict.fromkeys("pmv", _shapes(tree, "float32"))
    grads = _shapes(tree, c.kernels.stored)
    pins: dict[str, PartitionSpec] = {}
    for name in "pmv":
        pins |= _pins(f"[0]['{name}']", tree, 3)
    pins |= _pins("[1]", tree, 3)
    return step, (state, grads), pins


def _shapes(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x[0], dtype), tree, is_leaf=is_leaf)


def _pins(root: str, tree: Any, which: int) -> dict[str, PartitionSpec]:
    """Sharding by argument path of all matrices; vectors are left to the search."""
    out = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        if len(leaf[0]) > 1 and leaf[which]:
            name = "^" + re.escape(root + jax.tree_util.keystr(path)) + "$"
            out[name] = PartitionSpec(*leaf[which])
    return out
