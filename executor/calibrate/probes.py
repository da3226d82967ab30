"""Small programs whose times determine a device's constants: parts of train steps, at local shapes.

Each runs forward and backward where training has both (`jax.vjp`), so products occur in the three
forms of a layer, and each reads weights that nothing else has read just before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from costmodels import Device

Shape = jax.ShapeDtypeStruct
_SLOW = 1e12
"""Flop/s below which convolutions have few channels."""


@dataclass(frozen=True)
class Probe:
    """A function of local arrays (rank 1 or more), and their shapes on one device.

    ``kind`` is the family under which residuals are reported.
    """

    kind: str
    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]


def probes(device: Device, dtypes: Sequence[str], scale: float = 1.0) -> tuple[Probe, ...]:
    """The programs for a device, sized by its constants in the catalog.

    Args:
        device: its rates determine the size of a product that takes a given time.
        dtypes: dtypes of the products; elementwise work is in float32.
        scale: factor on every program's intended time; below 1 for a quick run.
    """
    rate = device.matmul_flops_per_s("float32") * device.matmul_efficiency
    side = _sides(rate, scale)
    short, middle, long = side(1e-4), side(1e-3), side(8e-3)
    out: list[Probe] = []
    for dtype in dtypes:
        out += [
            products(middle, middle, middle, dtype),
            products(long, long, long, dtype),
            products(4 * short, short, short, dtype),
            products(4 * middle, short, 4 * short, dtype),
            products(short, middle, 2 * middle, dtype),
        ]
    out += [attention(4, 4, short, max(8, short // 4)), attention(2, 4, middle // 2, 32)]
    for rows in (short, middle, 4 * middle):
        out += [
            update(rows * middle),
            gelu(rows, middle),
            norm(rows, middle),
            softmax(rows, middle),
        ]
    out += [small(32), small(128)]
    wide = 1 if rate < _SLOW else 4
    for image, width, stride in ((16, 32, 1), (8, 64, 1), (16, 64, 2)):
        # of one image, forward and backward
        flops = 324.0 * image**2 * (wide * width) ** 2 / stride**2
        batch = max(4, round(scale * rate * 1e-3 / flops))
        out.append(convolution(batch, image, wide * width, stride))
    out += [recurrent(32, 4, short), recurrent(32, 16, middle)]
    out += [embedding(1024, 256, short), embedding(4096, 1024, middle)]
    return tuple(out)


def fused_attention(device: Device, scale: float = 1.0) -> tuple[Probe, ...]:
    """cuDNN's fused attention, forward and backward, in bfloat16: causal and not, at two head
    sizes and two lengths. For GPUs."""
    rate = device.matmul_flops_per_s("bfloat16") * device.attention_efficiency
    out = []
    for span, depth in ((1024, 64), (4096, 128)):
        one = 14.0 * span * span * depth  # 2 products forward, 5 backward
        heads = max(1, round(scale * rate * 2e-3 / one / 4))
        for causal in (False, True):
            out.append(_fused(4, heads, span, depth, causal))
    return tuple(out)


def _fused(batch: int, heads: int, span: int, depth: int, causal: bool) -> Probe:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

    x = _floats(batch, span, heads, depth, dtype="bfloat16")
    name = f"{batch}x{span}x{heads}x{depth}{' causal' if causal else ''}"
    return Probe("fused attention", name, _both_ways(attend), (x,) * 4)


def _sides(rate: float, scale: float) -> Callable[[float], int]:
    """Seconds -> the side of a square product that takes them at ``rate`` flop/s, a multiple of
    16."""
    flops = scale * rate / 2.0

    def side(seconds: float) -> int:
        return max(16, 16 * round(math.cbrt(flops * seconds) / 16))

    return side


def _floats(*shape: int, dtype: str = "float32") -> Shape:
    return Shape(shape, dtype)


def _both_ways(function: Callable[..., Any]) -> Callable[..., Any]:
    """(cotangent, *args) -> the result and the gradients of all arguments."""

    def run(cotangent: Any, *args: Any) -> Any:
        result, back = jax.vjp(function, *args)
        return result, back(cotangent)

    return run


def products(rows: int, inner: int, outer: int, dtype: str) -> Probe:
    """Four layers x @ w, alternately inner -> outer and outer -> inner."""

    def chain(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = x @ w
        return x

    there, back = _floats(inner, outer, dtype=dtype), _floats(outer, inner, dtype=dtype)
    x = _floats(rows, inner, dtype=dtype)
    name = f"{rows}x{inner}x{outer} {dtype}"
    return Probe("product", name, _both_ways(chain), (x, x, there, back, there, back))


def attention(batch: int, heads: int, span: int, depth: int) -> Probe:
    """Attention as written in jax.numpy: two batched products and a softmax."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * depth**-0.5
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    x = _floats(batch, span, heads, depth)
    return Probe("attention", f"{batch}x{heads}x{span}x{depth}", _both_ways(attend), (x,) * 4)


