"""Time of one kernel on one device: a roofline (Williams, Waterman and Patterson 2009) in which
matrix products also pay for writing their result, and attention runs at a rate that depends on its
shape."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from .hardware import Device

Array = NDArray[np.float64]

Kernel = Literal["vector", "matmul", "batched", "split", "convolution", "attention"]
"""What a kernel does: elementwise work, a product of matrices, a convolution, fused attention."""

SPLIT_STORE = 1.5
"""Least number of times that a product with a split contraction pays for writing its result
(compiled with libtpu 0.0.42 for v5e, v5p and v6e: 1.3 to 2; docs/explanation/compute.md)."""
ATTENTION_DEPTH = 20.0
"""Head size at which the softmax costs as much as the products: fit of FlashAttention-2, forward
and backward, on A100 (18.8) and H100 (22.1); see docs/explanation/compute.md."""
ATTENTION_SPAN = 170.0
"""Sequence length at which starting and draining cost as much as the products (168 and 182)."""
ATTENTION_CAUSAL_SPAN = 550.0
"""The same with a causal mask, where tiles on the diagonal are half wasted (524 and 565)."""


@overload
def op_time_s(
    device: Device,
    flops: float,
    bytes_moved: float,
    dtype: str,
    kind: Kernel = "vector",
    result_bytes: float = 0.0,
) -> float: ...


@overload
def op_time_s(
    device: Device,
    flops: Array,
    bytes_moved: float | Array,
    dtype: str,
    kind: Kernel = "vector",
    result_bytes: float | Array = 0.0,
) -> Array: ...


@overload
def op_time_s(
    device: Device,
    flops: float | Array,
    bytes_moved: Array,
    dtype: str,
    kind: Kernel = "vector",
    result_bytes: float | Array = 0.0,
) -> Array: ...


def op_time_s(
    device: Device,
    flops: float | Array,
    bytes_moved: float | Array,
    dtype: str,
    kind: Kernel = "vector",
    result_bytes: float | Array = 0.0,
) -> float | Array:
    """Seconds of one kernel on one device, without its start (`Device.kernel_latency_s`).

    Args:
        device: the device.
        flops: flop; for fused attention, multiplied by `attention_drag`.
        bytes_moved: bytes of device memory traffic, operands and results.
        dtype: dtype name of the operands.
        kind: "vector" runs at the device's vector rate, or the dtype's peak where that is lower;
            "matmul" at the dtype's peak times `matmul_efficiency`; "convolution" and "attention"
            at that peak times the efficiency of their name. "batched" is a matmul with batch
            dimensions on a TPU: the times of its flop and of its bytes add up. "split" is a matmul
            on a TPU whose tiles cover a part of the contraction: it pays for its result after its
            flop, at least `SPLIT_STORE` times.
        result_bytes: for a matmul or a convolution, the bytes of its result, with elements no
            narrower than `lane_bytes`. They cost `matmul_store` times their memory time, and a norm
            with power `store_power` combines this with the time of the flop: power 1 adds the two,
            a large power takes the slower. A short contraction writes many bytes per flop, so it is
            slow.

    Returns:
        The larger of compute time (with the result's) and memory time: an array if any of the
        counts is an array (they broadcast), else a float. It grows with every count. Dividing all
        counts by n divides it by n. The function raises no errors itself.
    """
    peak = device.matmul_flops_per_s(dtype)
    byte_s = 1.0 / (device.memory_bytes_per_s * device.memory_efficiency)
    rate = {
        "vector": min(device.vector_flops_per_s, peak),
        "matmul": peak * device.matmul_efficiency,
        "batched": peak * device.matmul_efficiency,
        "split": peak * device.matmul_efficiency,
        "convolution": peak * device.convolution_efficiency,
        "attention": peak * device.attention_efficiency,
    }[kind]
    compute_s = flops / rate
    if kind == "batched":
        stored_s = result_bytes * (device.matmul_store * byte_s)
        both_s = compute_s + np.maximum(stored_s, bytes_moved * byte_s)
        return both_s if isinstance(both_s, np.ndarray) else float(both_s)
    if kind == "split":
        compute_s = compute_s + result_bytes * (max(SPLIT_STORE, device.matmul_store) * byte_s)
    elif kind in ("matmul", "convolution"):
        store_s = result_bytes * (device.matmul_store * byte_s)
        power = device.store_power
        if power == 1.0:
            compute_s = compute_s + store_s
        else:
            most = np.maximum(np.maximum(compute_s, store_s), np.finfo(float).tiny)
            both = (compute_s / most) ** power + (store_s / most) ** power
            compute_s = most * both ** (1.0 / power)
    memory_s = bytes_moved * byte_s
    if isinstance(compute_s, np.ndarray) or isinstance(memory_s, np.ndarray):
        return np.maximum(compute_s, memory_s)
    return float(max(compute_s, memory_s))


def attention_drag(depth: float, span: float, causal: bool) -> float:
    """How many times slower than its best rate fused attention runs, at least 1.

    Args:
        depth: size of a head.
        span: length of the sequence.
        causal: whether half of the products is masked away (and not counted).
    """
    edge = ATTENTION_CAUSAL_SPAN if causal else ATTENTION_SPAN
    return (1.0 + ATTENTION_DEPTH / depth) * (1.0 + edge / span)
