"""Descriptions of GPUs for XLA's compiler, which needs them if the device is absent.

Sizes of the streaming multiprocessors are NVIDIA's published ones: the architecture whitepapers
(A100 2020, H100 2022; H200 and B200 datasheets) and the table of compute capabilities in the CUDA
C++ Programming Guide, appendix "Compute Capabilities". Memory size and rate are those of the
cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels import Device


@dataclass(frozen=True)
class GpuTarget:
    """Fixed sizes of one GPU kind.

    ``shared_memory_*`` and ``l2_bytes`` are bytes, ``clock_hz`` is the boost clock, ``float_units``
    the float32 lanes of a multiprocessor, ``arch_specific`` whether code may use instructions of
    exactly this architecture (sm_90a, sm_100a).
    """

    name: str
    capability: tuple[int, int]
    arch_specific: bool
    multiprocessors: int
    float_units: int
    clock_hz: float
    l2_bytes: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block: int


_KIB, _MIB = 2**10, 2**20

GPU_TARGETS: dict[str, GpuTarget] = {
    # A100 whitepaper: 108 SMs of 64 lanes, 1410 MHz, 40 MB L2; capability 8.0: 164 KB / 163 KB.
    "a100": GpuTarget(
        "NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 64, 1.41e9, 40 * _MIB, 164 * _KIB, 163 * _KIB
    ),
    # H100 whitepaper: 132 SMs of 128 lanes, 1980 MHz, 50 MB L2; capability 9.0: 228 KB / 227 KB.
    "h100": GpuTarget(
        "NVIDIA H100 80GB HBM3", (9, 0), True, 132, 128, 1.98e9, 50 * _MIB, 228 * _KIB, 227 * _KIB
    ),
    # H200 datasheet: the H100's processor with more memory.
    "h200": GpuTarget(
        "NVIDIA H200", (9, 0), True, 132, 128, 1.98e9, 50 * _MIB, 228 * _KIB, 227 * _KIB
    ),
    # B200: 148 SMs of 128 lanes, 1965 MHz, 126 MB L2; capability 10.0: 228 KB / 227 KB.
    "b200": GpuTarget(
        "NVIDIA B200", (10, 0), True, 148, 128, 1.965e9, 126 * _MIB, 228 * _KIB, 227 * _KIB
    ),
}


def target_config(device: Device) -> str:
    """The device as the text of a ``GpuTargetConfigProto`` of XLA.

    Raises:
        KeyError: `GPU_TARGETS` lacks the device kind.
    """
    gpu = GPU_TARGETS[device.kind]
    major, minor = gpu.capability
    feature = "ACCELERATED_FEATURES" if gpu.arch_specific else "NONE"
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * _KIB}
  shared_memory_per_core: {gpu.shared_memory_per_multiprocessor}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: {gpu.multiprocessors}
  fpus_per_core: {gpu.float_units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(device.memory_bytes_per_s)}
  device_memory_size: {device.memory_bytes}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_hz / 1e9:g}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
