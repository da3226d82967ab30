"""Operations of random programs.

Every operation takes operands of any shape. Floats stay within [-1, 1] and only pass through
operations that are continuous, so that rounding can't grow into another answer; decisions
(comparisons, sorts of positions, indices) are made on integers, which are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def fit(x: Any, shape: Sequence[int]) -> Any:
    """``x`` repeated or cut to a shape."""
    return x if x.shape == tuple(shape) else jnp.resize(x, shape)


def axis_of(x: Any, n: int) -> int:
    return n % max(1, x.ndim)


def ranked(x: Any, rank: int) -> Any:
    """``x`` with at least ``rank`` dimensions."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape) if x.ndim < rank else x


def matrix(x: Any) -> Any:
    x = ranked(x, 2)
    return x.reshape(-1, x.shape[-1])


def _matmul(x: Any, y: Any, n: int) -> Any:
    a, b = matrix(x), matrix(y)
    b = fit(b, (a.shape[1], b.shape[0]) if n % 2 else (a.shape[1], b.shape[1]))
    return a @ b / a.shape[1]


def _batched(x: Any, y: Any, n: int) -> Any:
    a = ranked(x, 3)
    a = a.reshape(-1, *a.shape[-2:])
    b = fit(y, (a.shape[0], a.shape[2], 4))
    return jnp.einsum("bij,bjk->bik" if n % 2 else "bij,bjk->kbi", a, b) / a.shape[2]


def _outer(x: Any, y: Any, n: int) -> Any:
    return jnp.einsum("i,j->ij", x.reshape(-1)[:32], y.reshape(-1)[:32])


