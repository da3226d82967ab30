"""Every example under every hand-written plan: predicted bytes are Shardy's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import shardy_truth

FIRST = {("mlp", "fsdp"), ("moe", "tensor8"), ("resnet", "mixed4"), ("llama", "mixed2")}
"""Checked in every run of the tests: among them is one of each change that has gone wrong."""
HALF = 64 * 4096 * 4096 * 2 // 4 // 2
JOINED = {("llama", "mixed2", "reduce_scatter"): -4 * HALF}
"""Bytes that a plan has more than Shardy. The gradients of one input by gate and up, in two layers,
are two reductions for Shardy; XLA reduces their sum, as is planned (decision 022)."""


@pytest.mark.parametrize(
    ("name", "kind", "devices"),
    [
        pytest.param(name, kind, devices, marks=() if (name, kind) in FIRST else pytest.mark.slow)
        for name in shardy_truth.MODELS
        for kind, devices in shardy_truth.PLANS
    ],
)
def test_bytes_of_every_kind_are_shardys(name: str, kind: str, devices: int) -> None:
    predicted, found = shardy_truth.bytes_by_kind(name, kind, devices)
    assert predicted and predicted.keys() == found.keys()
    for collective, nbytes in predicted.items():
        nbytes -= JOINED.get((name, kind, collective), 0)
        assert nbytes == pytest.approx(found[collective], rel=0.02), collective
