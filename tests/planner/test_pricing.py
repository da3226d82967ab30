"""Pricing: searches agree on small programs, and the prediction is the searched cost."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from costmodels import AnalyticCostModel, parse_cluster
from planner import make_plan
from planner.cost.peak import traced_peak
from planner.cost.pricing import Priced, price
from planner.graph.trace import trace
from planner.plan.extract import Extraction
from planner.plan.plan import Plan
from planner.search import SEARCHES, evaluate, verify
from planner.search.searches.brute import MOST, combinations
from planner.space.groups import build_groups
from planner.spec import parse_mesh
from planner.step.analysis import Analysis, analyse

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def analysis_of(function: Callable[..., Any], *args: Any) -> Analysis:
    traced = trace(function, args)
    rules = traced.rules
    donated = [False] * len(traced.graph.inputs)
    for i, _ in traced.graph.ties:
        donated[i] = True
    return analyse(traced.graph, rules, build_groups(traced.graph, rules), donated)


def priced_on(found: Analysis, cluster: str, mesh: str, limit: float = math.inf) -> Priced:
    return price(found, parse_mesh(mesh), AnalyticCostModel(parse_cluster(cluster)), limit)


def two_matmuls(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ a) @ b


SMALL = (struct(512, 2048), struct(2048, 256), struct(1024, 512))

# ---- programs of the consistency check ---------------------------------------------------


def perceptron(state: Any, x: jax.Array) -> Any:
    def loss(w: Any) -> jax.Array:
        return jnp.mean((jax.nn.gelu(x @ w["a"] + w["c"]) @ w["b"]) ** 2)

    w, m = state
    value, grads = jax.value_and_grad(loss)(w)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, w, m), m), value


def looped(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w)[0] ** 2)

    return w - 0.1 * jax.grad(loss)(w), x.sum()


def attention(w: Any, x: jax.Array) -> Any:
    def loss(w: Any) -> jax.Array:
        q, k, v = (jnp.einsum("bld,dhk->bhlk", x, w[n]) for n in "qkv")
        scores = jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2), axis=-1)
        return jnp.mean(jnp.einsum("bhlk,hkd->bld", scores @ v, w["o"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w)), x.sum()


def convolution(k: jax.Array, x: jax.Array) -> Any:
    def loss(k: jax.Array) -> jax.Array:
        names = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=names)
        return jnp.mean((y - y.mean((0, 1, 2))) ** 2)

    return k - 0.1 * jax.grad(loss)(k), x.sum()


def branches(p: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
    y = jax.lax.cond(p, lambda x: x @ w, lambda x: jnp.cumsum(x, 1) @ w.T, x)
    return jnp.sort(y + y.T, axis=0)


LAYER = {"a": struct(256, 1024), "b": struct(1024, 256), "c": struct(1024)}
HEADS = {n: struct(64, 8, 16) for n in "qkv"} | {"o": struct(8, 16, 64)}
FLAG = jax.ShapeDtypeStruct((), bool)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "perceptron": (perceptron, ((LAYER, LAYER), struct(512, 256))),
    "looped": (looped, (struct(6, 256, 256), struct(512, 256))),
    "attention": (attention, (HEADS, struct(16, 128, 64))),
    "convolution": (convolution, (struct(3, 3, 16, 32), struct(16, 32, 32, 16))),
    "branches": (branches, (FLAG, struct(256, 256), struct(256, 256))),
}
PLACES = [
    ("cpu:8", "data=8"),
    ("cpu:8", "data=2,model=4"),
    ("h100:8", "data=4,model=2"),
    ("v5p:2x2x2", "data=2,fsdp=2,model=2"),
    ("h100:4x3", "data=4,model=3"),
]


def assert_consistent(plan: Plan) -> None:
    """The predicted step time is what the search minimised, more only where there is too little
    compute to hide under; the rows add up to it."""
    p = plan.prediction
    assert p.overlapped_s <= p.compute_s
    if p.overlapped_s < p.compute_s:
        assert p.step_s + p.feed_s == pytest.approx(plan.search.cost_s, rel=1e-8)
    else:
        assert p.step_s + p.feed_s >= plan.search.cost_s * (1 - 1e-8)
    assert p.compute_s + p.communication_s - p.overlapped_s == pytest.approx(p.step_s, rel=1e-8)
    rows = math.fsum(row.count * row.time_s for row in plan.collectives)
    assert rows == pytest.approx(p.communication_s, rel=1e-7, abs=1e-10)
    assert plan.search.lower_bound_s <= plan.search.cost_s * (1 + 1e-12)
    assert p.peak_bytes <= p.limit_bytes * (1 + 1e-12)


@pytest.mark.long
@pytest.mark.parametrize(("cluster", "mesh"), PLACES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_prediction_is_the_searched_cost(program: str, cluster: str, mesh: str) -> None:
    function, args = PROGRAMS[program]
    plan = make_plan(function, *args, cluster=cluster, mesh=mesh, search="recursive_programming")
    assert_consistent(plan)
    model = AnalyticCostModel(parse_cluster(cluster))
    p = plan.prediction
    least = min(min(model.overlap) * p.communication_s, p.compute_s)
    most = min(max(model.overlap) * p.communication_s, p.compute_s)
    assert least * (1 - 1e-7) <= p.overlapped_s <= most * (1 + 1e-7)


@pytest.mark.parametrize("cluster", ["cpu:8", "h100:8"])
@pytest.mark.parametrize("search", ["auto", "dynamic_programming", "ilp"])
def test_prediction_is_the_searched_cost_of_every_search(cluster: str, search: str) -> None:
    function, args = PROGRAMS["perceptron"]
    assert_consistent(
        make_plan(function, *args, cluster=cluster, mesh="data=4,model=2", search=search)
    )


def test_prediction_of_random_choices_is_their_cost() -> None:
    random = np.random.default_rng(0)
    for program in PROGRAMS:
        function, args = PROGRAMS[program]
        priced = priced_on(analysis_of(function, *args), "h100:8", "data=4,model=2")
        for _ in range(5):
            choice = tuple(int(random.integers(c.size)) for c in priced.problem.cost_s)
            cost, peak, _ = evaluate(priced.problem, choice)
            found = Extraction(priced, choice).prediction(math.inf)
            if found.overlapped_s < found.compute_s:
                assert found.step_s + found.feed_s == pytest.approx(cost, rel=1e-8), program
            else:
                assert found.step_s + found.feed_s >= cost * (1 - 1e-8), program
            assert traced_peak(Extraction(priced, choice))[0] == pytest.approx(peak, rel=1e-8)


# ---- searches ----------------------------------------------------------------------------


@pytest.mark.parametrize(("cluster", "mesh"), [("cpu:4", "data=4"), ("h100:4", "data=4")])
def test_searches_agree_on_two_matmuls(cluster: str, mesh: str) -> None:
    priced = priced_on(analysis_of(two_matmuls, *SMALL), cluster, mesh)
    verify(priced.problem)
    assert 1_000 < combinations(priced.problem) <= MOST
    yardstick = SEARCHES["brute"](priced.problem)
    assert yardstick.proved
    for name in ("dynamic_programming", "ilp", "auto"):
        found = SEARCHES[name](priced.problem, time_limit_s=10.0)
        assert found.cost_s == pytest.approx(yardstick.cost_s, rel=1e-8), name
        assert found.lower_bound_s <= yardstick.cost_s * (1 + 1e-9), name
    replicated = evaluate(priced.problem, [0] * len(priced.problem.cost_s))[0]
    assert yardstick.cost_s < 0.6 * replicated  # starting kernels is not split


@pytest.mark.long
@pytest.mark.parametrize("share", [0.6, 0.35])
def test_searches_agree_on_two_matmuls_in_little_memory(share: float) -> None:
    found = analysis_of(two_matmuls, *SMALL)
    whole = priced_on(found, "cpu:4", "data=4")
    peak = evaluate(whole.problem, [0] * len(whole.problem.cost_s))[1]
    priced = priced_on(found, "cpu:4", "data=4", share * peak)
    yardstick = SEARCHES["brute"](priced.problem)
    assert yardstick.feasible and yardstick.peak_bytes <= share * peak
    ilp = SEARCHES["ilp"](priced.problem, time_limit_s=10.0)
    assert ilp.cost_s == pytest.approx(yardstick.cost_s, rel=1e-8)
    other = SEARCHES["dynamic_programming"](priced.problem, time_limit_s=10.0)
    assert other.feasible
    assert other.lower_bound_s <= yardstick.cost_s * (1 + 1e-9) <= other.cost_s * (1 + 2e-9)


# ---- single figures ----------------------------------------------------------------------


def test_replicated_costs_the_whole_roofline_and_no_communication() -> None:
    def products(x: jax.Array) -> jax.Array:  # nothing is fed: that has a price of its own
        return jnp.tanh(x @ x.T) @ x

    priced = priced_on(analysis_of(products, struct(512, 1024)), "h100:4", "data=4")
    cost, peak, _ = evaluate(priced.problem, [0] * len(priced.problem.cost_s))
    alone = priced_on(analysis_of(products, struct(512, 1024)), "h100:1", "data=1")
    one = SEARCHES["auto"](alone.problem)
    assert cost == pytest.approx(one.cost_s, rel=1e-8)
    assert peak == one.peak_bytes


def test_a_reduction_over_a_split_dimension_costs_an_all_reduce() -> None:
    priced = priced_on(
        analysis_of(lambda x: jnp.sin(x).sum(0), struct(4096, 512)), "cpu:4", "data=4"
    )
    assert len(priced.sets) == 1
    use = priced.sets[0].use[:, 0].tolist()
    layout = priced.analysis.groups.home[priced.analysis.graph.inputs[0]][1]  # type: ignore[index]
    by_row, by_column = use.index(layout[0]), use.index(layout[1])
    gap = priced.problem.cost_s[0][by_row] - priced.problem.cost_s[0][by_column]
    alpha, beta = priced.model.collective_coefficients("all_reduce", (4,), (0,))
    assert gap == pytest.approx(alpha + beta * 512 * 4, rel=1e-6)


def test_equal_layers_share_their_cost_arrays() -> None:
    def deep(w: list[jax.Array], x: jax.Array) -> jax.Array:
        for layer in w:
            x = jnp.tanh(x @ layer)
        return x.sum()

    found = analysis_of(deep, [struct(64, 64)] * 6, struct(32, 64))
    problem = priced_on(found, "cpu:8", "data=4,model=2").problem
    assert len({id(e.cost_s) for e in problem.edges}) < len(problem.edges) / 2
    assert len({id(c) for c in problem.cost_s}) < len(problem.cost_s) / 2


def test_a_mask_leaves_only_the_allowed_strategies() -> None:
    found = analysis_of(two_matmuls, *SMALL)
    model = AnalyticCostModel(parse_cluster("cpu:4"))
    full = price(found, parse_mesh("data=4"), model, math.inf)
    mask = np.zeros(full.sets[0].count, bool)
    mask[[0, 2]] = True
    less = price(found, parse_mesh("data=4"), model, math.inf, {0: mask})
    assert less.sets[0].count == 2
    assert np.array_equal(less.problem.cost_s[0], full.problem.cost_s[0][[0, 2]])
    assert np.array_equal(less.sets[0].store, full.sets[0].store[[0, 2]])


def test_scalars_count_against_the_limit() -> None:
    def step(n: jax.Array, x: jax.Array) -> Any:
        return n + 1, x * 2

    priced = priced_on(analysis_of(step, struct(), struct(64)), "cpu:2", "data=2", 1000.0)
    assert priced.analysis.scalar_bytes == 4.0
    assert priced.problem.limit_bytes == 996.0


def test_examples_are_consistent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import mlp

    try:
        plan = make_plan(mlp.train_step, *mlp.example_args(), cluster="cpu:8")
    finally:
        sys.modules.pop("mlp", None)
    assert_consistent(plan)
    assert len(plan.meshes) > 1
