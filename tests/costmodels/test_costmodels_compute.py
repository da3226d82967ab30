"""Roofline times and the analytic model's plain attributes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import (
    AnalyticCostModel,
    CostModel,
    Kernel,
    attention_drag,
    collective_coefficients,
    op_time_s,
    parse_cluster,
)

H100 = parse_cluster("h100:8").device
COUNTS = st.floats(0, 1e18)


KINDS = st.sampled_from(["vector", "matmul", "attention"])


def test_compute_bound_matmul() -> None:
    assert op_time_s(H100, 9.89e14, 1.0, "bfloat16", "matmul") == pytest.approx(1 / 0.73)


def test_the_result_of_a_matmul_is_written_on_top() -> None:
    stored_s = 1.74 * 3.35e12 / (3.35e12 * 0.87)
    found = op_time_s(H100, 9.89e14, 3.35e12, "bfloat16", "matmul", 3.35e12)
    assert found == pytest.approx(1 / 0.73 + stored_s)


def test_memory_bound_op() -> None:
    assert op_time_s(H100, 1.0, 3.35e12, "float32") == pytest.approx(1 / 0.87)
    assert op_time_s(H100, 1.0, 3.35e12, "float32", "matmul") == pytest.approx(1 / 0.87)


def test_other_ops_run_at_the_vector_rate() -> None:
    assert op_time_s(H100, 6.7e13, 0.0, "bfloat16", "vector") == pytest.approx(1.0)


def test_attention_has_its_own_rate() -> None:
    assert op_time_s(H100, 9.89e14, 0.0, "bfloat16", "attention") == pytest.approx(1 / 0.4)


def test_attention_is_slow_for_small_heads_and_short_sequences() -> None:
    assert attention_drag(20, 1e12, False) == pytest.approx(2.0)
    assert attention_drag(1e12, 170, False) == pytest.approx(2.0)
    assert attention_drag(1e12, 550, True) == pytest.approx(2.0)
    assert attention_drag(128, 8192, True) > attention_drag(128, 8192, False) > 1.0


def test_shared_cpu_devices_give_no_speedup() -> None:
    one, eight = parse_cluster("cpu:1").device, parse_cluster("cpu:8").device
    whole_s = op_time_s(one, 8e9, 8e6, "float32", "matmul", 8e6)
    assert op_time_s(eight, 1e9, 1e6, "float32", "matmul", 1e6) == pytest.approx(whole_s)


def test_kernel_latency_is_separate() -> None:
    assert op_time_s(H100, 0.0, 0.0, "float32", "matmul") == 0.0


@given(st.lists(st.tuples(COUNTS, COUNTS, COUNTS), min_size=1, max_size=5), KINDS)
def test_arrays_agree_with_numbers(rows: list[tuple[float, float, float]], kind: Kernel) -> None:
    flops, moved, result = np.array(rows).T
    times_s = op_time_s(H100, flops, moved, "bfloat16", kind, result)
    assert times_s.tolist() == [op_time_s(H100, f, b, "bfloat16", kind, r) for f, b, r in rows]


def test_arrays_broadcast() -> None:
    times_s = op_time_s(H100, np.array([1e12, 2e12]), 10.0, "bfloat16", "matmul")
    assert times_s.shape == (2,)
    assert op_time_s(H100, 10.0, np.array([[1e12]]), "bfloat16", "matmul").shape == (1, 1)


@given(COUNTS, COUNTS, COUNTS, COUNTS, KINDS)
def test_time_grows_with_work(
    flops: float, moved: float, result: float, more: float, kind: Kernel
) -> None:
    base_s = op_time_s(H100, flops, moved, "bfloat16", kind, result)
    assert base_s >= 0.0
    assert op_time_s(H100, flops + more, moved, "bfloat16", kind, result) >= base_s
    assert op_time_s(H100, flops, moved + more, "bfloat16", kind, result) >= base_s
    assert op_time_s(H100, flops, moved, "bfloat16", kind, result + more) >= base_s


@given(COUNTS, COUNTS, COUNTS, st.integers(1, 4096), KINDS)
def test_a_share_takes_its_share_of_the_time(
    flops: float, moved: float, result: float, parts: int, kind: Kernel
) -> None:
    whole_s = op_time_s(H100, flops, moved, "bfloat16", kind, result)
    part_s = op_time_s(H100, flops / parts, moved / parts, "bfloat16", kind, result / parts)
    assert part_s == pytest.approx(whole_s / parts, rel=1e-9, abs=1e-300)


def test_analytic_model() -> None:
    cluster = parse_cluster("h100:8x2")
    model = AnalyticCostModel(cluster)
    assert isinstance(model, CostModel)
    assert model.op_overhead_s == 3.9e-6
    assert model.memory_limit_bytes == 60_000_000_000  # 25 % is not JAX's to give
    assert model.overlap == (0.3, 0.7, 0.7)
    assert AnalyticCostModel(parse_cluster("cpu:8")).overlap == (0.0, 0.0, 0.0)
    assert model.compute_s(1e12, 1e9, "bfloat16", "matmul", 1e8) == op_time_s(
        cluster.device, 1e12, 1e9, "bfloat16", "matmul", 1e8
    )
    assert model.collective_coefficients("all_gather", (2, 8), (1,)) == collective_coefficients(
        cluster, "all_gather", (2, 8), (1,)
    )
    assert hash(model) == hash(AnalyticCostModel(parse_cluster("h100:8x2")))


@pytest.mark.parametrize("power", [1.0, 4.0, 60.0, 100.0])
def test_a_result_beside_its_product(power: float) -> None:
    device = dataclasses.replace(H100, matmul_store=1.0, store_power=power)
    flops, result = 1e6, 1e3
    product_s = op_time_s(device, flops, 0.0, "bfloat16", "matmul")
    store_s = result / (device.memory_bytes_per_s * device.memory_efficiency)
    found = op_time_s(device, flops, 0.0, "bfloat16", "matmul", result)
    least, most = sorted((product_s, store_s))
    expected = most * (1 + (least / most) ** power) ** (1 / power)
    assert found == pytest.approx(expected) and found > 0
    assert op_time_s(device, 0.0, 0.0, "bfloat16", "matmul", 0.0) == 0.0
