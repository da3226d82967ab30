"""Predicted kernels beside published measurements: bands per kernel and device."""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "published"
BANDS = {
    ("products", "a100", "float16, given shapes"): (0.9, 1.15),
    ("products", "h100", "float8, given shapes"): (0.75, 1.5),
    ("products", "h200", "float8, given shapes"): (0.75, 1.2),
    ("products", "tpu7x", "bfloat16, given shapes"): (0.9, 1.15),
    ("products", "v6e", "bfloat16, given shapes"): (0.9, 1.1),
    ("attention", "a100", "FlashAttention-2, forward+backward"): (0.95, 1.1),
    ("attention", "h100", "FlashAttention-2, forward+backward"): (0.9, 1.05),
    ("memory", "a100", "large"): (0.95, 1.1),
    ("memory", "h100", "large"): (0.95, 1.1),
    ("memory", "h200", "large"): (0.95, 1.15),
    ("memory", "tpu7x", "large"): (0.95, 1.1),
}


@cache
def ratios() -> dict[tuple[str, str, str], list[float]]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import compute_truth

    out: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for source in (compute_truth.products, compute_truth.attention, compute_truth.memory):
        for _, device, what, found, measured in source(SHARED):
            out[source.__name__, device, what].append(found / measured)
    return out


@pytest.mark.parametrize("case", BANDS, ids="-".join)
def test_kernels_stay_in_their_band(case: tuple[str, str, str]) -> None:
    if not (SHARED / "gemm_measured.csv").exists():
        pytest.skip(f"the tables of published measurements are not at {SHARED}")
    low, high = BANDS[case]
    found = ratios()[case]
    assert low <= min(found) and max(found) <= high
    assert 0.9 <= median(found) <= 1.1
