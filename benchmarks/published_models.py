"""Decoder train steps for published runs: shapes only, sharded by marks.

One microbatch's gradients (``microbatch``) and one optimizer step (``update``) are traced apart, so
that gradient accumulation is a multiplication. Every product goes through ``linear``, whose
backward pass is written out: it says where a ZeRO-3 parameter is gathered (once forward, once
backward; Rajbhandari et al. 2020, "ZeRO") and where its gradient is reduced. Tensor parallelism is
Megatron's (Shoeybi et al. 2019): column- then row-parallel, optionally with sequence parallelism
(Korthikanti et al. 2022).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from planner import shard

Array = jax.Array
Spec = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder. ``head_dim`` times ``heads`` need not be ``hidden``."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq: int
    gated: bool
    positions: bool = True
    """Learned positions (GPT); otherwise rotary ones (Su et al. 2021)."""
    bias: bool = False
    tied: bool = True


@dataclasses.dataclass(frozen=True)
class Degrees:
    """Devices along each kind of parallelism, and what is done with them.

    The batch is split over three of them: ``data`` are replicas, over ``zero`` the optimizer's state
    is sharded (ZeRO-1), over ``fsdp`` the parameters are (ZeRO-3). ``context`` splits the sequence,
    ``model`` is tensor parallelism; with ``sequence``, it splits activations between blocks too.
    """

    data: int = 1
    zero: int = 1
    fsdp: int = 1
    context: int = 1
    model: int = 1
    sequence: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """Axes with more than one device, slowest first."""
        sizes = {n: getattr(self, n) for n in ("data", "zero", "fsdp", "context", "model")}
        return {n: k for n, k in sizes.items() if k > 1} or {"data": 1}

    def on(self, *names: str) -> Any:
        """The entry of a dimension that is split over those of ``names`` that are in use."""
        used = tuple(n for n in names if getattr(self, n) > 1)
        return used or None

    @property
    def batch(self) -> Any:
        return self.on("data", "zero", "fsdp")

    @property
    def stored(self) -> Any:
        """Axes over which ZeRO-3 stores a parameter."""
        return self.on("fsdp", "context") if self.fsdp * self.context > 1 else None


@dataclasses.dataclass(frozen=True)
class Kernels:
    """How a framework turns the step into kernels.

    ``fused``: elementwise chains are one kernel (XLA, torch.compile); otherwise every step of a
    chain reads and writes memory (PyTorch eager). ``matmul``: dtype of the products' operands.
    ``reduced``: dtype in which gradients are reduced. ``stored``: dtype of stored parameters.
    """

    fused: bool = True
    attention: str = "dense"
    matmul: str = "bfloat16"
    reduced: str = "bfloat16"
    stored: str = "float32"

    def stop(self, x: Array) -> Array:
        """The end of a kernel, where kernels are not fused."""
        return x if self.fused else jax.lax.optimization_barrier(x)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh: all that decides the trace. ``batch`` counts sequences on the mesh."""

    model: Decoder
    degrees: Degrees
    kernels: Kernels
    recompute: str
    batch: int
    accumulate: bool = False


# Values that a recompute policy keeps; everything else of a layer is computed again.
DOTS = ("query", "key", "value", "out", "gate", "up", "down")
KEPT = {
    "selective-op": ("query", "value", "mixed", "gate", "down"),  # torchtitan: every other product
    "minimal": DOTS,
    "minimal_flash": (*DOTS, "mixed"),
    "offload": ("query", "key", "value"),
    "offload+out": ("query", "key", "value", "out"),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5, 6))
def linear(eq: str, x: Array, w: Array, used: Spec, stored: Spec, k: Kernels, name: str) -> Array:
    """``einsum(eq, x, w)``; w is gathered to ``used``, its gradient is left as ``stored``."""
    wide = shard(w.astype(k.matmul), *used)
    y = jnp.einsum(eq, x.astype(k.matmul), wide, preferred_element_type=x.dtype)
    return y


def _forward(
    eq: str, x: Array, w: Array, used: Spec, stored: Spec, k: Kernels, name: str
) -> tuple[Array, tuple[Array, Array]]:
    return linear(eq, x, w, used, stored, k, name), (x, w)


