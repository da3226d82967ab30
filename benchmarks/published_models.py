"""Decoder train steps for published runs: shapes only, sharded by marks and pins."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from published_case import Case, is_leaf, mark, of_layer, parameters
from published_layers import gathered, layer, linear, lookup, needed, norm

Array = jax.Array
Built = tuple[Callable[..., Any], tuple[Any, ...], dict[str, PartitionSpec]]

# Values that a recompute policy keeps; everything else of a layer is computed again.
DOTS = ("query", "key", "value", "out", "gate", "up", "down")
KEPT = {
    "selective-op": ("query", "value", "mixed", "gate", "down"),  # torchtitan: every other product
    "minimal": DOTS,
    "minimal_flash": (*DOTS, "mixed"),
}
OFFLOADED = {  # kept in the memory of the host: MaxText's names of its recipes for v6e
    "offload": ("input", "query", "key", "value"),
    "offload+out": ("input", "query", "key", "value", "out"),
}


def loss(params: Any, tokens: Array, targets: Array, c: Case) -> Array:
    """Mean cross-entropy of the next token."""
    m, d, k = c.model, c.degrees, c.kernels
    specs = parameters(c)
    seq = d.on("context", "model") if d.sequence else d.on("context")
    low = "bfloat16" if k.matmul.startswith("float8") else k.matmul
    between = d.spec(d.batch, seq, None)
    x = mark(lookup(params["embed"], tokens, specs["embed"][1], specs["embed"][2], low), between)
    if m.positions:
        x = k.stop(x + params["position"].astype(low))
    x = mark(_layers(x, params["layers"], between, c), between)
    x = norm(x, params, "norm", _plain(c))
    x = gathered(x, d.spec(d.batch, d.on("context"), None), between)
    name = "embed" if m.tied else "head"
    plain = dataclasses.replace(k, matmul=low)
    logits = linear("bsd,vd->bsv", x, params[name], specs[name][1], specs[name][2], plain, "logits")
    logits = mark(logits, d.spec(d.batch, d.on("context"), d.on("model")))

    def sure(row: Array, word: Array) -> Array:
        wide = k.stop(row.astype(jnp.float32))
        return k.stop(wide - jax.nn.logsumexp(wide))[word]

    # mapped over tokens, a microbatch of one sequence is traced as one of several is
    return -jnp.mean(jax.vmap(jax.vmap(sure))(logits, targets))


def _layers(x: Array, params: Any, between: Any, c: Case) -> Array:
    """All layers, scanned where their parameters are stacked."""
    specs = of_layer(c)

    def run(x: Array, p: Any) -> Array:
        y = mark(layer(checkpoint_name(x, "input"), p, specs, c), between)
        return needed(y) if c.recompute == "whole" else y

    once: Any = run
    if c.recompute in ("full", "whole"):
        once = jax.checkpoint(run)
    elif c.recompute in OFFLOADED:
        once = jax.checkpoint(run, policy=_to_host(OFFLOADED[c.recompute]))
    elif c.recompute != "none":
        kept = jax.checkpoint_policies.save_only_these_names(*KEPT[c.recompute])
        once = jax.checkpoint(run, policy=kept)
    if not c.unrolled:
        return jax.lax.scan(lambda x, p: (once(x, p), None), x, params)[0]  # type: ignore[no-any-return]
    for p in params:
        x = once(x, p)
    return x


def _to_host(names: tuple[str, ...]) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )


def _plain(c: Case) -> Case:
    return dataclasses.replace(c, model=dataclasses.replace(c.model, bias=False))


def gradients(c: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(function, arguments) of a step's gradients alone."""
    tokens = jax.ShapeDtypeStruct((c.batch, c.model.seq), jnp.int32)

    def function(params: Any, tokens: Array, targets: Array) -> Any:
        return jax.grad(loss)(params, tokens, targets, c)

    return function, (_shapes(parameters(c), c.kernels.stored), tokens, tokens)


def train_step(c: Case) -> Built:
    """(function, arguments, pins) of a step with AdamW (Loshchilov and Hutter 2019).

    Parameters used in 16 bits have a float32 copy beside them. Under ZeRO-1 that copy and the
    moments are sharded, and the parameters are gathered after the update.
    """
    tree = parameters(c)
    low = c.kernels.stored != "float32"
    used = [x[2] for x in jax.tree.leaves(tree, is_leaf=is_leaf)]

    def step(state: Any, tokens: Array, targets: Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["w" if low else "p"], tokens, targets, c)
        parts = jax.tree.map(_adamw, state["p"], state["m"], state["v"], grads)
        three = jax.tree.structure((0, 0, 0))
        p, m, v = jax.tree.transpose(jax.tree.structure(grads), three, parts)
        new = {"p": p, "m": m, "v": v}
        if low:
            leaves, structure = jax.tree.flatten(p)
            pairs = zip(leaves, used, strict=True)
            cast = [mark(x.astype(c.kernels.stored), spec) for x, spec in pairs]
            new["w"] = jax.tree.unflatten(structure, cast)
        return new, value

    state = dict.fromkeys("pmv", _shapes(tree, "float32"))
    if low:
        state["w"] = _shapes(tree, c.kernels.stored)
    tokens = jax.ShapeDtypeStruct((c.batch, c.model.seq), jnp.int32)
    pins: dict[str, PartitionSpec] = {}
    for name in state:
        pins |= _pins(f"[0]['{name}']", tree, 2 if name == "w" else 3)
    for place in () if c.degrees.free else (1, 2):
        pins[rf"^\[{place}\]"] = PartitionSpec(c.degrees.batch, c.degrees.on("context"))
    return step, (state, tokens, tokens), pins


def _adamw(p: Array, m: Array, v: Array, g: Array) -> tuple[Array, Array, Array]:
    g = g.astype(jnp.float32)
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return p - 3e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v


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
