"""Time of one op on one device: the roofline model of Williams, Waterman and Patterson 2009."""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import NDArray

from .hardware import Device

Array = NDArray[np.float64]


@overload
def op_time_s(
    device: Device, flops: float, bytes_moved: float, dtype: str, matmul: bool
) -> float: ...


@overload
def op_time_s(
    device: Device, flops: Array, bytes_moved: float | Array, dtype: str, matmul: bool
) -> Array: ...


@overload
def op_time_s(
    device: Device, flops: float | Array, bytes_moved: Array, dtype: str, matmul: bool
) -> Array: ...


def op_time_s(
    device: Device,
    flops: float | Array,
    bytes_moved: float | Array,
    dtype: str,
    matmul: bool,
) -> float | Array:
    """Seconds for `flops` flop and `bytes_moved` bytes of device memory traffic.

    Roofline (Williams et al. 2009): the larger of flops / achieved flop/s and bytes / achieved
    bytes/s. A matmul runs at the dtype's matmul peak times `matmul_efficiency`; any other op at
    the device's vector rate, or the dtype's peak where that is lower. Arrays broadcast and give
    an array, numbers give a float. The cost of starting the op, `Device.kernel_latency_s`, is
    not included. Raises nothing of its own.
    """
    peak_flops_per_s = device.matmul_flops_per_s(dtype)
    if matmul:
        flops_per_s = peak_flops_per_s * device.matmul_efficiency
    else:
        flops_per_s = min(device.vector_flops_per_s, peak_flops_per_s)
    bytes_per_s = device.memory_bytes_per_s * device.memory_efficiency
    if isinstance(flops, np.ndarray) or isinstance(bytes_moved, np.ndarray):
        compute_s = np.asarray(flops, dtype=np.float64) / flops_per_s
        return np.maximum(compute_s, np.asarray(bytes_moved, dtype=np.float64) / bytes_per_s)
    return float(max(flops / flops_per_s, bytes_moved / bytes_per_s))