def _backward(
    eq: str, used: Spec, stored: Spec, k: Kernels, name: str, kept: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    x, w = kept
    ins, out = eq.split("->")
    a, b = ins.split(",")
    wide = shard(w.astype(k.matmul), *used)
    low = g.astype(k.matmul)
    dx = jnp.einsum(f"{out},{b}->{a}", low, wide, preferred_element_type=x.dtype)
    dw = jnp.einsum(f"{a},{out}->{b}", x.astype(k.matmul), low, preferred_element_type=k.reduced)
    return dx, shard(dw, *stored).astype(w.dtype)


linear.defvjp(_forward, _backward)


def parameters(c: Case) -> dict[str, Any]:
    """Every parameter's (shape, sharding in use, stored, of gradient and optimizer state)."""
    m, d = c.model, c.degrees
    tp, z, zero = d.on("model"), d.stored, d.on("zero")

    def of(shape: tuple[int, ...], split: int | None, over: int) -> tuple[Any, Spec, Spec, Spec]:
        matrix = len(shape) > 1
        used = [tp if i == split else None for i in range(len(shape))]
        stored = [z if i == over and matrix else u for i, u in enumerate(used)]
        state = [zero if i == over and matrix and zero else u for i, u in enumerate(stored)]
        return shape, tuple(used), tuple(stored), tuple(state)

    h, q, kv = m.hidden, (m.heads, m.head_dim), (m.kv_heads, m.head_dim)
    layer = {
        "norm1": of((h,), None, 0),
        "norm2": of((h,), None, 0),
        "q": of((h, *q), 1, 0),
        "k": of((h, *kv), 1, 0),
        "v": of((h, *kv), 1, 0),
        "o": of((*q, h), 0, 2),
        "up": of((h, m.ffn), 1, 0),
        "down": of((m.ffn, h), 0, 1),
    }
    if m.gated:
        layer["gate"] = of((h, m.ffn), 1, 0)
    if m.bias:
        layer |= {"q_b": of(q, 0, -1), "k_b": of(kv, 0, -1), "v_b": of(kv, 0, -1)}
        layer |= {"o_b": of((h,), None, 0), "up_b": of((m.ffn,), 0, -1)}
        layer |= {"down_b": of((h,), None, 0), "norm1_b": of((h,), None, 0)}
        layer |= {"norm2_b": of((h,), None, 0)}
    out: dict[str, Any] = {"embed": of((m.vocab, h), 0, 1), "norm": of((h,), None, 0)}
    if m.positions:
        out["position"] = of((m.seq, h), None, -1)
    if not m.tied:
        out["head"] = of((m.vocab, h), 0, 1)
    out["layers"] = [layer] * m.layers
    return out


def is_leaf(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 4


def count_parameters(model: Decoder) -> int:
    """Number of parameters."""
    tree = parameters(Case(model, Degrees(), Kernels(), "none", 1))
    return sum(math.prod(x[0]) for x in jax.tree.leaves(tree, is_leaf=is_leaf))


def norm(x: Array, p: Any, name: str, c: Case) -> Array:
    """LayerNorm where there are biases or learned positions, RMSNorm otherwise."""
    stop = c.kernels.stop
    wide = x.astype(jnp.float32)
    if not c.model.gated:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        rate = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
        y = wide * rate * p[name]
        return stop((y + p[name + "_b"] if c.model.bias else y).astype(x.dtype))
    wide = stop(wide)
    rate = jax.lax.rsqrt(jnp.mean(stop(wide * wide), axis=-1, keepdims=True) + 1e-5)
    return stop(stop(stop(wide * rate).astype(x.dtype)) * p[name].astype(x.dtype))


def rotate(x: Array, c: Case) -> Array:
    """Rotary positions on [batch, seq, heads, head]."""
    stop = c.kernels.stop
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 5e5 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    wide = stop(x.astype(jnp.float32))
    a, b = wide[..., :half], wide[..., half:]
    return stop(stop(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)).astype(x.dtype))


@jax.jit
def flash_attention_causal(q: Array, k: Array, v: Array) -> Array:
    """Priced as one fused kernel (Dao 2023), half of whose products the mask saves."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def attend(q: Array, k: Array, v: Array, c: Case) -> Array:
    """Causal attention of q [b, s, heads, d] to k, v [b, t, kv_heads, d]."""
    stop, m = c.kernels.stop, c.model
    if m.kv_heads != m.heads:
        k, v = (jnp.repeat(t, m.heads // m.kv_heads, axis=2) for t in (k, v))
    if c.kernels.attention == "flash":
        return flash_attention_causal(q, k, v)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    wide = scores.astype(jnp.float32) * m.head_dim**-0.5
    weights = stop(jax.nn.softmax(jnp.where(causal, wide, -1e30), axis=-1).astype(q.dtype))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def layer(x: Array, p: Any, spec: Any, c: Case) -> Array:
    """One block; x is [batch, seq, hidden]."""
    m, d, k = c.model, c.degrees, c.kernels
    tp = d.on("model")
    between = (d.batch, d.on("context", "model") if d.sequence else d.on("context"), None)
    inside = (d.batch, d.on("context"))

    def apply(eq: str, x: Array, name: str, label: str, out: Spec) -> Array:
        y = linear(eq, x, p[name], spec[name][1], spec[name][3], k, label)
        y = checkpoint_name(shard(y, *out), label)
        return k.stop(y + p[name + "_b"].astype(y.dtype)) if m.bias else y

    y = shard(norm(k.stop(x), p, "norm1", c), *inside)
    heads = (*inside, tp)
    q = apply("bsd,dhk->bshk", y, "q", "query", heads)
    key = apply("bsd,dhk->bshk", y, "k", "key", heads)
    v = apply("bsd,dhk->bshk", y, "v", "value", heads)
    if not m.positions:
        q, key = rotate(q, c), rotate(key, c)
    if d.context > 1:  # every device sees all keys: the ring's volume
        key, v = (shard(t, d.batch, None, tp) for t in (key, v))
    mixed = checkpoint_name(shard(attend(q, key, v, c), *heads), "mixed")
    x = k.stop(x + apply("bshk,hkd->bsd", mixed, "o", "out", between))
    y = shard(norm(k.stop(x), p, "norm2", c), *inside)
    wide = (*inside, tp)
    up = apply("bsd,df->bsf", y, "up", "up", wide)
    if m.gated:
        up = k.stop(k.stop(jax.nn.silu(apply("bsd,df->bsf", y, "gate", "gate", wide))) * up)
    else:
        up = k.stop(jax.nn.gelu(up))
    return k.stop(x + apply("bsf,fd->bsd", shard(up, *wide), "down", "down", between))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def lookup(table: Array, tokens: Array, used: Spec, state: Spec, dtype: str) -> Array:
    """Rows of a table; its gradient is summed on every device and then reduced to ``state``."""
    return shard(table.astype(dtype), *used)[tokens]


def _lookup_forward(
    table: Array, tokens: Array, used: Spec, state: Spec, dtype: str
) -> tuple[Array, tuple[Array, Array]]:
    return lookup(table, tokens, used, state, dtype), (table, tokens)


def _lookup_backward(
    used: Spec, state: Spec, dtype: str, kept: tuple[Array, Array], g: Array
) -> tuple[Array, None]:
    table, tokens = kept
    summed = jnp.zeros(table.shape, dtype).at[tokens].add(g)
    return shard(summed, *state).astype(table.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def loss(params: Any, tokens: Array, targets: Array, c: Case) -> Array:
    m, d, k = c.model, c.degrees, c.kernels
    specs = parameters(c)
    seq = d.on("context", "model") if d.sequence else d.on("context")
    low = "bfloat16" if k.matmul.startswith("float8") else k.matmul
    x = shard(lookup(params["embed"], tokens, specs["embed"][1], specs["embed"][3], low), d.batch, seq, None)
    if m.positions:
        x = k.stop(x + params["position"].astype(low))

    def run(x: Array, p: Any, spec: Any) -> Array:
        return shard(layer(x, p, spec, c), d.batch, seq, None)

    for p, spec in zip(params["layers"], specs["layers"], strict=True):
        once = functools.partial(run, spec=spec)
        if c.recompute == "full":
            once = jax.checkpoint(once)
        elif c.recompute != "none":
            names = KEPT[c.recompute]
            once = jax.checkpoint(
                once, policy=jax.checkpoint_policies.save_only_these_names(*names)
            )
        x = once(x, p)
    x = shard(norm(x, params, "norm", _plain(c)), d.batch, d.on("context"), None)
    name = "embed" if m.tied else "head"
    plain = dataclasses.replace(k, matmul=low)
    logits = linear(
        "bsd,vd->bsv", x, params[name], specs[name][1], specs[name][3], plain, "logits"
    )
    logits = shard(logits, d.batch, d.on("context"), d.on("model"))
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
    for place in (2, 3):
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
            shard(x.astype(c.kernels.stored), *spec) for x, spec in zip(leaves, tied, strict=True)
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
        if len(leaf[0]) > 1:
            name = "^" + re.escape(root + jax.tree_util.keystr(path)) + "$"
            out[name] = PartitionSpec(*leaf[which])
    return out
