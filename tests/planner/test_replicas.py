"""Gradients of microbatches that are reduced once per step, in replicas: chosen, told, refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from costmodels import Cluster, parse_cluster
from planner import RequestError, make_plan
from planner.compare import compare
from planner.microbatch.errors import NotExactError
from planner.plan.plan import Plan, plan_from_json
from planner.report.table import plan_text

WIDTH, LAYERS = 1024, 2

unbatched = Primitive("mystery_of_replicas")
unbatched.def_abstract_eval(lambda x: x)
mlir.register_lowering(unbatched, mlir.lower_fun(lambda x: x, multiple_results=False))
ad.deflinear2(unbatched, lambda cotangent, _: [unbatched.bind(cotangent)])


def step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        x = batch["x"]
        for layer in params:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, params, grads), value


def arguments(rows: int = 262144) -> tuple[Any, Any]:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"up": array(WIDTH, 4 * WIDTH), "down": array(4 * WIDTH, WIDTH)}
    return [layer] * LAYERS, {"x": array(rows, WIDTH), "y": array(rows, WIDTH)}


def slow(bytes_per_s: float = 5e9) -> Cluster:
    """Four nodes of eight, with a slow network between them."""
    cluster = parse_cluster("h100:8x4")
    assert cluster.network is not None
    network = dataclasses.replace(cluster.network, bytes_per_s=bytes_per_s)
    return dataclasses.replace(cluster, network=network)


def summed_in_each_microbatch(plan: Any) -> set[str]:
    """The mesh axes over which every microbatch sums large arrays."""
    kinds = ("all_reduce", "reduce_scatter")
    rows = [r for r in plan.collectives if r.kind in kinds and r.count >= plan.microbatches > 1]
    return {axis for r in rows if r.payload_bytes > 1e5 for axis in r.axes}


@pytest.mark.long
def test_chosen_where_the_network_is_slow() -> None:
    each = make_plan(step, *arguments(), cluster=slow(), microbatches=8, replicas=1)
    once = make_plan(step, *arguments(), cluster=slow(), microbatches=8)
    assert each.replicas == 1 and once.replicas > 1
    assert once.prediction.step_s < 0.7 * each.prediction.step_s
    assert "data" in once.mesh.names and "data" not in summed_in_each_microbatch(once)
    assert summed_in_each_microbatch(each) == set(each.mesh.names)
    assert any("instead of" in note for note in once.notes)
    assert "reduced once per step" in plan_text(once)
    assert plan_from_json(once.to_json()) == once
    assert '"replicas"' not in each.to_json()


def test_not_looked_at_without_microbatches() -> None:
    plan = make_plan(step, *arguments(), cluster=slow())
    assert plan.replicas == 1 and not any("replicas" in note for note in plan.notes)


def test_given_replicas_are_taken() -> None:
    plan = make_plan(step, *arguments(), cluster="h100:8", microbatches=4, replicas=2)
    assert plan.recipe.replicas == 2 and not any("instead of" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"replicas": 3}, "microbatches=1 times replicas=3 does not divide"),
        ({"replicas": 0, "microbatches": 2}, "expected a whole number from 1 on, or auto"),
        ({"replicas": "all", "microbatches": 2}, "expected a whole number from 1 on, or auto"),
        ({"replicas": 3, "microbatches": 4}, "microbatches=4 times replicas=3 does not divide"),
    ],
)
def test_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        make_plan(step, *arguments(), cluster="h100:8", **asked)


def test_an_operation_that_has_no_batches() -> None:
    """It is in the way of replicas, not of microbatches."""

    def mapped(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grads = jax.value_and_grad(lambda w: jnp.mean(unbatched.bind(x @ w) ** 2))(w)
        return w - grads, value

    args = arguments()[0][0]["up"], jax.ShapeDtypeStruct((65536, WIDTH), jnp.float32)
    options: dict[str, Any] = {"cluster": "h100:8", "microbatches": 4}
    assert make_plan(mapped, *args, **options).replicas == 1
    said = "replicas=2: the step can't be computed for several groups .*'mystery_of_replicas'"
    with pytest.raises(NotExactError, match=said):
        make_plan(mapped, *args, replicas=2, **options)


@pytest.mark.long
def test_notes_are_those_of_the_plan_that_was_chosen() -> None:
    """What it was compared with stays; what another plan says of itself does not."""
    options: dict[str, Any] = {"cluster": slow(), "microbatches": "auto", "memory": "1GB"}
    plan = make_plan(step, *arguments(1 << 21), **options)
    assert plan.microbatches == 16 and plan.replicas > 1
    alone = make_plan(
        step,
        *arguments(1 << 21),
        cluster=slow(),
        memory="1GB",
        microbatches=16,
        replicas=plan.replicas,
        remat="none",
        chunks=1,
    )
    own, (compared, last) = plan.notes[:-2], plan.notes[-2:]
    assert own == alone.notes
    assert "recipes planned" in compared and " ms instead of" in last


def over_time(params: Any, x: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        def turn(h: jax.Array, row: jax.Array) -> Any:
            h = jnp.tanh(row @ params["in"] + h @ params["again"])
            return h, h

        start = jnp.zeros((x.shape[0], WIDTH))
        return jnp.mean(jax.lax.scan(turn, start, x.swapaxes(0, 1))[1] ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


@pytest.mark.long
def test_gradients_of_a_loop_over_time_are_reduced_once() -> None:
    """Over a slow network, a reduction in every turn of the step's loop costs more."""
    weights = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    args = {"in": weights, "again": weights}, jax.ShapeDtypeStruct((4096, 64, WIDTH), jnp.float32)
    options: dict[str, Any] = {"cluster": slow(), "mode": "DATA_PARALLEL"}
    each = make_plan(over_time, *args, replicas=1, **options)
    once = make_plan(over_time, *args, **options)
    assert each.replicas == each.microbatches == once.microbatches == 1 < once.replicas
    assert once.prediction.step_s < 0.9 * each.prediction.step_s

    def reduced(plan: Plan) -> float:
        rows = [c for c in plan.collectives if c.kind in ("all_reduce", "reduce_scatter")]
        return sum(c.count * c.payload_bytes for c in rows)

    assert reduced(once) < reduced(each) / 16
    assert any("reduced once per step" in note and "instead of" in note for note in once.notes)
    assert "gradients    of 32 groups of devices" in plan_text(once)


