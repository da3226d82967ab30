"""Settings that change results besides the program: versions, JAX, environment, devices."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping

import jax

from executor.processes.agreement.fingerprints import Fingerprint

PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes", "flax", "optax", "equinox")
"""Packages whose versions are compared between the processes that import them."""
ABSENT = "not imported"
CONFIG = (
    "jax_enable_x64",
    "jax_explicit_x64_dtypes",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_threefry_gpu_kernel_lowering",
    "jax_high_dynamic_range_gumbel",
    "jax_random_seed_offset",
    "jax_legacy_prng_key",
    "jax_enable_custom_prng",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_softmax_custom_jvp",
    "jax_use_direct_linearize",
    "jax_allow_f16_reductions",
    "jax_use_shardy_partitioner",
    "jax_use_magma",
    "jax_disable_jit",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_cpu_collectives_implementation",
    "jax_sort_devices_by_process_index",
)
"""Settings of ``jax.config`` that change numerical results or the compiled program."""
VARIABLES = (
    "LIBTPU_INIT_ARGS",
    "NVIDIA_TF32_OVERRIDE",
    "TF_CUDNN_DETERMINISTIC",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Environment variables that do so, besides ``XLA_FLAGS``."""
HARMLESS = ("--xla_dump", "--xla_force_host_platform_device_count", "--xla_gpu_cuda_data_dir")
"""Prefixes of XLA flags that may differ between hosts, or are compared in another way."""


def settings(environment: Mapping[str, str] | None = None) -> tuple[Fingerprint, ...]:
    """The settings of this process that must be the same in all processes of a job."""
    environment = os.environ if environment is None else environment
    pairs = {"devices": _devices()}
    pairs |= {name: _version(name) for name in PACKAGES}
    pairs |= {name: str(getattr(jax.config, name, None)) for name in CONFIG}
    pairs["XLA_FLAGS"] = xla_flags(environment.get("XLA_FLAGS", ""))
    pairs |= {name: environment.get(name, "") for name in VARIABLES}
    return tuple(
        Fingerprint(f"{k}={v}" if v != ABSENT else "", _shown(k, v)) for k, v in pairs.items()
    )


def _devices() -> str:
    here = jax.local_devices()
    return f"{len(here)} {here[0].platform}"


def _shown(name: str, value: str) -> str:
    if name == "devices":
        return f"{value} device{'' if value.startswith('1 ') else 's'}"
    if name in PACKAGES:
        return f"{name} {value}"
    return f"{name}={value or 'nothing'}"


def _version(package: str) -> str:
    """The version of a package that is imported."""
    if package not in sys.modules:
        return ABSENT
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules[package], "__version__", "unknown"))


def xla_flags(text: str) -> str:
    """The flags that change numerical results, sorted.

    >>> xla_flags("--xla_gpu_b=1 --xla_dump_to=/tmp/x --xla_a=2")
    '--xla_a=2 --xla_gpu_b=1'
    """
    return " ".join(sorted(flag for flag in text.split() if not flag.startswith(HARMLESS)))
