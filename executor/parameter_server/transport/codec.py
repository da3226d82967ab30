"""Gradient compression: pushed values are rounded, and the remainder is added to the next push.

This is error feedback (Seide et al., 1-bit stochastic gradient descent, Interspeech 2014, section
2; Karimireddy et al., Error feedback fixes SignSGD, ICML 2019, which shows that SGD then converges
as fast as without coding, for every code that removes a fixed part of the squared norm). So the sum
of what arrives is the sum of what was pushed minus one remainder.

- "bf16": the nearest bfloat16.
- "int8": one scale per block, its largest magnitude / 127; the nearest multiple of the scale.
- "2bit": one scale a per block; every element becomes -a, 0 or a. Elements above 0.7 of the mean
  magnitude become -a or a, and a is their mean magnitude (Li, Zhang and Liu, Ternary weight
  networks, 2016, section 2.2, whose rule comes close to the least squared error). MXNet's "2bit"
  has one threshold for the whole job that the user tunes. With a scale per block there is nothing
  to tune, and the code removes a part of the squared norm whatever the magnitude of the gradients,
  as the proof requires: at least (1 - 0.7)^2 / 1024 of it, and 0.8 for a normal distribution.

Blocks are runs of a server's flat array, across the boundaries of parameters. Values that are not
finite, or whose sums in a block might not be, are sent unchanged beside the codes: they are never
hidden, and affect neither their neighbors nor the remainder. NumPy works on pieces that stay in a
cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from executor.parameter_server.placement.layout import Array, Flat, widen
from planner.errors import RequestError

KINDS = ("bf16", "int8", "2bit")

BLOCK = 1024
"""Elements that share a scale."""

PIECE = 64 * BLOCK
"""Elements that are processed at once: 256 KiB of float32."""

KEPT = 0.7
"""Fraction of the mean magnitude of a block; "2bit" sets elements that are not above it to 0."""

SIGNS = np.array([[(0, 1, -1, 0)[b >> s & 3] for s in (0, 2, 4, 6)] for b in range(256)], np.int8)
"""The four values that each byte encodes."""


@dataclass(frozen=True)
class Coded:
    """A 1-D array of floating-point numbers, as it is sent.

    Attributes:
        kind: kind of the code.
        dtype: name of the array's dtype.
        size: number of elements.
        codes: uint16[size], the bits of bfloat16 (which Ray would copy); int8[size]; or
            uint8[size / 4, rounded up], the first in the lowest bits: 0, 1 and 2 for 0, a and -a.
        scales: [size / 1024, rounded up]; empty for "bf16".
        at, odd: indices and values of the elements that are not coded.
    """

    kind: str
    dtype: str
    size: int
    codes: Array
    scales: Array
    at: Array
    odd: Array

    @property
    def nbytes(self) -> int:
        """Total bytes of the arrays."""
        return sum(x.nbytes for x in (self.codes, self.scales, self.at, self.odd))


def coded(dtype: str, kind: str) -> bool:
    """Whether the code makes arrays of this dtype smaller; others are sent unchanged."""
    if kind not in KINDS:
        raise RequestError(f"compress={kind!r}: expected None or one of {', '.join(KINDS)}")
    least = 4 if kind == "bf16" else 2
    return dtype in ("float64", "float32", "float16", "bfloat16") and (
        np.dtype(dtype).itemsize >= least
    )


def encode(kind: str, values: Array, residual: Array | None) -> tuple[Coded, Array]:
    """Encode an array.

    Args:
        kind: "bf16", "int8" or "2bit".
        values: 1-D, of a dtype that is ``coded``.
        residual: the remainder that the last call returned; None: none. It is not changed.

    Returns:
        The message, and the remainder: float32 (float64 for float64), of the shape of ``values``.
    """
    size, dtype = values.size, values.dtype
    work: Any = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    left = np.empty(size, work)
    codes = {
        "bf16": np.empty(size, ml_dtypes.bfloat16),
        "int8": np.empty(size, np.int8),
        "2bit": np.empty(-(-size // 4), np.uint8),
    }[kind]
    scales = np.empty(0 if kind == "bf16" else -(-size // BLOCK), work)
    most = float(np.finfo(work).max) / (4 * BLOCK)
    if kind == "bf16":
        most = min(most, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max))
    ends = float(ml_dtypes.finfo(dtype).max)
    rooms = np.empty((2, min(PIECE, -(-size // BLOCK) * BLOCK)), work)
    at, odd = [np.empty(0, np.int64)], [np.empty(0, work)]
    for begin in range(0, size, PIECE):
        end = min(size, begin + PIECE)
        count = end - begin
        full = -(-count // BLOCK) * BLOCK
        total, magnitude = rooms[:, :full]
        total[:count] = values[begin:end]
        total[count:] = 0
        if residual is not None:
            total[:count] += residual[begin:end]
            if ends < most:  # float16: its sum with a remainder may leave its range
                finite = np.isfinite(total)
                np.clip(total, -ends, ends, out=total, where=finite)
        np.abs(total, out=magnitude)
        if not magnitude.max(initial=0.0) <= most:
            (places,) = np.nonzero(~(magnitude <= most))
            at.append(places + begin)
            odd.append(total[places])
            total[places] = magnitude[places] = 0
        blocks, sizes = total.reshape(-1, BLOCK), magnitude.reshape(-1, BLOCK)
        scale = slice(begin // BLOCK, (begin + full) // BLOCK)
        if kind == "bf16":
            codes[begin:end] = total[:count]
            decoded = codes[begin:end]
        elif kind == "int8":
            scales[scale], multiples = _int8(blocks, sizes)
            decoded = multiples.reshape(-1)[:count]
            codes[begin:end] = decoded
            np.multiply(multiples, scales[scale, None], out=sizes)
            decoded = magnitude[:count]
        else:
            scales[scale], packed, signs = _ternary(blocks, sizes)
            codes[begin // 4 : -(-end // 4)] = packed[: -(-count // 4)]
            np.multiply(signs, scales[scale, None], out=sizes)
            decoded = magnitude[:count]
        np.subtract(total[:count], decoded.astype(dtype, copy=False), out=left[begin:end])
    places, beside = np.concatenate(at), np.concatenate(odd)
    sent = codes.view(np.uint16) if kind == "bf16" else codes
    return Coded(kind, str(dtype), size, sent, scales, places, beside), left


def decode(message: Coded) -> Array:
    """Decode a message into a new 1-D array."""
    out = np.empty(message.size, np.dtype(message.dtype))
    if message.kind == "bf16":
        widen(message.codes.view(ml_dtypes.bfloat16), out)
    else:
        scales = message.scales
        for begin in range(0, message.size, PIECE):
            end = min(message.size, begin + PIECE)
            if message.kind == "int8":
                signs = message.codes[begin:end]
            else:
                signs = SIGNS[message.codes[begin // 4 : -(-end // 4)]].reshape(-1)[: end - begin]
            whole = (end - begin) // BLOCK * BLOCK
            first = begin // BLOCK
            last = first + whole // BLOCK
            np.multiply(
                signs[:whole].reshape(-1, BLOCK),
                scales[first:last, None],
                out=out[begin : begin + whole].reshape(-1, BLOCK),
                casting="unsafe",
            )
            if begin + whole < end:
                out[begin + whole : end] = signs[whole:] * scales[last]
    out[message.at] = message.odd
    return out


class Feedback:
    """Encodes one worker's pushes, and stores the remainders: as much memory as the gradients.

    Args:
        kind: kind of the code.
        servers: number of servers.
    """

    def __init__(self, kind: str, servers: int) -> None:
        self.kind = kind
        self.left: list[Flat] = [{} for _ in range(servers)]

    def encode(self, server: int, flat: Flat) -> tuple[Flat, dict[str, Coded]]:
        """What to send to a server: unchanged arrays, and coded ones, by dtype.

        Every call updates the remainder: to send a message again, send the same object.
        """
        plain, messages = {}, {}
        for dtype, values in flat.items():
            if coded(dtype, self.kind):
                left = self.left[server]
                messages[dtype], left[dtype] = encode(self.kind, values, left.get(dtype))
            else:
                plain[dtype] = values
        return plain, messages


def _int8(blocks: Array, sizes: Array) -> tuple[Array, Array]:
    """Scales [n], and the multiples of them nearest to ``blocks`` [n, 1024], put in ``sizes``."""
    scale = sizes.max(axis=1) / blocks.dtype.type(127)
    scale[scale < np.finfo(scale.dtype).tiny] = 0  # its inverse might not be finite
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    multiples = np.multiply(blocks, inverse[:, None], out=sizes)
    return scale, np.rint(multiples, out=multiples)


def _ternary(blocks: Array, sizes: Array) -> tuple[Array, Array, Array]:
    """Scales [n], codes packed in bytes [n * 256], and signs, int8 [n, 1024]."""
    least = blocks.dtype.type(KEPT) * sizes.mean(axis=1, keepdims=True)
    above, below = blocks > least, blocks < -least
    signs = above.view(np.int8) - below.view(np.int8)
    mask = above | below
    count = np.count_nonzero(mask, axis=1)
    np.multiply(sizes, mask, out=sizes)
    scale = sizes.sum(axis=1) / np.maximum(count, 1).astype(sizes.dtype)
    four = (above.view(np.uint8) + 2 * below.view(np.uint8)).reshape(-1).view("<u4")
    packed = (four | four >> 6 | four >> 12 | four >> 18) & 0xFF
    return scale, packed.astype(np.uint8), signs
