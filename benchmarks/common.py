"""Shared by the benchmarks: 8 virtual CPU devices, example modules, manual plans."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

if "JAX_NUM_CPU_DEVICES" not in os.environ:  # else a launcher said how many
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

EXAMPLES = ("mlp", "gpt", "gpt_linen_scan", "resnet", "moe", "lstm")

# Megatron-style rules by hand (column- then row-parallel; the axis is called "model"):
# path pattern -> index of the dimension that is split.
TENSOR_RULES: dict[str, dict[str, int]] = {
    "mlp": {r"first.*kernel": 1, r"first.*bias": 0, r"second.*kernel": 0},
    "gpt": {
        r"(query|key|value).*kernel": 1,
        r"(query|key|value).*bias": 0,
        r"out.*kernel": 0,
        r"up.*kernel": 1,
        r"up.*bias": 0,
        r"down.*kernel": 0,
    },
    "gpt_linen_scan": {
        r"(query|key|value).*kernel": 2,
        r"(query|key|value).*bias": 1,
        r"out.*kernel": 1,
        r"up.*kernel": 2,
        r"up.*bias": 1,
        r"down.*kernel": 1,
    },
    "resnet": {r"conv1.*kernel": 3, r"conv2.*kernel": 2},
    "moe": {r"expert|w_?(in|out|up|down)|\['up'\]|\['down'\]": 0},
    "lstm": {r"\['(hf|hg|hi|ho|if|ig|ii|io)'\].*kernel": 1, r"(up|in)_?proj.*kernel": 1},
}


def example(name: str) -> Any:
    """Import one example module."""
    return importlib.import_module(name)


def fsdp_spec(shape: tuple[int, ...], n: int, axis: Any) -> PartitionSpec:
    """Split the largest dimension that ``n`` divides."""
    dims = [d for d in range(len(shape)) if shape[d] % n == 0 and shape[d] >= n]
    if not dims or np.prod(shape) < 1024:
        return PartitionSpec()
    best = max(dims, key=lambda d: shape[d])
    return PartitionSpec(*[axis if d == best else None for d in range(len(shape))])


def manual_shardings(name: str, kind: str, state: Any, batch: Any) -> tuple[Any, Any]:
    """(state shardings, batch shardings) of "data", "fsdp" or "tensor<k>" written by hand."""
    model = int(kind[6:]) if kind.startswith("tensor") else 1
    mesh = jax.make_mesh(
        (8 // model, model), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )

    def of_state(path: Any, x: Any) -> NamedSharding:
        spec = PartitionSpec()
        if kind == "fsdp":
            spec = fsdp_spec(x.shape, 8, "data")
        elif model > 1:
            text = jax.tree_util.keystr(path)
            for pattern, dim in TENSOR_RULES[name].items():
                if re.search(pattern, text) and len(x.shape) > dim and x.shape[dim] % model == 0:
                    spec = PartitionSpec(*[None] * dim, "model")
                    break
        return NamedSharding(mesh, spec)

    def of_batch(x: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec("data"))

    return (
        jax.tree_util.tree_map_with_path(of_state, state),
        jax.tree_util.tree_map(of_batch, batch),
    )
