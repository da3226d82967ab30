"""What is sent: partial sums that are added before they are reduced, operands as products need.

Byte counts were compared with modules of XLA:GPU and XLA:TPU (docs/explanation/measurements.md,
``benchmarks/compiled_truth.py``).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from costmodels import AnalyticCostModel, parse_cluster
from planner import make_plan
from planner.cost.pricing import price
from planner.graph.trace import trace
from planner.plan.extract import Extraction
from planner.plan.plan import Plan
from planner.search import evaluate
from planner.space.groups import build_groups
from planner.spec import parse_mesh
from planner.step.analysis import analyse

ROWS, WIDTH = 64, 512
WEIGHT = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
INPUT = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
Weights = dict[str, Any]


def attention(w: Weights, x: jax.Array) -> Weights:
    """Three products of one value, as queries, keys and values are; the value needs a gradient."""

    def loss(w: Weights) -> jax.Array:
        h = jnp.tanh(x @ w["first"])
        q, k, v = (h @ w[name] for name in "qkv")
        return jnp.sum(jnp.tanh(q)) + jnp.sum(jnp.sin(k)) + jnp.sum(jnp.cos(v))

    return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))


WEIGHTS = dict.fromkeys(("first", *"qkv"), WEIGHT)
COLUMNS = {rf"\['{name}'\]": PartitionSpec(None, "model") for name in "qkv"}


def tensor_parallel(cluster: str, more: Weights) -> Plan:
    return make_plan(
        attention,
        WEIGHTS,
        INPUT,
        cluster=cluster,
        mesh="model=8",
        shardings=COLUMNS | {r"\['first'\]": PartitionSpec(), r"^\[1\]": PartitionSpec()} | more,
    )


def reductions(plan: Plan) -> list[tuple[str, float, float]]:
    kinds = ("all_reduce", "reduce_scatter")
    return [(c.kind, c.count, c.payload_bytes) for c in plan.collectives if c.kind in kinds]


@pytest.mark.parametrize(("cluster", "times"), [("h100:8", 1), ("v5e:2x4", 1), ("cpu:8", 3)])
def test_gradients_of_q_k_and_v_are_added_before_they_are_reduced(cluster: str, times: int) -> None:
    kind = ("all_reduce", 1.0, ROWS * WIDTH * 4.0)
    found = reductions(tensor_parallel(cluster, {}))
    assert len(found) == times  # XLA:CPU joins none
    assert cluster == "cpu:8" or found == [kind]


def test_an_addend_that_is_not_reduced_leaves_the_others_their_sum() -> None:
    plan = tensor_parallel("h100:8", {r"\['v'\]": PartitionSpec()})
    assert reductions(plan) == [("all_reduce", 1.0, ROWS * WIDTH * 4.0)]


def tied(table: Any, tokens: Any) -> Any:
    """A table that is looked up at the beginning and multiplied by at the end."""

    def loss(table: Any) -> jax.Array:
        return jnp.mean(jnp.sin(jnp.tanh(table[tokens]) @ table.T))

    return table - jax.grad(loss)(table)


@pytest.mark.parametrize(("cluster", "times"), [("h100:8", 1), ("v5e:8", 2), ("cpu:8", 2)])
@pytest.mark.parametrize("zero", [0, 3])
def test_gradients_of_a_tied_table_are_added_before_they_are_reduced(
    cluster: str, times: int, zero: int
) -> None:
    table = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
    tokens = jax.ShapeDtypeStruct((WIDTH,), jnp.int32)
    plan = make_plan(tied, table, tokens, cluster=cluster, mode="DATA_PARALLEL", zero=zero)
    assert len(reductions(plan)) == times  # XLA:TPU reduces gradients of lookups by themselves


def test_the_searched_cost_is_the_predicted_one_where_the_addends_are_reduced_alike() -> None:
    plan = tensor_parallel("h100:8", {})
    p = plan.prediction
    assert p.overlapped_s < p.compute_s
    assert p.step_s + p.feed_s == pytest.approx(plan.search.cost_s, rel=1e-8)


def test_a_search_never_pays_more_than_a_plan_for_a_sum() -> None:
    cluster = parse_cluster("h100:8")
    traced = trace(attention, (WEIGHTS, INPUT))
    rules = traced.rules
    donated = (False,) * len(traced.graph.inputs)
    groups = build_groups(traced.graph, rules)
    found = analyse(traced.graph, rules, groups, donated, cluster.device)
    sums = [x for x in found.groups.links if x.sum >= 0]
    assert [x.share for x in sums] == [1 / 3] * 3
    mesh = parse_mesh("data=2,model=4")
    priced = price(found, mesh, AnalyticCostModel(cluster), math.inf)
    random = np.random.default_rng(0)
    less = 0
    for _ in range(60):
        choice = tuple(int(random.integers(c.size)) for c in priced.problem.cost_s)
        cost, *_ = evaluate(priced.problem, choice)
        extraction = Extraction(priced, choice)
        p = extraction.prediction(math.inf)
        assert cost <= (p.step_s + p.feed_s) * (1 + 1e-8)
        less += cost < (p.step_s + p.feed_s) * (1 - 1e-8)
    assert less  # addends that are reduced differently: the plan says the true figure


# ---- operands ------------------------------------------------------------------------------


def gathered(cluster: str, step: Any, dtype: Any = jnp.float32) -> float:
    """Payload of all-gathers of one weight that is stored in shards and multiplied whole."""
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)
    x = jax.ShapeDtypeStruct((4096, WIDTH), dtype)
    pins = {r"^\[0\]": PartitionSpec("data"), r"^\[1\]": PartitionSpec("data")}
    plan = make_plan(step, w, x, cluster=cluster, mesh="data=8", shardings=pins)
    return sum(c.count * c.payload_bytes for c in plan.collectives if c.kind == "all_gather")


def product(precision: Any = None) -> Any:
    return lambda w, x: jnp.tanh(jnp.dot(x, w, precision=precision))


WHOLE = WIDTH * WIDTH * 4.0


@pytest.mark.parametrize(
    ("cluster", "step", "dtype", "expected"),
    [
        ("v5e:2x4", product(), jnp.float32, WHOLE / 2),
        ("v5e:2x4", product(), jnp.bfloat16, WHOLE / 2),
        ("v5e:2x4", product(jax.lax.Precision.HIGHEST), jnp.float32, WHOLE),
        ("v5e:2x4", lambda w, x: jnp.sin(w) + 0 * jnp.sum(x), jnp.float32, 0.0),
        ("h100:8", product(), jnp.float32, WHOLE),
    ],
)
def test_a_tpu_gathers_float32_weights_as_the_bfloat16_that_it_multiplies(
    cluster: str, step: Any, dtype: Any, expected: float
) -> None:
    assert gathered(cluster, step, dtype) == expected


@pytest.mark.parametrize(
    ("cluster", "precision", "least", "most"),
    [
        ("v5e:1x1", jax.lax.Precision.HIGH, 2.9, 3.1),
        ("v5e:1x1", jax.lax.Precision.HIGHEST, 5.8, 6.1),
        ("h100:1", jax.lax.Precision.HIGH, 0.999, 1.001),
        ("h100:1", jax.lax.Precision.HIGHEST, 3.0, 9.0),
        ("cpu:1", jax.lax.Precision.HIGHEST, 0.999, 1.001),
    ],
)
def test_precision_costs_its_passes(
    cluster: str, precision: Any, least: float, most: float
) -> None:
    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)

    def seconds(asked: Any) -> float:
        plan = make_plan(product(asked), shape, shape, cluster=cluster, mode="STAND_ALONE")
        return plan.prediction.compute_s

    assert least <= seconds(precision) / seconds(None) <= most


def test_passes_are_those_that_the_product_asks_for() -> None:
    def both(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.default_matmul_precision("float32"):
            first = x @ w
        return first, x @ w

    found = [op.passes for op in trace(both, (WEIGHT, INPUT)).graph.ops if "dot" in op.kind]
    assert found == [6, 1]