@pytest.mark.long
def test_rivals_with_stages_reduce_once_too() -> None:
    """`compare` flatters no plan: manual layouts with data parallelism inside of stages get it."""
    rows = compare(step, *arguments(), cluster="h100:8x2").candidates
    plans = [r.plan for r in rows if r.plan is not None and r.plan.stages > 1]
    assert plans and all(p.replicas == p.mesh.size("data") for p in plans)


@pytest.mark.parametrize("scanned", [False, True])
def test_state_in_shards_along_the_replicas(scanned: bool) -> None:
    """ZeRO-1: what every group added up is reduced to shards behind the loop; nothing moves in it
    (Rajbhandari et al. 2020)."""
    count, width = 8, 1024

    def loss(layers: Any, x: Any) -> Any:
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
        else:
            for w in layers:
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def train(state: Any, x: Any) -> Any:
        wide, used = state
        grads = jax.grad(loss)(used, x)
        wide = jax.tree.map(lambda p, g: p - 0.1 * g, wide, grads)
        return wide, jax.tree.map(lambda p: p * 1, wide)

    one = jax.ShapeDtypeStruct((width, width), jnp.float32)
    layers = jax.ShapeDtypeStruct((count, width, width), jnp.float32) if scanned else [one] * count
    shards = jax.sharding.PartitionSpec(*[None] * scanned, "data")
    whole = jax.sharding.PartitionSpec()
    plan = make_plan(
        train,
        (layers, layers),
        jax.ShapeDtypeStruct((2**17, width), jnp.float32),
        cluster="h100:8x4",
        mesh="data=32",
        microbatches=8,
        replicas=32,
        remat="none",
        chunks=1,
        shardings={
            r"^\[0\]\[0\]": shards,
            r"^\[0\]\[1\]": whole,
            r"^\[1\]": jax.sharding.PartitionSpec("data"),
        },
    )
    assert {c.count for c in plan.collectives} == {1.0}
    bytes_of = 4.0 * count * width * width
    sent = sum(c.count * c.payload_bytes for c in plan.collectives if c.kind != "all_gather")
    assert sent == pytest.approx(bytes_of, rel=0.01)
