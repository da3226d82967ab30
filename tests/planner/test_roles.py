"""Axes are named after what they do, and the plan says its strategy and its idle devices first."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest

from planner import make_plan
from planner.choose.simplest import devices_worth, idle_axes, idle_text, preferred
from planner.graph.trace import trace
from planner.plan.plan import plan_from_json
from planner.plan.roles import Roles, renamed, strategy_text
from planner.planning import plan_step
from planner.report.table import plan_text
from planner.search.problem import Solution
from planner.spec import MeshSpec

OPTIMIZER = optax.adam(1e-3)


def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def train(loss, params, batch):
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["p"], batch)
        updates, opt = OPTIMIZER.update(grads, state["o"], state["p"])
        return {"p": optax.apply_updates(state["p"], updates), "o": opt}, value

    return step, ({"p": params, "o": jax.eval_shape(OPTIMIZER.init, params)}, batch)


def deep(width, rows, layers=3):
    """Products of a batch with square matrices."""

    def loss(p, batch):
        x = batch["x"]
        for w in p:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    return train(loss, [of(width, width)] * layers, {"x": of(rows, width), "y": of(rows, width)})


def experts(count=8, width=1024, rows=8192):
    def loss(p, batch):
        x = jnp.einsum("tec,td->ecd", batch["route"], batch["x"])
        y = jnp.einsum("ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", x, p[0])), p[1])
        return jnp.mean(y**2)

    params = [of(count, width, 8 * width), of(count, 8 * width, width)]
    batch = {"x": of(rows, width), "route": of(rows, count, rows // count)}
    return train(loss, params, batch)


@pytest.mark.parametrize(
    ("program", "options", "names", "said"),
    [
        (deep(256, 1 << 20), {}, ("data",), "data parallel over 8"),
        (deep(16384, 65536, 6), {"memory": "30GB"}, ("fsdp",), "FSDP over 8; batch split 8 ways"),
        (deep(16384, 2, 2), {}, None, "tensor parallel over"),
        (experts(), {"shardings": {r"\['p'\]": jax.P("e")}}, None, "expert parallel over"),
    ],
    ids=["data", "fsdp", "tensor", "expert"],
)
def test_the_strategy_is_read_off_the_plan(program, options, names, said):
    step, args = program
    plan = make_plan(step, *args, cluster="h100:8", **options)
    assert said in plan.strategy
    assert names is None or plan.mesh.names == names
    used = {a for leaf in plan.inputs for a in leaf.spec.axes}
    assert used <= set(plan.mesh.names)
    assert {a for row in plan.collectives for a in row.axes} <= set(plan.mesh.names)


def members(count=8, width=512, rows=1024, *, each=False):
    """Several models beside each other, on one batch or each on its own."""
    shapes = (count,) if each else ()
    batch = {"x": of(*shapes, rows, width), "y": of(*shapes, rows, width)}

    def step(state, batch):
        def one(p, o, x, y):
            loss = lambda p: jnp.mean((jnp.tanh(x @ p["a"] + p["b"]) @ p["c"] - y) ** 2)  # noqa: E731
            value, grads = jax.value_and_grad(loss)(p)
            updates, o = OPTIMIZER.update(grads, o, p)
            return optax.apply_updates(p, updates), o, value

        along = 0 if each else None
        run = jax.vmap(one, (0, 0, along, along))
        p, o, values = run(state["p"], state["o"], batch["x"], batch["y"])
        return {"p": p, "o": o}, jnp.mean(values)

    sizes = {"a": (width, 4 * width), "b": (4 * width,), "c": (4 * width, width)}
    params = {k: of(count, *shape) for k, shape in sizes.items()}
    state = {"p": params, "o": jax.eval_shape(jax.vmap(OPTIMIZER.init), params)}
    return step, (state, batch)


@pytest.mark.parametrize("each", [False, True])
def test_models_beside_each_other_are_an_ensemble(each):
    step, args = members(each=each)
    assert "ensemble parallel over 8" in make_plan(step, *args, cluster="h100:8").strategy
    for mode in ("dp", "fsdp"):
        plan = make_plan(step, *args, cluster="h100:8", mode=mode)
        assert plan.strategy.endswith("; batch split 8 ways"), plan.strategy
        rows = jax.P(None, "data") if each else jax.P("data")
        assert plan.as_partition_specs()["[1]['x']"] == rows


def test_channels_of_a_depthwise_convolution_are_no_experts():
    def loss(p, batch):
        for kernel in p:
            batch = jax.lax.conv_general_dilated(
                batch,
                kernel,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=512,
            )
        return jnp.mean(batch**2)

    step, args = train(loss, [of(3, 3, 1, 512)] * 3, of(2, 64, 64, 512))
    rules = {r"\['p'\]": jax.P(None, None, None, "c")}
    plan = make_plan(step, *args, cluster="h100:8", shardings=rules)
    assert "tensor parallel over 8" in plan.strategy and "expert" not in plan.strategy


@pytest.mark.parametrize("axis", ["rows", "fsdp"])
def test_axes_that_the_user_named_stay(axis):
    step, args = deep(1024, 65536)
    mesh = make_plan(step, *args, cluster="h100:8", mesh=f"{axis}=8").mesh
    assert mesh.names == (axis,)
    pinned = make_plan(step, *args, cluster="h100:8", shardings={r"\['x'\]": jax.P(axis)})
    assert axis in pinned.mesh.names
    assert pinned.as_partition_specs()["[1]['x']"][0] == axis


def test_two_axes_that_do_the_same_have_two_names():
    mesh = MeshSpec(("data", "fsdp", "model"), (2, 4, 2))
    roles = Roles(("model", "data", "data"), frozenset(), 8, 8, 8)
    assert renamed(mesh, roles, frozenset()).names == ("model", "data", "data2")
    assert renamed(mesh, roles, frozenset({"model"})).names == ("model2", "data", "model")


def test_the_line_in_the_words_of_the_field():
    def said(sizes, roles, batch, zero=(), examples=0, rest=0):
        found = Roles(roles, frozenset(zero), batch, examples or batch, rest or batch)
        return strategy_text(sizes, found)

    assert said((16, 4), ("fsdp", "model"), 64) == (
        "FSDP over 16 x tensor parallel over 4; batch split 64 ways"
    )
    assert said((8,), ("data",), 8, [0]) == "data parallel over 8 (ZeRO-1); batch split 8 ways"
    assert said((8, 4), ("idle", "model"), 1) == (
        "tensor parallel over 4 x 8 groups that repeat the same work; batch whole on every device"
    )
    assert said((1,), ("idle",), 1) == "one device"
    assert said((4, 2), ("fsdp", "model"), 1) == (
        "FSDP over 4 x tensor parallel over 2; batch stored whole on every device, "
        "activations split 4 ways"
    )
    assert said((8,), ("fsdp",), 8, rest=1) == (
        "FSDP over 8; batch split 8 ways, small arrays whole"
    )
    assert said((8,), ("fsdp",), 8, rest=2) == (
        "FSDP over 8; batch split 8 ways, small arrays 2 ways"
    )
    assert said((8, 8), ("fsdp", "fsdp"), 64, examples=8) == (
        "FSDP over 8 x FSDP over 8; batch split 64 ways, 8 by examples and 8 along other dimensions"
    )


def test_strategy_and_idle_devices_come_first_and_are_stored():
    step, args = deep(64, 6)
    plan = make_plan(step, *args, cluster="h100:8x4")
    assert "of 32 devices' worth of work; batch 6 does not divide by 32" in plan.idle
    lines = [line.split()[0] for line in plan_text(plan).splitlines() if line.strip()]
    assert [x for x in lines if x in ("plan:", "strategy", "idle", "mesh")][:3] == [
        "plan:",
        "strategy",
        "idle",
    ]
    assert plan_from_json(plan.to_json()) == plan


@pytest.mark.long
def test_plans_of_older_versions_load():
    step, args = deep(64, 64)
    text = make_plan(step, *args, cluster="cpu:8").to_json()
    raw = json.loads(text)
    del raw["strategy"], raw["idle"]
    old = plan_from_json(json.dumps(raw))
    assert (old.strategy, old.idle) == ("", "")
    assert "strategy" not in plan_text(old).split("meshes tried")[0]


def test_a_full_mesh_says_nothing_of_idle_devices():
    step, args = deep(1024, 65536)
    assert make_plan(step, *args, cluster="h100:8x4").idle == ""


def test_the_cause_is_named_only_where_it_is_one():
    step, args = deep(64, 64)
    graph = trace(step, args).graph
    assert idle_text(graph, 32, 31.9) == ""
    assert "does not divide" not in idle_text(graph, 32, 4.0)
    assert idle_text(graph, 48, 4.0).startswith(
        "uses 4 of 48 devices' worth of work; batch 64 does"
    )


def test_a_mesh_that_another_beats_in_time_and_memory_is_not_taken():
    step, args = deep(64, 6)
    one = plan_step(step, *args, cluster="h100:8", mesh="data=8").extraction
    both = plan_step(step, *args, cluster="h100:8", mesh="data=2,model=4").extraction

    def tried(sizes, cost_s, peak):
        found, names = (one if len(sizes) == 1 else both), ("data", "model")[: len(sizes)]
        priced = dataclasses.replace(found.priced, mesh=MeshSpec(names, sizes))
        split = tuple(found.choice)
        return (priced, Solution(split, cost_s, cost_s, peak, 0, True, "", "", 0.0)), cost_s

    simple, fast = tried((8,), 1.02, 2e10), tried((8,), 1.0, 1e10)
    assert preferred([simple, fast]) is fast[0]
    assert preferred([tried((8,), 1.02, 1.05e10), fast][::-1]) is fast[0]
    two = tried((2, 4), 1.0, 1e10)
    assert preferred([two, simple]) is two[0]
    little = tried((8,), 1.02, 1.05e10)  # a second axis for half a gigabyte of 60
    assert preferred([two, little]) is little[0]


def test_an_axis_along_which_nothing_is_split_is_found():
    step, args = deep(64, 6)
    priced = plan_step(step, *args, cluster="h100:8", mesh="data=8").extraction.priced
    whole = [0] * len(priced.sets)  # row 0 of every set: nothing is split
    assert idle_axes(priced, whole) == (0,)
    assert devices_worth(priced, whole) == pytest.approx(1.0)
    step, args = deep(1024, 65536)
    found = plan_step(step, *args, cluster="h100:8x4", mesh="data=32").extraction
    assert idle_axes(found.priced, found.choice) == ()
    assert devices_worth(found.priced, found.choice) == pytest.approx(32, rel=0.01)


@pytest.mark.parametrize("mode", ["fsdp", "dp"])
def test_a_step_that_returns_its_state_alone_has_a_batch(mode):
    """As a Flax NNX step does that adds its loss to a metric and returns nothing."""

    def step(state, tokens):
        def loss(p):
            x = jax.vmap(lambda x: p["w"] @ x)(p["table"][tokens])  # the weights come first
            return jnp.mean(jax.vmap(lambda x: p["out"] @ jnp.tanh(x))(x) ** 2)

        value, grads = jax.value_and_grad(loss)(state["p"])
        new = jax.tree.map(lambda w, g: w - 0.1 * g, state["p"], grads)
        return {"p": new, "total": state["total"] + value}

    params = {"table": of(4096, 512), "w": of(2048, 128), "out": of(512, 2048)}
    args = {"p": params, "total": of()}, of(64, 128, dtype=jnp.int32)
    plan = make_plan(step, *args, cluster="h100:8", mode=mode)
    assert plan.strategy.endswith("over 8; batch split 8 ways")
    assert {leaf.path: leaf.spec.axes for leaf in plan.inputs}["[1]"]