def _conv(x: Any, y: Any, n: int) -> Any:
    image = matrix(x)
    image = fit(image, tuple(max(4, size) for size in image.shape))[None, None]
    kernel = fit(y, (4, 1, 3, 2)) / 6
    stride = 1 + n % 2
    return lax.conv_general_dilated(image, kernel, (stride, 1), ("SAME", "VALID")[n // 2 % 2])


def _window(x: Any, y: Any, n: int) -> Any:
    a = matrix(x)
    return lax.reduce_window(a, 0.0, lax.add, (2, 1), (1 + n % 2, 1), "SAME") / 2


def _take(x: Any, i: Any, n: int) -> Any:
    axis = axis_of(x, n)
    x = ranked(x, 1)
    return jnp.take(x, i.reshape(-1)[:16] % x.shape[axis], axis=axis)


def _take_along(x: Any, i: Any, n: int) -> Any:
    x = ranked(x, 1)
    axis = axis_of(x, n)
    return jnp.take_along_axis(x, fit(i, x.shape) % x.shape[axis], axis=axis)


def _scatter(x: Any, i: Any, n: int) -> Any:
    x = ranked(x, 1)
    rows = i.reshape(-1)[:5] % x.shape[0]
    at = x.at[rows]
    if n % 3 == 0:
        return at.add(0.5) / 4
    return at.mul(0.5) if n % 3 == 1 else at.max(0.25)


def _update(x: Any, i: Any, n: int) -> Any:
    x = ranked(x, 1)
    part = jnp.full_like(x[: max(1, x.shape[0] // 2)], 0.5)
    return lax.dynamic_update_slice_in_dim(x, part, i.reshape(-1)[0] % x.shape[0], 0)


def _slice_at(x: Any, i: Any, n: int) -> Any:
    x = ranked(x, 1)
    axis = axis_of(x, n)
    size = max(1, x.shape[axis] // 2)
    return lax.dynamic_slice_in_dim(x, i.reshape(-1)[0] % x.shape[axis], size, axis)


def _reshape(x: Any, y: Any, n: int) -> Any:
    size = x.size
    for first in ((2, 4, 3, 8)[n % 4], 2):
        if size % first == 0 and size > first:
            return x.reshape(first, -1) if n % 8 < 4 else x.reshape(-1, first)
    return x.reshape(-1)


def _pad(x: Any, y: Any, n: int) -> Any:
    x = ranked(x, 1)
    config = [(0, 0, 0)] * x.ndim
    config[axis_of(x, n)] = ((1, 2, 0), (0, 1, 1), (-1, 1, 0))[n % 3]
    return lax.pad(x, 0.5, config)


def _complex(x: Any, y: Any, n: int) -> Any:
    z = lax.complex(x, fit(y, x.shape)) * (1 - 0.5j)
    return z.real if n % 2 else (z * z.conj()).real / 4


def _fft(x: Any, y: Any, n: int) -> Any:
    x = ranked(x, 1)
    return (
        jnp.fft.fft(x).real / x.shape[-1] if n % 2 else jnp.fft.irfft(jnp.fft.rfft(x), x.shape[-1])
    )


def _cholesky(x: Any, y: Any, n: int) -> Any:
    a = fit(x, (8, 4, 4))
    return jnp.linalg.cholesky(a @ jnp.swapaxes(a, 1, 2) / 4 + 2 * jnp.eye(4))


def _split(x: Any, y: Any, n: int) -> Any:
    x = ranked(x, 1)
    axis = axis_of(x, n)
    if x.shape[axis] % 2:
        return x
    a, b = jnp.split(x, 2, axis=axis)
    return jnp.concatenate([b, a], axis=axis) if n % 2 else a * b


def _norm(x: Any, y: Any, n: int) -> Any:
    x = ranked(x, 1)
    axis = axis_of(x, n)
    mean = x.mean(axis, keepdims=True)
    return (x - mean) / jnp.sqrt(x.var(axis, keepdims=True) + 0.5)


FLOAT_OPS: dict[str, Callable[[Any, Any, int], Any]] = {
    "add": lambda x, y, n: x + fit(y, x.shape),
    "mul": lambda x, y, n: x * fit(y, x.shape),
    "broadcast": lambda x, y, n: x + y.reshape(-1)[0],
    "column": lambda x, y, n: matrix(x) * fit(y, (matrix(x).shape[0], 1)),
    "sin": lambda x, y, n: jnp.sin(x) + jnp.exp(-(x**2)),
    "smooth": lambda x, y, n: jax.nn.gelu(x) - jax.nn.softplus(x),
    "div": lambda x, y, n: x / (2 + fit(y, x.shape)),
    "matmul": _matmul,
    "batched": _batched,
    "outer": _outer,
    "conv": _conv,
    "window": _window,
    "transpose": lambda x, y, n: jnp.transpose(x),
    "swap": lambda x, y, n: jnp.swapaxes(ranked(x, 2), n % ranked(x, 2).ndim, -1),
    "reshape": _reshape,
    "lift": lambda x, y, n: jnp.expand_dims(x, n % (x.ndim + 1)) if x.ndim < 4 else x[0],
    "stack": lambda x, y, n: jnp.stack([x, fit(y, x.shape)], axis=n % (x.ndim + 1)),
    "concatenate": lambda x, y, n: jnp.concatenate([ranked(x, 1)] * 2, axis_of(x, n)),
    "sum": lambda x, y, n: jnp.sum(ranked(x, 1), axis_of(x, n)) / 4,
    "mean": lambda x, y, n: ranked(x, 1) - jnp.mean(ranked(x, 1), axis_of(x, n), keepdims=True),
    "prod": lambda x, y, n: jnp.prod(1 + 0.1 * ranked(x, 1), axis_of(x, n)) / 4,
    "total": lambda x, y, n: jnp.mean(x) + fit(y, (2, 3)),
    "softmax": lambda x, y, n: jax.nn.softmax(ranked(x, 1), axis_of(x, n)),
    "logsumexp": lambda x, y, n: jax.nn.logsumexp(ranked(x, 1), axis_of(x, n)) / 8,
    "norm": _norm,
    "cumsum": lambda x, y, n: jnp.cumsum(ranked(x, 1), axis_of(x, n)) / 16,
    "cumprod": lambda x, y, n: jnp.cumprod(ranked(x, 1), axis_of(x, n)),
    "reverse_cumsum": lambda x, y, n: lax.cumsum(ranked(x, 1), axis_of(x, n), reverse=True) / 16,
    "flip": lambda x, y, n: jnp.flip(ranked(x, 1), axis_of(x, n)),
    "roll": lambda x, y, n: jnp.roll(ranked(x, 1), n % 5, axis_of(x, n)),
    "slice": lambda x, y, n: ranked(x, 1)[n % 2 : max(1, ranked(x, 1).shape[0] // 2) + n % 2],
    "strided": lambda x, y, n: ranked(x, 1)[..., n % 2 :: 2] if ranked(x, 1).shape[-1] > 1 else x,
    "pad": _pad,
    "split": _split,
    "tile": lambda x, y, n: jnp.tile(x, 2),
    "diagonal": lambda x, y, n: jnp.diagonal(matrix(x)) * 0.5,
    "triangle": lambda x, y, n: jnp.tril(matrix(x), n % 3 - 1),
    "complex": _complex,
    "fft": _fft,
    "cholesky": _cholesky,
    "associative": lambda x, y, n: lax.associative_scan(
        lambda a, b: a * b + 0.5, ranked(x, 1), axis=axis_of(x, n)
    ),
    "sorted": lambda x, y, n: jnp.sort(lax.stop_gradient(ranked(x, 1)), axis_of(x, n)),
    "largest": lambda x, y, n: jnp.max(lax.stop_gradient(ranked(x, 1)), axis_of(x, n)),
    "least": lambda x, y, n: lax.cummin(lax.stop_gradient(ranked(x, 1)), axis_of(x, n)),
    "clip": lambda x, y, n: lax.stop_gradient(jnp.clip(x, -0.5, 0.5)),
    "barrier": lambda x, y, n: sum(lax.optimization_barrier((x, x * 0.5))),
    "stop": lambda x, y, n: lax.stop_gradient(x) * 0.5,
    "twice": lambda x, y, n: jax.vmap(lambda r: r * 0.5 + jnp.mean(r))(ranked(x, 2)),
}
"""From two float arrays and a number to a float array."""

MIXED_OPS: dict[str, Callable[[Any, Any, int], Any]] = {
    "take": _take,
    "take_along": _take_along,
    "scatter": _scatter,
    "update": _update,
    "slice_at": _slice_at,
    "select": lambda x, i, n: jnp.where(fit(i, x.shape) % 3 == 0, x, 0.5 - x),
    "segments": lambda x, i, n: (
        jax.ops.segment_sum(ranked(x, 1), fit(i, ranked(x, 1).shape[:1]) % 8, 8) / 4
    ),
    "one_hot": lambda x, i, n: jax.nn.one_hot(i.reshape(-1)[:16] % 8, 8) @ fit(x, (8, 4)),
    "to_float": lambda x, i, n: i.astype(jnp.float32) / 64 - fit(x, i.shape),
    "noise": lambda x, i, n: (
        x + jax.random.uniform(jax.random.fold_in(jax.random.key(n), i.reshape(-1)[0]), x.shape)
    ),
    "dropout": lambda x, i, n: jnp.where(
        jax.random.bernoulli(jax.random.key(n), 0.5, x.shape), x, 0
    ),
    "permute": lambda x, i, n: ranked(x, 1)[jnp.argsort(fit(i, ranked(x, 1).shape[:1]))],
}
"""From a float and an integer array and a number to a float array."""

INT_OPS: dict[str, Callable[[Any, Any, int], Any]] = {
    "int_add": lambda i, j, n: i + fit(j, i.shape) * (n % 5),
    "bits": lambda i, j, n: (i ^ fit(j, i.shape)) | (i >> 1) & ~(j.reshape(-1)[0] << 1),
    "compare": lambda i, j, n: (i > fit(j, i.shape)) | (i == 3),
    "count": lambda i, j, n: jnp.sum(i % 2 == 0, axis=axis_of(i, n), keepdims=True) + ranked(i, 1),
    "any": lambda i, j, n: jnp.any(ranked(i, 1) > 40, axis_of(i, n)) & (j.reshape(-1)[0] > 5),
    "arg": lambda i, j, n: (jnp.argmax, jnp.argmin)[n % 2](ranked(i, 1), axis_of(i, n // 2)),
    "argsort": lambda i, j, n: jnp.argsort(ranked(i, 1), axis_of(i, n)),
    "top_k": lambda i, j, n: lax.top_k(ranked(i, 1), 1 + n % ranked(i, 1).shape[-1])[n % 2],
    "int_cumsum": lambda i, j, n: jnp.cumsum(ranked(i, 1), axis_of(i, n)),
    "int_dot": lambda i, j, n: lax.dot_general(
        matrix(i).astype(jnp.int8),
        fit(j, (matrix(i).shape[1], 8)).astype(jnp.int8),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.int32,
    ),
    "int_max": lambda i, j, n: jnp.max(ranked(i, 1), axis_of(i, n)),
    "int_scatter": lambda i, j, n: (
        ranked(i, 1).at[j.reshape(-1)[:3] % ranked(i, 1).shape[0]].min(2)
    ),
    "int_reshape": _reshape,
    "int_take": _take,
    "bincount": lambda i, j, n: jnp.bincount(i.reshape(-1) % 8, length=8),
    "unsigned": lambda i, j, n: lax.population_count(i.astype(jnp.uint8)) + i.astype(jnp.uint8),
    "random_bits": lambda i, j, n: jax.random.randint(jax.random.key(n), i.shape, 0, 64) + i,
    "searchsorted": lambda i, j, n: jnp.searchsorted(jnp.sort(j.reshape(-1)), i.reshape(-1)),
}
"""From two integer arrays and a number to an integer or boolean array."""
