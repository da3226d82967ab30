"""Thirteen more train steps in plain JAX, each with manual plans.

Declared like those of ``compiled_models.py``: a name for every dimension of a parameter, and a
manual plan says per name which mesh axes split it. Seven are in
``compiled_unseen_more.py``; ``UNSEEN`` has all. They were written before any was compiled; what was
mended with them in view since is said beside their figures (docs/explanation/measurements.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from compiled_models import (
    DATA,
    ManualPlan,
    Model,
    Named,
    _attention,
    _block,
    _norm,
    _transformer,
    bf16,
    data_parallel,
    hint,
    tensor_parallel,
)
from compiled_unseen_more import (
    convnext,
    dlrm,
    graph_network,
    lstm,
    mixer,
    picked,
    state_space,
    two_towers,
)


def _half(p: Any) -> dict[str, Any]:
    """A block's weights in bfloat16, the gains of norms as they are."""
    return {k: v if k.startswith("norm") else bf16(v) for k, v in p.items()}


def _cross_attention(x: jax.Array, memory: jax.Array, p: Any) -> jax.Array:
    q = hint(jnp.einsum("bsd,dhe->bshe", x, p["query"]), "batch none a_heads none")
    kv = jnp.einsum("btd,dkhe->kbthe", memory, p["memory"])
    k, v = hint(kv, "none batch none a_heads none")
    scores = jnp.einsum("bshe,bthe->bhst", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    mixed = jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores).astype(x.dtype), v)
    return jnp.einsum("bshe,hed->bsd", hint(mixed, "batch none a_heads none"), p["cross"])