def update(size: int) -> Probe:
    """Adam's update of a parameter."""

    def adam(p: Any, g: Any, m: Any, v: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

    return Probe("elementwise", f"adam {size}", adam, (_floats(size),) * 4)


def gelu(rows: int, width: int) -> Probe:
    """An activation function."""
    x = _floats(rows, width)
    return Probe("elementwise", f"gelu {rows}x{width}", _both_ways(jax.nn.gelu), (x, x))


def norm(rows: int, width: int) -> Probe:
    """Layer normalization."""

    def normed(x: Any, scale: Any, shift: Any) -> Any:
        mean = jnp.mean(x, -1, keepdims=True)
        var = jnp.mean(jnp.square(x), -1, keepdims=True) - jnp.square(mean)
        return (x - mean) * jax.lax.rsqrt(var + 1e-6) * scale + shift

    x, row = _floats(rows, width), _floats(width)
    return Probe("reduction", f"norm {rows}x{width}", _both_ways(normed), (x, x, row, row))


def softmax(rows: int, width: int) -> Probe:
    """A softmax over the last dimension."""
    x = _floats(rows, width)
    return Probe("reduction", f"softmax {rows}x{width}", _both_ways(jax.nn.softmax), (x, x))


def small(count: int) -> Probe:
    """A chain of kernels on a few hundred numbers: their starts take most of the time."""

    def chain(x: Any) -> Any:
        for _ in range(count):
            x = x - jnp.sum(x * x, axis=-1, keepdims=True)
        return x

    return Probe("start", f"{count} reductions", chain, (_floats(16, 16),))


def launches(count: int) -> Probe:
    """A chain of 16x16 products: one kernel each on GPUs, because nothing fuses two products."""

    def chain(x: Any, w: Any) -> Any:
        for _ in range(count):
            x = x @ w
        return x

    return Probe("start", f"{count} products", chain, (_floats(16, 16), _floats(16, 16)))


def convolution(batch: int, image: int, width: int, stride: int) -> Probe:
    """Two 3x3 convolutions, channels last."""

    def convolve(x: Any, first: Any, second: Any) -> Any:
        for w, step in ((first, stride), (second, 1)):
            numbers = jax.lax.conv_dimension_numbers(x.shape, w.shape, ("NHWC", "HWIO", "NHWC"))
            x = jax.lax.conv_general_dilated(x, w, (step, step), "SAME", dimension_numbers=numbers)
        return x

    x, out = _floats(batch, image, image, width), image // stride
    kernels = _floats(3, 3, width, 2 * width), _floats(3, 3, 2 * width, 2 * width)
    return Probe(
        "convolution",
        f"{batch}x{image}x{image}x{width} stride {stride}",
        _both_ways(convolve),
        (_floats(batch, out, out, 2 * width), x, *kernels),
    )


def recurrent(steps: int, rows: int, width: int) -> Probe:
    """A loop over time: a gated recurrent layer."""

    def layer(x: Any, w: Any, u: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            gate, new = jnp.split(x @ w + state @ u, 2, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state = gate * state + (1.0 - gate) * jnp.tanh(new)
            return state, state

        return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]

    x, w = _floats(steps, rows, width), _floats(width, 2 * width)
    return Probe("loop", f"{steps} steps {rows}x{width}", _both_ways(layer), (x, x, w, w))


def embedding(vocabulary: int, tokens: int, width: int) -> Probe:
    """A lookup of rows of a table, with the gradient added to those rows."""

    def look_up(indices: Any, cotangent: Any, table: Any) -> Any:
        rows, back = jax.vjp(lambda t: t[indices], table)
        return rows, back(cotangent)

    shapes = (Shape((tokens,), "int32"), _floats(tokens, width), _floats(vocabulary, width))
    return Probe("gather", f"{tokens} of {vocabulary}x{width}", look_up, shapes)
