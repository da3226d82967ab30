"""Attention in its usual forms, a vision transformer, decoding with a cache."""

import jax
import jax.numpy as jnp

from tests.zoo.program import dense, integers, normal, program

WIDTH, HEADS, SEQ, BATCH = 64, 8, 16, 8


def weights(width=WIDTH, kv=None, seed=10):
    kv = kv or width
    return {
        "q": dense(width, width, seed=seed),
        "k": dense(width, kv, seed=seed + 1),
        "v": dense(width, kv, seed=seed + 2),
        "o": dense(width, width, seed=seed + 3),
    }


def heads(x, count):
    return x.reshape(*x.shape[:-1], count, -1)


def attend(q, k, v, mask=None):
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    out = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)
    return out.reshape(*out.shape[:-2], -1)


def self_attention(p, x, mask=None):
    q, k, v = (heads(x @ p[name], HEADS) for name in "qkv")
    return attend(q, k, v, mask) @ p["o"]


def with_grad(apply, *args):
    """The mean of squares of ``apply`` and its gradient in the first argument."""

    def loss(*args):
        return jnp.mean(apply(*args) ** 2)

    return jax.value_and_grad(loss), args


@program()
def attention_full():
    return self_attention, (weights(), normal(BATCH, SEQ, WIDTH))


@program()
def attention_causal():
    mask = jnp.tril(jnp.ones((SEQ, SEQ), bool))
    return with_grad(lambda p, x: self_attention(p, x, mask), weights(), normal(BATCH, SEQ, WIDTH))


@program()
def attention_padding_mask():
    def step(p, x, lengths):
        mask = jnp.arange(SEQ)[None, :] < lengths[:, None]
        return self_attention(p, x, mask[:, None, None, :])

    return step, (weights(), normal(BATCH, SEQ, WIDTH), 1 + integers(SEQ, BATCH))


@program()
def attention_grouped_query():
    """Eight heads of queries on two of keys and values."""

    def apply(p, x):
        q, k, v = heads(x @ p["q"], HEADS), heads(x @ p["k"], 2), heads(x @ p["v"], 2)
        q = q.reshape(*q.shape[:2], 2, HEADS // 2, q.shape[-1])
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k) / q.shape[-1] ** 0.5
        out = jnp.einsum("bkgqs,bskd->bqkgd", jax.nn.softmax(scores), v)
        return out.reshape(x.shape) @ p["o"]

    return with_grad(apply, weights(kv=16), normal(BATCH, SEQ, WIDTH))


