"""Lower bounds of compute hold: no strategy beats a perfect split, no plan a scout's bound."""

from __future__ import annotations

import itertools
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import AnalyticCostModel, parse_cluster
from planner.choose.bounds import Field, scouted
from planner.choose.simplest import SAME
from planner.cost.pricing import price
from planner.cost.rates import Rates
from planner.graph.trace import trace
from planner.search import recursive_programming
from planner.space.groups import build_groups
from planner.spec import enumerate_meshes
from planner.step.analysis import analyse, ideal_s
from planner.step.classes import Quotient, fold_analysis
from planner.step.kernels.costs import Work

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ("mlp", "gpt", "gpt_linen_scan", "resnet", "moe", "lstm")


@cache
def quotient_of(name: str) -> Quotient:
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    module: Any = __import__(name)
    traced = trace(module.train_step, module.example_args())
    rules = traced.rules
    groups = build_groups(traced.graph, rules)
    found = analyse(traced.graph, rules, groups, (True,) * len(traced.graph.inputs))
    return fold_analysis(found, (), inputs_differ=False)


CLUSTERS = ("h100:8", "v5p:2x2x2", "cpu:8")
QUICK = {(name, CLUSTERS[k % 3]) for k, name in enumerate(EXAMPLES)}
"""Every example on one cluster; the others are left to ``make test-all``."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(EXAMPLES, CLUSTERS)
    ],
)
def test_no_plan_beats_a_bound(name: str, cluster: str) -> None:
    quotient, model = quotient_of(name), AnalyticCostModel(parse_cluster(cluster))
    ideal = ideal_s(quotient.whole, model, 8)
    assert ideal > 0
    meshes = [(mesh, {}) for mesh in enumerate_meshes(8)]
    scouts = scouted(Field(quotient.part, model, meshes, 1e12, SAME, 0.0))
    assert {s.priced.mesh for s in scouts} == {mesh for mesh, _ in meshes}
    for scout in scouts:
        problem = price(quotient.part, scout.priced.mesh, model, 1e12).problem
        solution = recursive_programming(problem, time_limit_s=5.0)
        assert scout.bound_s <= solution.cost_s * (1 + 1e-9), scout.priced.mesh
        assert ideal <= solution.cost_s * (1 + 1e-9), scout.priced.mesh


FACTORS = frozenset({0}), frozenset({1}), frozenset({2}), frozenset({3})


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.integers(0, 3).map(lambda e: 2**e) for _ in range(3)]),
    st.lists(st.integers(-1, 3), min_size=3, max_size=3),
    st.sampled_from(["vector", "matmul", "attention"]),
    st.floats(1e6, 1e15),
    st.tuples(*[st.floats(1e3, 1e11) for _ in range(3)]),
)
def test_no_strategy_beats_a_perfect_split(
    mesh: tuple[int, ...], row: list[int], kind: Any, flops: float, nbytes: tuple[float, ...]
) -> None:
    """Classes of a product: batch, m, n, k."""
    a, b, c = nbytes
    traffic = ((a, (0, 1, 3)), (b, (0, 2, 3)), (c, (0, 1, 2)))
    result = (c, (0, 1, 2)) if kind == "matmul" else (0.0, ())
    work = Work(FACTORS, flops, traffic, "bfloat16", kind, 2.0, *result)
    model = AnalyticCostModel(parse_cluster("h100:8x64"))
    found = Rates.of([mesh], model).compute_s(work, np.array([row]))[0, 0]
    n = int(np.prod(mesh))
    perfect = 2.0 * model.op_overhead_s + model.compute_s(
        flops / n, work.nbytes / n, "bfloat16", kind, result[0] / n
    )
    assert found >= perfect * (1 - 1e-12)


def test_a_product_by_hand() -> None:
    """2 x 2 devices: axis 0 splits m, axis 1 splits the contracted k."""
    model = AnalyticCostModel(parse_cluster("h100:4"))
    work = Work(
        FACTORS, 8e12, ((4e6, (0, 1, 3)), (8e6, (0, 2, 3)), (2e6, (0, 1, 2))), "bfloat16",
        "matmul", 1.0, 2e6, (0, 1, 2),
    )  # fmt: skip
    rates = Rates.of([(2, 2)], model)
    found = rates.compute_s(work, np.array([[-1, -1], [1, 3], [1, 1]]))[0]

    def by_hand(flops: float, moved: float, result: float) -> float:
        return 3.9e-6 + model.compute_s(flops, moved, "bfloat16", "matmul", result)

    assert found[0] == pytest.approx(by_hand(8e12, 14e6, 2e6))
    assert found[1] == pytest.approx(by_hand(2e12, 1e6 + 4e6 + 1e6, 1e6))
    assert found[2] == pytest.approx(by_hand(2e12, 1e6 + 8e6 + 0.5e6, 0.5e6))
