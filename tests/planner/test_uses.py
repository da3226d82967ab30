"""Pins on arguments hold for their use, and a plan says how it honors each of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from planner import Plan, StoredAs, make_plan
from planner.graph.trace import trace
from planner.plan.plan import plan_from_json
from planner.request.state import StateRequest, find_state

D, HEADS, WIDE = 256, 8, 1024
OPTIONS: dict[str, Any] = {"cluster": "h100:8", "mesh": "data=2,model=4"}


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layer(w: Any, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("bsd,dhk->bhsk", x, w[n]) for n in "qkv")
    mixed = jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v
    x = x + jnp.einsum("bhsk,hkd->bsd", mixed, w["o"])
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


LAYER = {
    **{n: struct(D, HEADS, D // HEADS) for n in "qkv"},
    "o": struct(HEADS, D // HEADS, D),
    "up": struct(D, WIDE),
    "down": struct(WIDE, D),
}
STATE = {"p": LAYER, "mu": LAYER}
X = struct(16, 128, D)
MEGATRON = {
    r"'p'.*'[qkv]'": P(None, "model"),
    r"'p'.*'o'": P("model"),
    r"'p'.*'up'": P(None, "model"),
    r"'p'.*'down'": P("model"),
}


def updated(loss: Any, state: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(state["p"], x)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, state["p"], mu), "mu": mu}, value


def train(state: Any, x: jax.Array) -> Any:
    return updated(lambda p, x: jnp.mean(layer(p, x) ** 2), state, x)


def stacked(state: Any, x: jax.Array) -> Any:
    """The layers as a scan, cast to bfloat16 and rematerialized."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: Any) -> Any:
            return layer(jax.tree.map(lambda a: a.astype(jnp.bfloat16), w), x), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(body), x.astype(jnp.bfloat16), p)[0] ** 2)

    return updated(loss, state, x)


def how(plan: Plan) -> set[str]:
    return {row.how for row in plan.pins}


@pytest.mark.long
def test_parameters_pinned_over_model_run_as_tensor_parallelism() -> None:
    plan = make_plan(train, STATE, X, shardings=MEGATRON, **OPTIONS)
    assert how(plan) == {
        "stored and used as P(None, 'model')",
        "stored and used as P('model')",
    }
    assert [row.arrays for row in plan.pins] == [3, 1, 1, 1]
    assert all(leaf.used_as is None for leaf in plan.inputs if "'p'" in leaf.path)
    assert not [row for row in plan.collectives if row.kind == "all_gather"]
    text = str(plan)
    assert "stored and used as P(None, 'model')" in text
    assert plan_from_json(plan.to_json()) == plan


@pytest.mark.long
@pytest.mark.parametrize("mode", ["AUTO_PARALLEL", "SEMI_AUTO_PARALLEL", "HYBRID_PARALLEL"])
@pytest.mark.parametrize("mesh", [{"data": 2, "model": 4}, None])
def test_every_mode_and_mesh_uses_them_so(mode: str, mesh: Any) -> None:
    plan = make_plan(train, STATE, X, cluster="h100:8", mesh=mesh, mode=mode, shardings=MEGATRON)
    assert all(row.how.startswith("stored and used as") for row in plan.pins)


def test_through_casts_scans_and_remat() -> None:
    wide = {n: struct(3, *w.shape) for n, w in LAYER.items()}
    rules = {n: P(None, *spec) for n, spec in MEGATRON.items()}
    plan = make_plan(stacked, {"p": wide, "mu": wide}, X, shardings=rules, **OPTIONS)
    assert how(plan) == {
        "stored and used as P(None, None, 'model')",
        "stored and used as P(None, 'model')",
    }
    assert not [row for row in plan.collectives if row.kind == "all_gather"]


@pytest.mark.long
def test_stored_as_is_for_storage_only() -> None:
    free = make_plan(train, STATE, X, **OPTIONS)
    rules = {n: StoredAs(spec) for n, spec in MEGATRON.items()}
    plan = make_plan(train, STATE, X, shardings=rules, **OPTIONS)
    assert "stored as P(None, 'model'), gathered for use: the pin is for storage only" in how(plan)
    bare = make_plan(train, STATE, X, shardings=MEGATRON, **OPTIONS)
    assert free.prediction.step_s <= plan.prediction.step_s < bare.prediction.step_s
    for path in ("q", "up"):
        (leaf,) = [x for x in plan.inputs if x.path == f"[0]['p']['{path}']"]
        assert leaf.spec.entries == (None, "model")