@program()
def attention_grouped_query_repeat():
    """The same written with repeated keys and values."""

    def apply(p, x):
        q, k, v = heads(x @ p["q"], HEADS), heads(x @ p["k"], 2), heads(x @ p["v"], 2)
        k, v = jnp.repeat(k, HEADS // 2, axis=2), jnp.repeat(v, HEADS // 2, axis=2)
        return attend(q, k, v) @ p["o"]

    return with_grad(apply, weights(kv=16), normal(BATCH, SEQ, WIDTH))


@program()
def attention_sliding_window():
    def apply(p, x):
        i, j = jnp.arange(SEQ)[:, None], jnp.arange(SEQ)[None, :]
        return self_attention(p, x, (j <= i) & (i - j < 4))

    return with_grad(apply, weights(), normal(BATCH, SEQ, WIDTH))


@program()
def attention_local_blocks():
    """Each block of queries sees its own block of keys and the one before."""

    def apply(p, x):
        q, k, v = (heads(x @ p[name], HEADS) for name in "qkv")
        q, k, v = (a.reshape(BATCH, 4, 4, HEADS, -1) for a in (q, k, v))
        both = [jnp.concatenate([jnp.roll(a, 1, axis=1), a], axis=2) for a in (k, v)]
        return attend(q, *both).reshape(x.shape) @ p["o"]

    return with_grad(apply, weights(), normal(BATCH, SEQ, WIDTH))


@program()
def attention_cross():
    def apply(p, x, memory):
        q = heads(x @ p["q"], HEADS)
        k, v = heads(memory @ p["k"], HEADS), heads(memory @ p["v"], HEADS)
        return attend(q, k, v) @ p["o"]

    return with_grad(apply, weights(), normal(BATCH, SEQ, WIDTH), normal(BATCH, 24, WIDTH))


@program()
def attention_of_jax_nn():
    def step(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    return step, tuple(normal(BATCH, SEQ, HEADS, 8, seed=s) for s in range(3))


@program()
def attention_rotary():
    def rotate(x):
        half = x.shape[-1] // 2
        angle = jnp.arange(SEQ)[:, None] / 100 ** (jnp.arange(half) / half)
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def apply(p, x):
        q, k, v = (heads(x @ p[name], HEADS) for name in "qkv")
        return attend(rotate(q), rotate(k), v) @ p["o"]

    return with_grad(apply, weights(), normal(BATCH, SEQ, WIDTH))


@program()
def attention_linear():
    """Kernel features and cumulative sums in the place of the softmax."""

    def apply(p, x):
        q, k, v = (heads(x @ p[name], HEADS) for name in "qkv")
        q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
        kv = jnp.cumsum(k[..., :, None] * v[..., None, :], axis=1)
        norm = jnp.einsum("bshd,bshd->bsh", q, jnp.cumsum(k, axis=1))
        out = jnp.einsum("bshd,bshde->bshe", q, kv) / norm[..., None]
        return out.reshape(x.shape) @ p["o"]

    return with_grad(apply, weights(), normal(BATCH, SEQ, WIDTH))


@program()
def attention_blockwise_scan():
    """Online softmax over blocks of keys, as a scan."""

    def apply(p, x):
        q, k, v = (heads(x @ p[name], HEADS) for name in "qkv")
        blocks = [jnp.moveaxis(a.reshape(BATCH, 4, 4, HEADS, -1), 1, 0) for a in (k, v)]

        def body(carry, block):
            top, total, out = carry
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, block[0])
            new = jnp.maximum(top, scores.max(-1))
            weight, keep = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
            out = out * keep[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weight, block[1])
            return (new, total * keep + weight.sum(-1), out), None

        start = (
            jnp.full((BATCH, HEADS, SEQ), -jnp.inf),
            jnp.zeros((BATCH, HEADS, SEQ)),
            jnp.zeros((BATCH, HEADS, SEQ, WIDTH // HEADS)),
        )
        (_, total, out), _ = jax.lax.scan(body, start, tuple(blocks))
        return jnp.einsum("bhqd->bqhd", out / total[..., None]).reshape(x.shape) @ p["o"]

    return with_grad(apply, weights(), normal(BATCH, SEQ, WIDTH))


@program()
def vit():
    """Patches by a strided convolution, a class token, positions, two blocks, a head."""

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)

    def loss(p, images, labels):
        x = jax.lax.conv_general_dilated(
            images, p["patch"], (8, 8), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ).reshape(BATCH, -1, WIDTH)
        first = jnp.broadcast_to(p["class"], (BATCH, 1, WIDTH))
        x = jnp.concatenate([first, x], axis=1) + p["position"]
        for block in p["blocks"]:
            x = x + self_attention(block, norm(x))
            x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
        logp = jax.nn.log_softmax(norm(x)[:, 0] @ p["head"])
        return -jnp.mean(logp[jnp.arange(BATCH), labels])

    blocks = [
        {**weights(seed=s), "up": dense(WIDTH, 128), "down": dense(128, WIDTH)} for s in (20, 30)
    ]
    params = {
        "patch": normal(8, 8, 3, WIDTH, scale=0.07),
        "class": normal(1, 1, WIDTH),
        "position": normal(1, 17, WIDTH, scale=0.1),
        "blocks": blocks,
        "head": dense(WIDTH, 10),
    }
    args = params, normal(BATCH, 32, 32, 3), integers(10, BATCH)
    return jax.value_and_grad(loss), args


@program()
def kv_cache_decode():
    """One token for every sequence; keys and values are written at the position."""

    def step(p, cache, x, position):
        q, k, v = (heads(x @ p[name], HEADS) for name in "qkv")
        k = jax.lax.dynamic_update_slice(cache["k"], k, (0, position, 0, 0))
        v = jax.lax.dynamic_update_slice(cache["v"], v, (0, position, 0, 0))
        mask = jnp.arange(32) <= position
        y = attend(q, k, v, mask) @ p["o"]
        return {"k": k, "v": v}, y, position + 1

    cache = {name: normal(BATCH, 32, HEADS, 8, seed=s) for s, name in enumerate("kv")}
    return step, (weights(), cache, normal(BATCH, 1, WIDTH), jnp.int32(5))


@program()
def kv_cache_ragged_decode():
    """Every sequence at its own position; greedy choice of the next token."""

    def step(p, cache, ids, positions):
        rows = jnp.arange(BATCH)
        q, k, v = (heads(p["table"][ids] @ p[name], HEADS) for name in "qkv")
        k = cache["k"].at[rows, positions].set(k)
        v = cache["v"].at[rows, positions].set(v)
        mask = jnp.arange(32)[None, :] <= positions[:, None]
        y = attend(q[:, None], k, v, mask[:, None, None, :])[:, 0] @ p["o"]
        return {"k": k, "v": v}, jnp.argmax(y @ p["table"].T, axis=-1), positions + 1

    cache = {name: normal(BATCH, 32, HEADS, 8, seed=s) for s, name in enumerate("kv")}
    params = {**weights(), "table": normal(32, WIDTH)}
    return step, (params, cache, integers(32, BATCH), integers(31, BATCH, seed=1))
