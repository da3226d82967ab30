"""Roofline times and the analytic model's plain attributes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import (
    AnalyticCostModel,
    CostModel,
    collective_coefficients,
    op_time_s,
    parse_cluster,
)

H100 = parse_cluster("h100:8").device
COUNTS = st.floats(0, 1e18)


def test_compute_bound_matmul() -> None:
    assert op_time_s(H100, 9.89e14, 1.0, "bfloat16", True) == pytest.approx(1 / 0.6)


def test_memory_bound_op() -> None:
    assert op_time_s(H100, 1.0, 3.35e12, "float32", False) == pytest.approx(1 / 0.87)


def test_other_ops_run_at_the_vector_rate() -> None:
    assert op_time_s(H100, 6.7e13, 0.0, "bfloat16", False) == pytest.approx(1.0)


def test_shared_cpu_devices_give_no_speedup() -> None:
    one, eight = parse_cluster("cpu:1").device, parse_cluster("cpu:8").device
    whole_s = op_time_s(one, 8e9, 8e6, "float32", True)
    assert op_time_s(eight, 1e9, 1e6, "float32", True) == pytest.approx(whole_s)


def test_kernel_latency_is_separate() -> None:
    assert op_time_s(H100, 0.0, 0.0, "float32", True) == 0.0


@given(st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=5), st.booleans())
def test_arrays_agree_with_numbers(pairs: list[tuple[float, float]], matmul: bool) -> None:
    flops, moved = np.array(pairs).T
    times_s = op_time_s(H100, flops, moved, "bfloat16", matmul)
    assert times_s.tolist() == [op_time_s(H100, f, b, "bfloat16", matmul) for f, b in pairs]


def test_arrays_broadcast() -> None:
    times_s = op_time_s(H100, np.array([1e12, 2e12]), 10.0, "bfloat16", True)
    assert times_s.shape == (2,)
    assert op_time_s(H100, 10.0, np.array([[1e12]]), "bfloat16", True).shape == (1, 1)


@given(COUNTS, COUNTS, COUNTS, st.booleans())
def test_time_grows_with_work(flops: float, moved: float, more: float, matmul: bool) -> None:
    base_s = op_time_s(H100, flops, moved, "bfloat16", matmul)
    assert base_s >= 0.0
    assert op_time_s(H100, flops + more, moved, "bfloat16", matmul) >= base_s
    assert op_time_s(H100, flops, moved + more, "bfloat16", matmul) >= base_s


def test_analytic_model() -> None:
    cluster = parse_cluster("h100:8x2")
    model = AnalyticCostModel(cluster)
    assert isinstance(model, CostModel)
    assert model.op_overhead_s == 4.0e-6
    assert model.memory_limit_bytes == 80_000_000_000
    assert model.overlap == 0.3
    assert AnalyticCostModel(parse_cluster("cpu:8")).overlap == 0.0
    assert model.compute_s(1e12, 1e9, "bfloat16", True) == op_time_s(
        cluster.device, 1e12, 1e9, "bfloat16", True
    )
    assert model.collective_coefficients("all_gather", (2, 8), (1,)) == collective_coefficients(
        cluster, "all_gather", (2, 8), (1,)
    )
    assert hash(model) == hash(AnalyticCostModel(parse_cluster("h100:8x2")))
