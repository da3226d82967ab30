"""Resharding: the table is the sum of the steps; identities; codes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import AnalyticCostModel, parse_cluster
from planner.cost.reshard import digits_of, encode, reshard_steps, reshard_table

MODELS = {
    n: [AnalyticCostModel(parse_cluster(text)) for text in texts]
    for n, texts in {
        4: ["cpu:4", "h100:4", "v5p:2x2x1"],
        6: ["cpu:6", "a100:6"],
        8: ["cpu:8", "h100:8", "h100:4x2"],
        12: ["cpu:12", "h100:6x2"],
    }.items()
}
MESHES = {
    4: [(4,), (2, 2), (1, 4)],
    6: [(6,), (3, 2), (2, 3), (1, 3, 2)],
    8: [(8,), (4, 2), (2, 4), (2, 2, 2)],
    12: [(12,), (4, 3), (2, 6), (2, 3, 2), (3, 2, 2)],
}


@st.composite
def cases(draw: st.DrawFn):  # type: ignore[no-untyped-def]
    devices = draw(st.sampled_from(sorted(MESHES)))
    sizes = draw(st.sampled_from(MESHES[devices]))
    model = draw(st.sampled_from(MODELS[devices]))
    rank = draw(st.integers(1, 3))
    src = [draw(st.integers(0, rank + 1)) for _ in sizes]
    dst = [draw(st.integers(0, rank)) for _ in sizes]
    return sizes, model, rank, src, dst, draw(st.floats(0, 1e10))


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(cases(), st.booleans())
def test_table_is_the_sum_of_the_steps(case, combined: bool) -> None:  # type: ignore[no-untyped-def]
    sizes, model, rank, src, dst, nbytes = case
    table = reshard_table(rank, sizes, model)
    at = encode(src, rank), encode(dst, rank)
    alpha = (table.combined_alpha_s if combined else table.alpha_s)[at]
    expected = sum(s.time_s for s in reshard_steps(src, dst, rank, nbytes, sizes, model, combined))
    assert alpha + nbytes * table.beta_s_per_byte[at] == pytest.approx(
        expected, rel=1e-9, abs=1e-18
    )


@pytest.mark.parametrize("rank", [1, 2])
def test_table_is_the_sum_of_the_steps_for_every_pair_of_a_small_mesh(rank: int) -> None:
    sizes, model, nbytes = (2, 3), MODELS[6][1], 6e6
    table = reshard_table(rank, sizes, model)
    sources = itertools.product(range(rank + 2), repeat=2)
    targets = list(itertools.product(range(rank + 1), repeat=2))
    for src, dst in itertools.product(sources, targets):
        at = encode(src, rank), encode(dst, rank)
        steps = reshard_steps(src, dst, rank, nbytes, sizes, model)
        total = table.alpha_s[at] + nbytes * table.beta_s_per_byte[at]
        assert total == pytest.approx(sum(s.time_s for s in steps), rel=1e-12), (src, dst)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_identities(case) -> None:  # type: ignore[no-untyped-def]
    sizes, model, rank, src, dst, nbytes = case
    table = reshard_table(rank, sizes, model)

    def time(a: list[int], b: list[int]) -> float:
        at = encode(a, rank), encode(b, rank)
        return float(table.alpha_s[at] + nbytes * table.beta_s_per_byte[at])

    none, partial = [0] * len(sizes), rank + 1
    assert time(dst, dst) == 0.0  # nothing changes
    assert time(none, dst) == 0.0  # a slice is free
    assert time(src, dst) >= 0.0
    # summing into shards takes no more time per byte than summing everywhere; it may take more
    # steps, where a sum can go up a tree or be made by a switch
    beta = table.beta_s_per_byte
    for k in range(len(sizes)):
        unreduced = [partial if j == k else 0 for j in range(len(sizes))]
        scattered = [1 if j == k else 0 for j in range(len(sizes))]
        start = encode(unreduced, rank)
        assert beta[start, encode(scattered, rank)] <= beta[start, encode(none, rank)]


def test_a_partial_sum_is_never_a_target() -> None:
    table = reshard_table(2, (4, 2), MODELS[8][0])
    for dst in itertools.product(range(4), repeat=2):
        column = table.alpha_s[:, encode(dst, 2)]
        assert np.isinf(column).all() if 3 in dst else np.isfinite(column).all()


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ((3, 0), (1, 0), [("reduce_scatter", (0,), 800.0)]),
        ((3, 0), (0, 0), [("all_reduce", (0,), 800.0)]),
        ((3, 3), (0, 0), [("all_reduce", (0, 1), 800.0)]),
        ((1, 0), (2, 0), [("all_to_all", (0,), 200.0)]),
        ((1, 0), (0, 0), [("all_gather", (0,), 800.0)]),
        ((1, 2), (0, 2), [("all_gather", (0,), 400.0)]),
        ((1, 2), (0, 0), [("all_gather", (0, 1), 800.0)]),
        ((3, 0), (1, 2), [("reduce_scatter", (0,), 400.0)]),  # the free slice goes first
        ((3, 1), (2, 0), [("reduce_scatter", (0,), 400.0), ("all_gather", (1,), 200.0)]),
        ((3, 3), (1, 0), [("all_reduce", (0, 1), 800.0)]),  # one axis stays whole: no scatter
        # checked with Shardy itself in tests/executor/test_shardy.py
        (
            (1, 2),
            (2, 0),
            [("permute", (0, 1), 100.0), ("all_to_all", (0,), 100.0), ("all_gather", (1,), 200.0)],
        ),
        ((1, 0), (2, 1), [("permute", (0, 1), 100.0), ("all_to_all", (0,), 100.0)]),
        ((1, 1), (0, 1), [("permute", (0, 1), 100.0), ("all_gather", (0,), 400.0)]),
        ((0, 1), (1, 0), [("permute", (0, 1), 200.0)]),
        ((0, 0), (1, 2), []),
        ((1, 2), (1, 2), []),
    ],
)
def test_steps_and_payloads(
    src: tuple[int, ...], dst: tuple[int, ...], expected: list[tuple[str, tuple[int, ...], float]]
) -> None:
    steps = reshard_steps(src, dst, 2, 800.0, (4, 2), MODELS[8][0])
    assert [(s.kind, s.axes, s.payload_bytes) for s in steps] == expected


def test_step_times_are_the_cost_models() -> None:
    model, sizes = MODELS[8][1], (4, 2)
    (step,) = reshard_steps((3, 0), (0, 0), 2, 1e6, sizes, model)
    alpha, beta = model.collective_coefficients("all_reduce", sizes, (0,))
    assert step.time_s == alpha + beta * 1e6
    (step,) = reshard_steps((3, 0), (0, 0), 2, 1e6, sizes, model, combined=True)
    assert step.time_s == pytest.approx(model.combined_latency * alpha + beta * 1e6)
    alone = reshard_steps((1, 0), (2, 0), 2, 1e6, sizes, model)
    assert alone[0].kind == "all_to_all"
    assert alone == reshard_steps((1, 0), (2, 0), 2, 1e6, sizes, model, combined=True)


@given(
    st.integers(0, 4).flatmap(
        lambda r: st.tuples(st.just(r), st.lists(st.integers(0, r + 1), min_size=1, max_size=4))
    )
)
def test_codes_and_digits_are_inverses(case: tuple[int, list[int]]) -> None:
    rank, digits = case
    code = encode(digits, rank)
    assert 0 <= code < (rank + 2) ** len(digits)
    assert digits_of(code, rank, len(digits)) == tuple(digits)


def test_every_code_is_met_once() -> None:
    seen = {digits_of(code, 2, 3) for code in range(4**3)}
    assert len(seen) == math.prod((4, 4, 4))
    assert {encode(d, 2) for d in seen} == set(range(64))


def test_on_tpu_a_sum_is_written_before_what_follows() -> None:
    def seconds(cluster: str, dst: tuple[int, ...]) -> tuple[float, float]:
        """Of the steps from partial sums along one axis, and of their collectives alone."""
        model = AnalyticCostModel(parse_cluster(cluster))
        steps = reshard_steps((2,), dst, 1, 1e9, (8,), model)
        alone = 0.0
        for s in steps:
            alpha, beta = model.collective_coefficients(s.kind, (8,), s.axes)  # type: ignore[arg-type]
            alone += alpha + beta * s.payload_bytes
        return sum(s.time_s for s in steps), alone

    device = parse_cluster("v5e:8").device
    again = 6e9 / (device.memory_bytes_per_s * device.memory_efficiency)
    whole, alone = seconds("v5e:8", (0,))
    assert whole - alone == pytest.approx(again)
    shard, alone = seconds("v5e:8", (1,))
    assert shard - alone == pytest.approx(again / 8)
    assert seconds("h100:8", (0,))[0] == pytest.approx(seconds("h100:8", (0,))[1])
