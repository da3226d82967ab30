"""Train steps of two decoders in plain JAX: shapes only, no data, no parameters computed.

``Llama``: grouped-query attention, rotary positions, RMSNorm, SwiGLU and an untied head, with the
sizes of the 8B model (Grattafiori et al., "The Llama 3 herd of models", 2024, table 3). ``GPT``:
learned positions, LayerNorm, GELU and a tied head, with the sizes of GPT-3 (Brown et al., 2020,
table 2.1). Both train with AdamW (Loshchilov and Hutter 2019); layers are unrolled (scanned for
``Llama(scan=True)``) and recomputed in the backward pass. Parameters and moments are float32,
activations bfloat16.

``examples/gpt.py`` is the same network as ``GPT`` in Flax, whose modules take minutes to build at
96 layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Llama:
    """Sizes of the 8B model; ``scan``: whether layers are stacked and run by ``lax.scan``."""

    layers: int = 32
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128256
    batch: int = 64
    seq: int = 4096
    scan: bool = False

    @property
    def head(self) -> int:
        return self.dim // self.heads


@dataclasses.dataclass(frozen=True)
class GPT:
    """Sizes of the 175B model; ``remat``: whether layers are computed again."""

    layers: int = 96
    dim: int = 12288
    heads: int = 96
    vocab: int = 50304
    batch: int = 512
    seq: int = 2048
    remat: bool = True


@dataclasses.dataclass(frozen=True)
class Mixtral(Llama):
    """Sizes of the 8x22B model (Mistral AI, 2024), layers scanned and not recomputed.

    Each token goes to its best ``top`` of ``experts``; an expert takes ``capacity`` times its fair
    share of a sequence, by one-hot einsums (GShard, Lepikhin et al. 2020).
    """

    layers: int = 56
    dim: int = 6144
    heads: int = 48
    ffn: int = 16384
    vocab: int = 32768
    batch: int = 2048
    scan: bool = True
    experts: int = 8
    top: int = 2
    capacity: float = 1.25


def parameters(c: Llama) -> dict[str, Any]:
    """Shapes of the parameters (float32)."""

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    many = (c.experts,) if isinstance(c, Mixtral) else ()
    layer = {
        "norm1": of(c.dim),
        "norm2": of(c.dim),
        "q": of(c.dim, c.heads, c.head),
        "k": of(c.dim, c.kv_heads, c.head),
        "v": of(c.dim, c.kv_heads, c.head),
        "o": of(c.heads, c.head, c.dim),
        "gate": of(*many, c.dim, c.ffn),
        "up": of(*many, c.dim, c.ffn),
        "down": of(*many, c.ffn, c.dim),
    }
    if many:
        layer["router"] = of(c.dim, *many)
    return {
        "embed": of(c.vocab, c.dim),
        "layers": {name: of(c.layers, *x.shape) for name, x in layer.items()}
        if c.scan
        else [dict(layer) for _ in range(c.layers)],
        "norm": of(c.dim),
        "head": of(c.dim, c.vocab),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (normed * scale).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021) on [batch, seq, heads, head]."""
    half = x.shape[-1] // 2
    rate = 500000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None] * rate
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(x: jax.Array, p: Any, c: Llama) -> jax.Array:
    """Causal grouped-query attention."""

    def project(weight: jax.Array) -> jax.Array:
        return jnp.einsum("bsd,dhk->bshk", x, weight.astype(x.dtype))

    q, k, v = rotate(project(p["q"])), rotate(project(p["k"])), project(p["v"])
    k, v = (jnp.repeat(t, c.heads // c.kv_heads, axis=2) for t in (k, v))
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k).astype(jnp.float32) / c.head**0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bhqs,bshk->bqhk", weights, v)
    return jnp.einsum("bqhk,hkd->bqd", mixed, p["o"].astype(x.dtype))


def feed_forward(x: jax.Array, p: Any) -> jax.Array:
    """SwiGLU."""
    gate, up, down = (p[name].astype(x.dtype) for name in ("gate", "up", "down"))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def mixture(x: jax.Array, p: Any, c: Mixtral) -> jax.Array:
    """SwiGLU experts; what finds no room is dropped. ``x`` is [batch, seq, dim]."""
    room = int(c.capacity * c.seq * c.top / c.experts)
    gates = jax.nn.softmax(jnp.einsum("bsd,de->bse", x.astype(jnp.float32), p["router"]))
    weights, chosen = jax.lax.top_k(gates, c.top)
    picks = jax.nn.one_hot(chosen, c.experts, dtype=jnp.int32)
    queue = picks.reshape(picks.shape[0], -1, c.experts)
    places = (jnp.cumsum(queue, axis=1) * queue - 1).reshape(picks.shape)
    slots = jax.nn.one_hot(places, room, dtype=x.dtype)  # no place: all zero
    combine = jnp.einsum("bst,bstec->bsec", weights.astype(x.dtype), slots)
    dispatch = jnp.sum(slots, axis=2)
    inputs = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
    gate, up, down = (p[name].astype(x.dtype) for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", inputs, gate))
    hidden *= jnp.einsum("ebcd,edf->ebcf", inputs, up)
    outputs = jnp.einsum("ebcf,efd->ebcd", hidden, down)
    return jnp.einsum("bsec,ebcd->bsd", combine, outputs)


def layer(x: jax.Array, p: Any, c: Llama) -> jax.Array:
    x = x + attention(rms_norm(x, p["norm1"]), p, c)
    y = rms_norm(x, p["norm2"])
    return x + (mixture(y, p, c) if isinstance(c, Mixtral) else feed_forward(y, p))


def loss_fn(params: Any, batch: Any, c: Llama) -> jax.Array:
    x = params["embed"][batch["tokens"]].astype(jnp.bfloat16)

    def once(x: jax.Array, p: Any) -> jax.Array:
        return layer(x, p, c)

    if not isinstance(c, Mixtral):
        once = jax.checkpoint(once)
    if c.scan:
        x, _ = jax.lax.scan(lambda x, p: (once(x, p), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = once(x, p)
    head = params["head"].astype(x.dtype)
    logits = (rms_norm(x, params["norm"]) @ head).astype(jnp.float32)
    return cross_entropy(logits, batch["targets"])


def gpt_parameters(c: GPT) -> dict[str, Any]:
    """Shapes of the parameters (float32)."""

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    norm = {"scale": of(c.dim), "bias": of(c.dim)}
    head = c.dim // c.heads
    layer = {
        "norm1": norm,
        "norm2": norm,
        **{name: of(c.dim, c.heads, head) for name in "qkv"},
        "o": of(c.heads, head, c.dim),
        "up": of(c.dim, 4 * c.dim),
        "up_bias": of(4 * c.dim),
        "down": of(4 * c.dim, c.dim),
        "down_bias": of(c.dim),
    }
    return {
        "embed": of(c.vocab, c.dim),
        "position": of(c.seq, c.dim),
        "layers": [layer] * c.layers,
        "norm": norm,
    }


def layer_norm(x: jax.Array, p: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return (scaled * p["scale"] + p["bias"]).astype(x.dtype)


def gpt_layer(x: jax.Array, p: Any, c: GPT) -> jax.Array:
    y = layer_norm(x, p["norm1"])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", y, p[n].astype(x.dtype)) for n in "qkv")
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k).astype(jnp.float32) * (c.heads / c.dim) ** 0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bhqs,bshk->bqhk", weights, v)
    x = x + jnp.einsum("bqhk,hkd->bqd", mixed, p["o"].astype(x.dtype))
    y = layer_norm(x, p["norm2"]) @ p["up"].astype(x.dtype) + p["up_bias"].astype(x.dtype)
    return x + jax.nn.gelu(y) @ p["down"].astype(x.dtype) + p["down_bias"].astype(x.dtype)


def gpt_loss(params: Any, batch: Any, c: GPT) -> jax.Array:
    x = (params["embed"][batch["tokens"]] + params["position"]).astype(jnp.bfloat16)

    def run(x: jax.Array, p: Any) -> jax.Array:
        return gpt_layer(x, p, c)

    for p in params["layers"]:
        x = (jax.checkpoint(run) if c.remat else run)(x, p)
    logits = layer_norm(x, params["norm"]) @ params["embed"].astype(x.dtype).T
    return cross_entropy(logits.astype(jnp.float32), batch["targets"])


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def build(c: Llama | GPT) -> tuple[Any, tuple[Any, Any]]:
    """The train step and the shapes of its arguments: (state, batch)."""
    loss_of: Any = loss_fn if isinstance(c, Llama) else gpt_loss

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch, c)
        count = state["count"] + 1

        def update(p: Any, g: Any, m: Any, v: Any) -> Any:
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            fair_m, fair_v = m / (1 - 0.9**count), v / (1 - 0.95**count)
            return p - 3e-4 * (fair_m / (jnp.sqrt(fair_v) + 1e-8) + 0.1 * p), m, v

        parts = jax.tree.map(update, state["params"], grads, state["m"], state["v"])
        p, m, v = jax.tree.transpose(
            jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), parts
        )
        return {"params": p, "m": m, "v": v, "count": count}, {"loss": loss}

    params = parameters(c) if isinstance(c, Llama) else gpt_parameters(c)
    state = {
        "params": params,
        "m": params,
        "v": params,
        "count": jax.ShapeDtypeStruct((), jnp.float32),
    }
    tokens = jax.ShapeDtypeStruct((c.batch, c.seq), jnp.int32)
    return train_step, (state, {"tokens": tokens, "targets": tokens})