def encoder_decoder() -> Model:
    """Four encoder and four decoder layers of width 768 on 128 pairs, 512 and 128 tokens."""
    layers, width, heads, vocab, rows = 4, 768, 12, 32128, 128
    across = {
        "norm3": Named((width,), "none"),
        "query": Named((width, heads, width // heads), "width heads none"),
        "memory": Named((width, 2, heads, width // heads), "width none heads none"),
        "cross": Named((heads, width // heads, width), "heads none width"),
    }
    params = {
        "embedding": Named((vocab, width), "vocab width"),
        "encoder": _transformer(layers, width, heads),
        "encoder_norm": Named((width,), "none"),
        "decoder": [block | across for block in _transformer(layers, width, heads)],
        "norm": Named((width,), "none"),
    }
    batch = (
        Named((rows, 512), "batch none", jnp.int32),
        Named((rows, 128 + 1), "batch none", jnp.int32),
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        source, target = batch
        table = params["embedding"].astype(jnp.bfloat16)
        x = hint(table[source], "batch a_seq none")
        for p in params["encoder"]:
            x = _block(x, p, causal=False)
        memory = _norm(x, params["encoder_norm"])
        x = hint(table[target[:, :-1]], "batch a_seq none")
        for p in map(_half, params["decoder"]):
            x = hint(x + _attention(_norm(x, p["norm1"]), p, True), "batch a_seq none")
            x = hint(x + _cross_attention(_norm(x, p["norm3"]), memory, p), "batch a_seq none")
            h = hint(jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]), "batch none a_wide")
            x = hint(x + h @ p["down"], "batch a_seq none")
        logits = (_norm(x, params["norm"]) @ table.T).astype(jnp.float32)
        logits = hint(logits / math.sqrt(width), "batch none a_vocab")
        return optax.softmax_cross_entropy_with_integer_labels(logits, target[:, 1:]).mean()

    plans = data_parallel(16) | tensor_parallel(16, (2,))
    plans = picked(plans, "dp", "zero1", "tp2_zero1")
    return Model("encoder_decoder", "v5e:4x4", params, batch, loss, plans)


def bert() -> Model:
    """Four encoder layers of width 1024 on 256 x 256 tokens, 38 masked in each row."""
    layers, width, heads, vocab, rows, seq, masked = 4, 1024, 16, 30522, 256, 256, 38
    params = {
        "embedding": Named((vocab, width), "vocab width"),
        "place": Named((seq, width), "none width"),
        "blocks": _transformer(layers, width, heads),
        "norm": Named((width,), "none"),
        "dense": Named((width, width), "width none"),
        "dense_norm": Named((width,), "none"),
        "bias": Named((vocab,), "vocab"),
    }
    some = Named((rows, masked), "batch none", jnp.int32)
    batch = {
        "tokens": Named((rows, seq), "batch none", jnp.int32),
        "positions": some,
        "labels": some,
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        table = params["embedding"].astype(jnp.bfloat16)
        x = table[batch["tokens"]] + params["place"].astype(jnp.bfloat16)
        x = hint(x, "batch a_seq none")
        for p in params["blocks"]:
            x = _block(x, p, causal=False)
        x = _norm(x, params["norm"])
        x = jnp.take_along_axis(x, batch["positions"][..., None], axis=1)
        x = jax.nn.gelu(hint(x, "batch none none") @ params["dense"].astype(jnp.bfloat16))
        logits = _norm(x, params["dense_norm"]) @ table.T
        logits = hint(logits.astype(jnp.float32) + params["bias"], "batch none a_vocab")
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    plans = data_parallel(16) | tensor_parallel(16, (2,))
    plans = picked(plans, "dp", "zero1", "tp2_zero1")
    return Model("bert", "v5e:4x4", params, batch, loss, plans)


def _waves(times: jax.Array, size: int) -> jax.Array:
    """Sines and cosines of times at falling frequencies."""
    rates = jnp.exp(-math.log(1e4) * jnp.arange(size // 2) / (size // 2))
    angles = 1e3 * times[:, None] * rates
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


def diffusion_transformer() -> Model:
    """Four DiT blocks of width 1152 on 256 latents of 16 x 16 x 4, each 64 tokens."""
    layers, width, heads, images, side, patch = 4, 1152, 16, 256, 8, 2
    size = patch * patch * 4
    modulated = {"modulate": Named((width, 6, width), "width none none")}
    blocks = [
        {k: v for k, v in block.items() if not k.startswith("norm")} | modulated
        for block in _transformer(layers, width, heads)
    ]
    params = {
        "patches": Named((size, width), "none width"),
        "place": Named((side * side, width), "none width"),
        "time": [Named((256, width), "none wide"), Named((width, width), "wide width")],
        "classes": Named((1001, width), "none width"),
        "blocks": blocks,
        "modulate": Named((width, 2, width), "width none none"),
        "out": Named((width, size), "width none"),
    }
    latents = Named((images, 16, 16, 4), "batch none none none", jnp.bfloat16)
    batch = {
        "latents": latents,
        "noise": latents,
        "times": Named((images,), "batch"),
        "labels": Named((images,), "batch", jnp.int32),
    }

    def modulation(c: jax.Array, w: jax.Array) -> jax.Array:
        parts = jnp.einsum("bd,dke->kbe", jax.nn.silu(c), w)
        return hint(parts, "none batch none")[:, :, None]

    def loss(params: Any, batch: Any) -> jax.Array:
        clean, noise, times = batch["latents"], batch["noise"], batch["times"]
        params = bf16(params)
        t = times.astype(jnp.bfloat16)[:, None, None, None]
        x = (1 - t) * clean + t * noise
        cut = (images, side, patch, side, patch, 4)
        x = x.reshape(cut).transpose(0, 1, 3, 2, 4, 5).reshape(images, side * side, size)
        x = hint(x @ params["patches"] + params["place"], "batch a_seq none")
        first, second = params["time"]
        c = jax.nn.silu(_waves(times, 256).astype(jnp.bfloat16) @ first) @ second
        c = hint(c + params["classes"][batch["labels"]], "batch none")
        for p in params["blocks"]:
            shift1, scale1, gate1, shift2, scale2, gate2 = modulation(c, p["modulate"])
            h = _attention(_norm(x, 1 + scale1) + shift1, p, causal=False)
            x = hint(x + gate1 * h, "batch a_seq none")
            h = (_norm(x, 1 + scale2) + shift2) @ p["up"]
            h = hint(jax.nn.gelu(h), "batch none a_wide") @ p["down"]
            x = hint(x + gate2 * h, "batch a_seq none")
        shift, scale = modulation(c, params["modulate"])
        x = (_norm(x, 1 + scale) + shift) @ params["out"]
        x = x.reshape(images, side, side, patch, patch, 4).transpose(0, 1, 3, 2, 4, 5)
        error = x.reshape(clean.shape) - (noise - clean)
        return jnp.mean(jnp.square(error.astype(jnp.float32)))

    plans = data_parallel(16)
    return Model("diffusion_transformer", "v6e:4x4", params, batch, loss, plans)


def _llama(width: int, heads: int, shared: int, size: int, wide: int) -> dict[str, Named]:
    """The weights of a block; ``shared`` heads of keys and values."""
    return {
        "norm1": Named((width,), "none"),
        "norm2": Named((width,), "none"),
        "query": Named((width, heads, size), "width heads none"),
        "key": Named((width, shared, size), "width heads none"),
        "value": Named((width, shared, size), "width heads none"),
        "proj": Named((heads, size, width), "heads none width"),
        "gate": Named((width, wide), "width wide"),
        "up": Named((width, wide), "width wide"),
        "down": Named((wide, width), "wide width"),
    }


def _rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
    return hint((y * gain).astype(jnp.bfloat16), "batch none none")


def _rotary(x: jax.Array) -> jax.Array:
    """Pairs of a head's numbers, turned by their token's place."""
    half = x.shape[-1] // 2
    rates = 5e5 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _grouped_attention(x: jax.Array, p: Any) -> jax.Array:
    q, k, v = (
        hint(jnp.einsum("bsd,dhe->bshe", x, p[name]), "batch none a_heads none")
        for name in ("query", "key", "value")
    )
    rows, seq, heads, size = q.shape
    q, k = _rotary(q).reshape(rows, seq, k.shape[2], -1, size), _rotary(k)
    scores = jnp.einsum("bskge,btke->bkgst", q, k).astype(jnp.float32) / math.sqrt(size)
    scores = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -1e9)
    mixed = jnp.einsum("bkgst,btke->bskge", jax.nn.softmax(scores).astype(x.dtype), v)
    mixed = hint(mixed.reshape(rows, seq, heads, size), "batch none a_heads none")
    return jnp.einsum("bshe,hed->bsd", mixed, p["proj"])


def _llama_block(x: jax.Array, p: Any) -> jax.Array:
    p = _half(p)
    x = hint(x + _grouped_attention(_rms_norm(x, p["norm1"]), p), "batch a_seq none")
    h = _rms_norm(x, p["norm2"])
    h = hint(jax.nn.silu(h @ p["gate"]) * (h @ p["up"]), "batch none a_wide")
    return hint(x + h @ p["down"], "batch a_seq none")


def llama_3b() -> Model:
    """Six scanned, rematerialized layers of width 3072 with a vocabulary of 128,256."""
    layers, width, vocab, rows, seq = 6, 3072, 128256, 64, 4096
    block = _llama(width, heads=24, shared=8, size=128, wide=8192)
    params = {
        "embedding": Named((vocab, width), "vocab width"),
        "blocks": {k: Named((layers, *x.shape), f"none {x.names}") for k, x in block.items()},
        "norm": Named((width,), "none"),
    }
    batch = Named((rows, seq + 1), "batch none", jnp.int32)

    def loss(params: Any, tokens: Any) -> jax.Array:
        table = params["embedding"].astype(jnp.bfloat16)
        x = hint(table[tokens[:, :-1]], "batch a_seq none")
        body = jax.checkpoint(lambda x, p: (_llama_block(x, p), None))
        x, _ = jax.lax.scan(body, x, params["blocks"])
        logits = (_rms_norm(x, params["norm"]) @ table.T).astype(jnp.float32)
        logits = hint(logits, "batch none a_vocab")
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    plans = data_parallel(32) | tensor_parallel(32, (4,))
    plans = picked(plans, "zero1", "fsdp", "tp4_fsdp_seq")
    return Model("llama_3b", "v5p:4x4x2", params, batch, loss, plans)


def gqa_decoder() -> Model:
    """Four unrolled layers of width 2048, 16 heads on 4 of keys, on 128 x 2,048 tokens."""
    layers, width, vocab, rows, seq = 4, 2048, 32000, 128, 2048
    params = {
        "embedding": Named((vocab, width), "vocab width"),
        "blocks": [_llama(width, heads=16, shared=4, size=128, wide=5632)] * layers,
        "norm": Named((width,), "none"),
        "head": Named((width, vocab), "width vocab"),
    }
    batch = Named((rows, seq + 1), "batch none", jnp.int32)

    def loss(params: Any, tokens: Any) -> jax.Array:
        x = params["embedding"].astype(jnp.bfloat16)[tokens[:, :-1]]
        x = hint(x, "batch a_seq none")
        for p in params["blocks"]:
            x = _llama_block(x, p)
        logits = _rms_norm(x, params["norm"]) @ params["head"].astype(jnp.bfloat16)
        logits = hint(logits.astype(jnp.float32), "batch none a_vocab")
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    plans = data_parallel(16) | tensor_parallel(16, (4,))
    plans = picked(plans, "zero1", "fsdp", "tp4_fsdp_seq")
    return Model("gqa_decoder", "v6e:4x4", params, batch, loss, plans)


def _mixture(x: jax.Array, p: Any, group: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Two experts per token, within groups of tokens, and the loss that balances experts."""
    tokens = hint(x.reshape(-1, group, x.shape[-1]), "batch none none")
    odds = jax.nn.softmax((tokens @ p["router"]).astype(jnp.float32))
    count = odds.shape[-1]
    weights, chosen = jax.lax.top_k(odds, 2)
    weights = weights / weights.sum(-1, keepdims=True)
    # First choices take their places before second ones.
    taken = jax.nn.one_hot(chosen.swapaxes(1, 2), count, dtype=jnp.int32)
    place = jnp.cumsum(taken.reshape(-1, 2 * group, count), 1).reshape(taken.shape)
    places = jax.nn.one_hot(place * taken - 1, capacity, dtype=x.dtype)
    combine = jnp.einsum("gsk,gksec->gsec", weights.astype(x.dtype), places)
    routed = jnp.einsum("gsec,gsd->egcd", places.sum(1), tokens)
    routed = hint(routed, "a_experts batch none none")
    h = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", routed, p["up"]))
    out = jnp.einsum("egcf,efd->egcd", hint(h, "a_experts batch none a_wide"), p["down"])
    out = hint(out, "a_experts batch none none")
    mixed = hint(jnp.einsum("gsec,egcd->gsd", combine, out), "batch none none")
    load = taken[:, 0].astype(jnp.float32).mean(1)
    return mixed.reshape(x.shape), count * jnp.mean(jnp.sum(load * odds.mean(1), -1))


def experts() -> Model:
    """Four layers of attention and 16 experts, two per token, width 1024, 128 x 1,024 tokens."""
    layers, width, heads, wide, count, vocab, rows, seq = 4, 1024, 16, 4096, 16, 32000, 128, 1024
    group = 512
    capacity = math.ceil(1.25 * 2 * group / count)
    mixture = {
        "router": Named((width, count), "width none"),
        "up": Named((count, width, wide), "experts width wide"),
        "down": Named((count, wide, width), "experts wide width"),
    }
    params = {
        "embedding": Named((vocab, width), "vocab width"),
        "blocks": [block | mixture for block in _transformer(layers, width, heads)],
        "norm": Named((width,), "none"),
    }
    batch = Named((rows, seq + 1), "batch none", jnp.int32)

    def loss(params: Any, tokens: Any) -> jax.Array:
        table = params["embedding"].astype(jnp.bfloat16)
        x, uneven = hint(table[tokens[:, :-1]], "batch none none"), jnp.zeros(())
        for p in map(_half, params["blocks"]):
            x = hint(x + _attention(_norm(x, p["norm1"]), p, True), "batch none none")
            h, more = _mixture(_norm(x, p["norm2"]), p, group, capacity)
            x, uneven = hint(x + h, "batch none none"), uneven + more
        logits = (_norm(x, params["norm"]) @ table.T).astype(jnp.float32)
        logits = hint(logits, "batch none a_vocab")
        wrong = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return wrong.mean() + 0.01 * uneven / layers

    both = {"batch": ("data", "model"), "experts": ("model",), "a_experts": ("model",)}
    plans = picked(data_parallel(16), "zero1") | {
        "experts": ManualPlan({"data": 16}, {**DATA, "experts": ("data",), "a_experts": ("data",)}),
        "experts4_fsdp": ManualPlan({"data": 4, "model": 4}, {**both, "width": ("data",)}),
    }
    return Model("experts", "v5p:2x2x4", params, batch, loss, plans)


UNSEEN: dict[str, Callable[[], Model]] = {
    f.__name__: f
    for f in (
        graph_network,
        mixer,
        encoder_decoder,
        state_space,
        bert,
        two_towers,
        diffusion_transformer,
        llama_3b,
        convnext,
        lstm,
        experts,
        dlrm,
        gqa_decoder,
    )
}
