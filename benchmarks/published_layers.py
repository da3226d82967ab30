"""Layers of a decoder whose shardings are said by marks.

Every product goes through ``linear``, whose backward pass is written out: it says where a ZeRO-3
parameter is gathered (once forward, once backward; Rajbhandari et al. 2020, "ZeRO") and where its
gradient is reduced. Tensor parallelism is Megatron's (Shoeybi et al. 2019): column- then
row-parallel, optionally with sequence parallelism (Korthikanti et al. 2022).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from published_case import Case, Kernels, Spec, mark

Array = jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5, 6))
def linear(eq: str, x: Array, w: Array, used: Spec, stored: Spec, k: Kernels, name: str) -> Array:
    """``einsum(eq, x, w)``; w is gathered to ``used``, its gradient is left as ``stored``."""
    wide = mark(w.astype(k.matmul), used)
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
    wide = mark(w.astype(k.matmul), used)
    low = g.astype(k.matmul)
    dx = jnp.einsum(f"{out},{b}->{a}", low, wide, preferred_element_type=x.dtype)
    dw = jnp.einsum(f"{a},{out}->{b}", x.astype(k.matmul), low, preferred_element_type=k.reduced)
    return dx, mark(dw, stored).astype(w.dtype)


linear.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def lookup(table: Array, tokens: Array, used: Spec, state: Spec, dtype: str) -> Array:
    """Rows of a table; its gradient is summed on every device and then reduced to ``state``."""
    return mark(table.astype(dtype), used)[tokens]


def _lookup_forward(
    table: Array, tokens: Array, used: Spec, state: Spec, dtype: str
) -> tuple[Array, tuple[Array, Array]]:
    return lookup(table, tokens, used, state, dtype), (table, tokens)


def _lookup_backward(
    used: Spec, state: Spec, dtype: str, kept: tuple[Array, Array], g: Array
) -> tuple[Array, None]:
    table, tokens = kept
    summed = jnp.zeros(table.shape, dtype).at[tokens].add(g)
    return mark(summed, state).astype(table.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def row(x: Array, scale: Array, k: Kernels) -> Array:
    """Stands for a norm in one kernel: reads x, writes y; backward reads x and g, writes dx."""
    return k.stop(x * scale)


def _row_backward(k: Kernels, kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, scale = kept
    return k.stop(x * g * scale), jnp.sum(x * g, axis=tuple(range(x.ndim - 1)))


row.defvjp(lambda x, scale, k: (row(x, scale, k), (x, scale)), _row_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def weigh(scores: Array, k: Kernels) -> Array:
    """Stands for scale, mask and softmax in one kernel: backward reads y and g, writes dx."""
    return k.stop(scores * 0.125)


def _weigh_forward(scores: Array, k: Kernels) -> tuple[Array, Array]:
    y = weigh(scores, k)
    return y, y


weigh.defvjp(_weigh_forward, lambda k, y, g: (k.stop(y * g),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def drop(x: Array, k: Kernels) -> Array:
    """Dropout: writes its mask, a byte for each value, beside the result."""
    return _drop_forward(x, k)[0]


def _drop_forward(x: Array, k: Kernels) -> tuple[Array, Array]:
    return k.stop((x * 1.1, x > 0))  # type: ignore[no-any-return]


drop.defvjp(_drop_forward, lambda k, mask, g: (k.stop(g * mask),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def drop_add(x: Array, y: Array, k: Kernels) -> Array:
    """``x + dropout(y)`` in one kernel."""
    return _drop_add_forward(x, y, k)[0]


def _drop_add_forward(x: Array, y: Array, k: Kernels) -> tuple[Array, Array]:
    return k.stop((x + y * 1.1, y > 0))  # type: ignore[no-any-return]


drop_add.defvjp(_drop_add_forward, lambda k, mask, g: (g, k.stop(g * mask)))


def norm(x: Array, p: Any, name: str, c: Case) -> Array:
    """LayerNorm where there are biases or learned positions, RMSNorm otherwise."""
    stop = c.kernels.stop
    if c.kernels.rows:
        return row(x, p[name].astype(x.dtype), c.kernels)
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
    """Priced as one fused kernel (Dao 2023), half of whose products the mask saves: its name says
    so. The mask itself is left out, since JAX would make it in front of a scan."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def attend(q: Array, k: Array, v: Array, c: Case) -> Array:
    """Causal attention of q [b, s, heads, d] to k, v [b, t, kv_heads, d]."""
    stop, m = c.kernels.stop, c.model
    if m.kv_heads != m.heads:
        k, v = (jnp.repeat(t, m.heads // m.kv_heads, axis=2) for t in (k, v))
    if c.kernels.attention.startswith("flash"):
        return flash_attention_causal(q, k, v)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    if c.kernels.rows:
        weights = weigh(scores, c.kernels)
        weights = drop(weights, c.kernels) if c.kernels.dropout else weights
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    wide = scores.astype(jnp.float32) * m.head_dim**-0.5
    weights = stop(jax.nn.softmax(jnp.where(causal, wide, -1e30), axis=-1).astype(q.dtype))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(x: Array, inside: Spec, between: Spec) -> Array:
    """From where blocks join to inside one; the gradient goes the other way."""
    return mark(x, inside)


gathered.defvjp(
    lambda x, inside, between: (gathered(x, inside, between), None),
    lambda inside, between, _, g: (mark(g, between),),
)


@jax.custom_vjp
def needed(y: Array) -> Array:
    """``y`` itself; its gradient waits until ``y`` has been computed again."""
    return y


needed.defvjp(lambda y: (y, y), lambda y, g: (g + 0 * y,))


def layer(x: Array, p: Any, spec: Any, c: Case) -> Array:
    """One block; x is [batch, seq, hidden]."""
    m, d, k = c.model, c.degrees, c.kernels
    tp = d.on("model")
    along = d.on("context", "model") if d.sequence else d.on("context")
    between = d.spec(d.batch, along, None)
    inside = d.spec(d.batch, d.on("context"))

    def apply(eq: str, x: Array, name: str, label: str, out: Spec) -> Array:
        y = linear(eq, x, p[name], spec[name][1], spec[name][2], k, label)
        y = checkpoint_name(mark(y, out), label)
        # cuBLAS adds a bias for nothing; Megatron adds these two in the next kernel
        stop = (lambda x: x) if k.rows else k.stop
        return stop(y + p[name + "_b"].astype(y.dtype)) if m.bias else y

    def join(x: Array, y: Array) -> Array:
        return mark(drop_add(x, y, k) if k.dropout else k.stop(x + y), between)

    y = gathered(mark(norm(k.stop(x), p, "norm1", c), between), inside, between)
    heads = d.spec(*inside, tp)
    q = apply("bsd,dhk->bshk", y, "q", "query", heads)
    key = apply("bsd,dhk->bshk", y, "k", "key", heads)
    v = apply("bsd,dhk->bshk", y, "v", "value", heads)
    if not m.positions:
        q, key = rotate(q, c), rotate(key, c)
    if d.context > 1:  # every device sees all keys: the ring's volume
        key, v = (mark(t, d.spec(d.batch, None, tp)) for t in (key, v))
    mixed = checkpoint_name(mark(attend(q, key, v, c), heads), "mixed")
    x = join(x, apply("bshk,hkd->bsd", mixed, "o", "out", between))
    y = gathered(mark(norm(k.stop(x), p, "norm2", c), between), inside, between)
    wide = d.spec(*inside, tp)
    up = apply("bsd,df->bsf", y, "up", "up", wide)
    if m.gated:
        up = k.stop(k.stop(jax.nn.silu(apply("bsd,df->bsf", y, "gate", "gate", wide))) * up)
    else:
        up = k.stop(jax.nn.gelu(up))
    return join(x, apply("bsf,fd->bsd", mark(up, wide), "down", "down", between))