def test_axes_named_data_and_fsdp_are_for_storage() -> None:
    rules = {
        r"'[qkv]'": P("fsdp", "model"),
        r"'o'": P("model", None, "fsdp"),
        r"'up'": P("fsdp", "model"),
        r"'down'": P("model", "fsdp"),
        r"^\[1\]": P("fsdp"),
    }
    plan = make_plan(train, STATE, X, cluster="h100:8", mesh="fsdp=2,model=4", shardings=rules)
    why = "an axis named fsdp is for storage"
    assert how(plan) == {
        "stored so; optimizer state",
        f"stored as P('fsdp', 'model'), used as P(None, 'model'): {why}",
        f"stored as P('model', 'fsdp'), used as P('model'): {why}",
        f"stored as P('model', None, 'fsdp'), used as P('model'): {why}",
        "stored and used as P('fsdp')",
    }


def test_an_axis_that_splits_the_batch_is_for_storage() -> None:
    plan = make_plan(
        train, STATE, X, shardings={**MEGATRON, r"^\[1\]": P(("data", "model"))}, **OPTIONS
    )
    assert any("model splits the batch (shardings['^\\\\[1\\\\]']" in text for text in how(plan))


def test_what_an_operation_needs_whole_is_said_with_its_line() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ jnp.sort(w, axis=1)) ** 2))(w)
        return w - 0.1 * grad, value

    plan = make_plan(
        step, struct(256, 512), struct(64, 256), shardings={r"^\[0\]": P(None, "model")}, **OPTIONS
    )
    (row,) = plan.pins
    assert "gathered for use" in row.how and "needs dimension 1 whole" in row.how
    assert "test_uses.py:" in row.how


def test_a_mark_inside_that_says_otherwise_ends_the_use() -> None:
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            whole = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
            return jnp.mean((x @ whole) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    rules = {r"^\[0\]": P(None, "model"), r"^\[1\]": P("data")}
    plan = make_plan(step, struct(1024, 1024), struct(8192, 1024), shardings=rules, **OPTIONS)
    assert plan.inputs[0].spec.entries == (None, "model")
    assert "held where it stands" in how(plan)


def test_flax_metadata_and_placed_arguments_hold_for_use() -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            init = nn.initializers.lecun_normal()
            up = nn.with_partitioning(init, (None, "model"))
            down = nn.with_partitioning(init, ("model", None))
            return x + nn.Dense(D, kernel_init=down)(nn.gelu(nn.Dense(WIDE, kernel_init=up)(x)))

    params = jax.eval_shape(Block().init, jax.random.key(0), X)

    def step(p: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.mean(Block().apply(p, x) ** 2))(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    plan = make_plan(step, params, X, **OPTIONS)
    used = {"stored and used as P(None, 'model')", "stored and used as P('model')"}
    assert how(plan) == used
    assert {row.pin for row in plan.pins} == {"Flax metadata"}
    stored = make_plan(
        step, params, X, shardings={"Dense_1.*kernel": StoredAs(P(None, "model"))}, **OPTIONS
    )
    assert any("storage only" in row.how or row.how in used for row in stored.pins)

    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    placed = {
        name: jax.ShapeDtypeStruct(
            w.shape, w.dtype, sharding=NamedSharding(mesh, MEGATRON[rf"'p'.*'{name}'"])
        )
        for name, w in LAYER.items()
        if name in ("up", "down")
    }

    def mlp(state: Any, x: jax.Array) -> Any:
        return updated(lambda p, x: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2), state, x)

    plan = make_plan(mlp, {"p": placed, "mu": placed}, X, cluster="h100:8")
    assert used <= how(plan)
    assert {row.pin for row in plan.pins} == {"sharding of the argument"}


def test_the_state_of_a_scanned_model_has_parameters() -> None:
    wide = {n: struct(3, *w.shape) for n, w in LAYER.items()}
    graph = trace(stacked, ({"p": wide, "mu": wide}, X)).graph
    state = find_state(graph, StateRequest())
    paths = dict(zip(graph.inputs, graph.input_paths, strict=True))
    assert all("'p'" in paths[v] for v in state.parameters)
    assert all("'mu'" in paths[v] for v in state.others)
    assert len(state.parameters) == len(state.others) == len(LAYER)
