"""Every lowering gives the same numbers and emits the collectives it promises."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from costmodels import parse_cluster
from executor.run.compile import CompiledStep
from executor.run.local.products import LOCAL, TABLE
from executor.run.lowered import stages, table_gradients
from executor.run.mesh import physical_axes
from planner import make_plan
from planner.graph.trace import trace
from planner.plan.compiled.lowering import (
    PLAIN,
    PLAIN_TURNED,
    STEP_BY_STEP,
    Lowering,
    by_axis,
    by_dimension,
    default_lowering,
)
from planner.plan.plan import Plan
from planner.recipes import rewritten
from planner.spec import MeshSpec

pytestmark = pytest.mark.usefixtures("optimized")

WIDTH, WIDE, LAYERS, ROWS = 256, 512, 3, 16384
BY_DIMENSION = by_dimension(parse_cluster("v5p:2x2x2"))
JOINED = by_axis(parse_cluster("v5e:2x4"))
HOWS = [PLAIN, JOINED, BY_DIMENSION, STEP_BY_STEP, Lowering(scattered=True), Lowering(staged=True)]


def loss(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        heads = jnp.einsum("bd,dhe->bhe", x, p["in"])
        return x + jnp.einsum("bhe,hed->bd", jnp.tanh(heads), p["out"]), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def step(params: Any, state: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, state = optax.adam(1e-2).update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def arguments() -> Any:
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape) / math.sqrt(WIDTH), jnp.float32)

    params = {
        "layers": {"in": normal(LAYERS, WIDTH, 8, 32), "out": normal(LAYERS, 8, 32, WIDTH)},
        "head": normal(WIDTH, WIDE),
    }
    return params, optax.adam(1e-2).init(params), normal(ROWS, WIDTH)


def planned(mesh: str, mode: Any) -> Plan:
    return make_plan(step, *arguments(), cluster="v5p:2x2x2", mesh=mesh, **mode)


def text_of(plan: Plan) -> str:
    args = arguments()
    compiled = CompiledStep(trace(step, args), plan, devices=jax.devices())
    text: str = compiled.jitted.lower(*args).as_text()
    return text


FSDP = {"mode": "DATA_PARALLEL", "zero": 3}


@pytest.mark.devices
@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize(
    "mesh, mode", [("data=8", FSDP), ("data=4,model=2", {}), ("model=8", {})], ids=str
)
def test_numbers_do_not_depend_on_the_lowering(how: Lowering, mesh: str, mode: Any) -> None:
    plan = dataclasses.replace(planned(mesh, mode), lowering=how)
    args = arguments()
    want = jax.jit(step)(*args)
    got = CompiledStep(trace(step, args), plan, devices=jax.devices())(*args)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def conv_step(kernel: jax.Array, x: jax.Array) -> Any:
    def loss(kernel: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers)
        return jnp.mean(jnp.tanh(y) ** 2)

    value, gradient = jax.value_and_grad(loss)(kernel)
    return kernel - 0.1 * gradient, value


@pytest.mark.devices
def test_gradients_of_convolutions_are_scattered() -> None:
    draw = np.random.default_rng(0)
    kernel = jnp.asarray(draw.normal(size=(3, 3, 128, 512)), jnp.float32)
    x = jnp.asarray(draw.normal(size=(32, 16, 16, 128)), jnp.float32)
    plan = make_plan(conv_step, kernel, x, cluster="v5e:2x4", mesh="data=8", **FSDP)
    how = Lowering(scattered=True)
    compiled = CompiledStep(
        trace(conv_step, (kernel, x)),
        dataclasses.replace(plan, lowering=how),
        devices=jax.devices(),
    )
    text = compiled.jitted.lower(kernel, x).as_text()
    assert text.count("stablehlo.reduce_scatter") == 1
    want, got = jax.jit(conv_step)(kernel, x), compiled(kernel, x)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def looked_up(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        x = params["table"][batch["tokens"]]
        return jnp.mean(jnp.tanh(x @ params["head"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


@pytest.mark.devices
@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2", "data=2,fsdp=2,model=2"])
def test_gradients_of_tables_are_scattered(mesh: str) -> None:
    """Rows that are looked up add up on each device, then become shards: XLA:GPU would reduce the
    whole table where shards lie along two mesh axes."""
    draw = np.random.default_rng(0)
    state = {
        "table": jnp.asarray(draw.normal(size=(3001, 256)), jnp.float32),
        "head": jnp.asarray(draw.normal(size=(256, 64)) / 16, jnp.float32),
    }
    batch = {"tokens": jnp.asarray(draw.integers(0, 3001, (64, 32)))}
    plan = make_plan(looked_up, state, batch, cluster="h100:8", mesh=mesh, **FSDP)
    traced = trace(looked_up, (state, batch))
    counts = {}
    for how in (STEP_BY_STEP, PLAIN):
        run = CompiledStep(traced, dataclasses.replace(plan, lowering=how), devices=jax.devices())
        counts[how] = run.jitted.lower(state, batch).as_text().count("stablehlo.reduce_scatter")
        for a, b in zip(
            jax.tree.leaves(run(state, batch)),
            jax.tree.leaves(jax.jit(looked_up)(state, batch)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    kept = plan.as_partition_specs()["[0]['table']"]
    assert counts[PLAIN] == 0
    assert counts[STEP_BY_STEP] >= sum(len(e) if isinstance(e, tuple) else 1 for e in kept if e)


@pytest.mark.parametrize("batching", [(), (0,)])
def test_scatters_of_each_example_are_left_to_constraints(batching: tuple[int, ...]) -> None:
    """Lookups of examples each in its own table have no table that is added up."""
    width = () if batching else (1,)
    numbers = jax.lax.ScatterDimensionNumbers(width, (1,) if batching else (0,), (0,), batching)
    spec, _ = LOCAL[TABLE]({"dimension_numbers": numbers}, (("data",), ()), (("data",), ())[:2])
    assert (spec is None) == bool(batching)


def test_emitted_collectives() -> None:
    plan = planned("data=8", FSDP)
    assert plan.lowering == BY_DIMENSION
    texts = {how: text_of(dataclasses.replace(plan, lowering=how)) for how in HOWS}
    assert "reduce_scatter" not in texts[PLAIN]
    # three gradients of kernels, each along three dimensions
    assert texts[BY_DIMENSION].count("stablehlo.reduce_scatter") == 9
    assert texts[Lowering(scattered=True)].count("stablehlo.reduce_scatter") == 3
    assert "data_2" in texts[BY_DIMENSION] and "data_2" not in texts[PLAIN]


def test_physical_axes() -> None:
    def sizes(mesh: dict[str, int], shape: tuple[int, ...]) -> list[list[int]]:
        found = physical_axes(MeshSpec(tuple(mesh), tuple(mesh.values())), shape)
        return [[size for _, size in found[name]] for name in mesh]

    assert sizes({"a": 64}, (1, 4, 4, 4)) == [[4, 4, 4]]
    assert sizes({"a": 2, "b": 32}, (4, 4, 4)) == [[2], [2, 4, 4]]
    assert sizes({"a": 1, "b": 16}, (4, 4)) == [[1], [4, 4]]
    assert sizes({"a": 8, "b": 3}, (4, 6)) == [[4, 2], [3]]
    assert sizes({"a": 3, "b": 8}, (4, 6)) == [[3], [8]]  # 8 ends inside the dimension of 4
    assert sizes({"a": 4}, (4, 4)) == [[4]]  # fewer devices than there are
    names = physical_axes(MeshSpec(("a", "a_0"), (16, 2)), (4, 4, 2))
    assert names["a"] == (("a", 16),)  # a_0 is taken


@pytest.mark.parametrize(
    "cluster, how",
    [
        ("h100:8x2", STEP_BY_STEP),
        ("cpu:8", PLAIN_TURNED),
        ("v5p:4x4x4", by_dimension(parse_cluster("v5p:4x4x4"))),
        ("v5p:1x2x4", by_axis(parse_cluster("v5p:1x2x4"))),
        ("v5e:4x4", by_axis(parse_cluster("v5e:4x4"))),
        ("v5e:1x4", PLAIN),
    ],
)
def test_defaults(cluster: str, how: Lowering) -> None:
    assert default_lowering(parse_cluster(cluster)) == how


@pytest.mark.devices
@pytest.mark.parametrize(
    "before, after, way",
    [
        (("xyz", ""), ("", ""), [("xy", ""), ("x", ""), ("", "")]),
        (("xyz", ""), ("", "xyz"), None),
        (("xy", "z"), ("x", "zy"), [("x", "zy")]),
        (("xy", ""), ("", "yx"), [("x", "y"), ("", "yx")]),
        (("", ""), ("xy", "z"), [("x", ""), ("xy", ""), ("xy", "z")]),
        (("x", "y"), ("", "yz"), [("x", "yz"), ("", "yz")]),
        (("xy", ""), ("", "y"), [("x", "y"), ("", "y")]),
        (("x", "y"), ("y", "x"), [("y", "x")]),  # a permutation of shards
        (("x", ""), ("y", "x"), [("y", "x")]),  # a slice and a permutation
    ],
)
def test_stages(before: Any, after: Any, way: Any) -> None:
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), tuple("xyz"))

    def sharding(spec: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*[tuple(e) or None for e in spec]))

    found = stages(sharding(before), sharding(after), (8, 8))
    assert found[-1] == sharding(after)
    if way is not None:
        assert [s.is_equivalent_to(sharding(w), 2) for s, w in zip(found, way, strict=True)]
        assert all(s.is_equivalent_to(sharding(w), 2) for s, w in zip(found, way, strict=True))


@pytest.mark.devices
def test_axes_that_move_together() -> None:
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), tuple("xyz"))

    def sharding(*spec: str) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*[tuple(e) or None for e in spec]))

    def way(before: Any, after: Any) -> list[Any]:
        return [
            s.spec
            for s in stages(sharding(*before), sharding(*after), (8, 8), [("x", "y"), ("z",)])
        ]

    assert way(("xy", "z"), ("", "z")) == [sharding("", "z").spec]
    assert way(("xy", "z"), ("", "")) == [sharding("", "z").spec, sharding("", "").spec]
    assert way(("xyz", ""), ("xy", "z")) == [sharding("xy", "z").spec]
    assert len(way(("x", "y"), ("", ""))) == 2  # they are apart, so one at a time


@pytest.mark.devices
def test_a_table_of_several_replicas_keeps_the_layout_of_the_compiler() -> None:
    """A layout constraint on what is split makes XLA:TPU gather it, in every microbatch."""

    def step(table: jax.Array, batch: Any) -> Any:
        def loss(table: jax.Array) -> jax.Array:
            return jnp.mean((table[batch["at"]].sum(1) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(table)
        return table - grads, value

    batch = {
        "at": jax.ShapeDtypeStruct((4096, 4), jnp.int32),
        "y": jax.ShapeDtypeStruct((4096, 256), jnp.float32),
    }
    args = (jax.ShapeDtypeStruct((8192, 256), jnp.float32), batch)
    held = {}
    for replicas in (1, 8):
        plan = make_plan(
            step,
            *args,
            cluster="v5e:2x4",
            mode="DATA_PARALLEL",
            microbatches=4,
            replicas=replicas,
        )
        traced = trace(rewritten(step, args, plan.recipe), args)
        held[replicas] = [traced.graph.ops[op].kind for op in table_gradients(traced, plan)]
    assert held == {1: ["scatter-add"], 8: []}


def test_a_transpose_inside_a_rematerialized_body_stays_there() -> None:
    def turned(p: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        w = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())))
        return p - 0.1 * jax.checkpoint(lambda w: w.T)(w), jnp.sum(y)

    draw = np.random.default_rng(0)
    args = [jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((256, 128), (8192, 128))]
    args.append(jnp.asarray(draw.normal(size=(8192, 256)), jnp.float32))
    plan = make_plan(turned, *args, cluster="v5p:2x2x2", mesh="data=8", **FSDP)
    for how in HOWS:
        lowered = dataclasses.replace(plan, lowering=how)
        got = CompiledStep(trace(turned, args), lowered, devices=jax.devices())(*args)
        for a, b in zip(jax.tree.leaves(jax.jit(turned)(*args)), got, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2)
