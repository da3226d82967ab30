"""Constraints reach into scan, while, cond and remat bodies, and those stay what they were."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import check, compile_plan
from planner import make_plan, shard
from planner.graph.trace import trace
from tests.executor.executor_steps import assert_same

pytestmark = pytest.mark.devices
P = jax.sharding.PartitionSpec
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 32)).astype(np.float32)
UP = (RNG.normal(size=(6, 32, 64)) / 6).astype(np.float32)
DOWN = (RNG.normal(size=(6, 64, 32)) / 8).astype(np.float32)
PINS = {r"^\[0\]": P(None, None, "model"), r"^\[1\]": P(None, "model"), r"^\[2\]": P("data")}


def layer(x, up, down):
    return x + jnp.tanh(x @ up) @ down


def scanned(up, down, x):
    return jax.lax.scan(lambda c, w: (layer(c, *w), jnp.sum(c)), x, (up, down))


def train_scanned(up, down, x):
    def loss(up, down):
        return jnp.mean(scanned(up, down, x)[0] ** 2)

    value, (a, b) = jax.value_and_grad(loss, argnums=(0, 1))(up, down)
    return up - a, down - b, value


def train_remat(up, down, x):
    def body(c, w):
        return jax.checkpoint(layer)(c, *w), None

    def loss(up, down):
        return jnp.mean(jax.lax.scan(body, x, (up, down))[0] ** 2)

    value, (a, b) = jax.value_and_grad(loss, argnums=(0, 1))(up, down)
    return up - a, down - b, value


def looped(up, down, x):
    def more(state):
        k, y = state
        return (k < 4) & (jnp.max(jnp.abs(y)) < 1e3)

    def again(state):
        k, y = state
        return k + 1, layer(y, up[k], down[k])

    return jax.lax.while_loop(more, again, (0, x))


def fori(up, down, x):
    return jax.lax.fori_loop(0, 3, lambda k, y: layer(y, up[k], down[k]), x)


def branched(up, down, x):
    def yes(x, up, down):
        return layer(x, up, down)

    def no(x, up, down):
        return x - jnp.cos(x @ up) @ down

    y = jax.lax.cond(jnp.sum(x) > 0, yes, no, x, up[0], down[0])
    return jax.lax.switch(2, [yes, no, lambda x, up, down: x * 2 + up[0, 0]], y, up[1], down[1])


def train_branched(up, down, x):
    def loss(up, down):
        y = jax.lax.cond(x[0, 0] > 9, lambda *a: layer(*a), lambda x, *w: x * 2, x, up[0], down[0])
        return jnp.mean(layer(y, up[1], down[1]) ** 2)

    value, (a, b) = jax.value_and_grad(loss, argnums=(0, 1))(up, down)
    return up - a, down - b, value


def nested(up, down, x):
    def outer(c, w):
        def inner(c, _):
            return jax.lax.cond(jnp.sum(c) > 0, lambda c: layer(c, *w), lambda c: c * 0.5, c), None

        c, _ = jax.lax.scan(inner, c, None, length=2)
        return jax.jit(jax.checkpoint(layer))(c, *w), jnp.mean(c, axis=0)

    return jax.lax.scan(outer, x, (up, down), reverse=True)


def marked(up, down, x):
    def body(c, w):
        h = shard(jnp.tanh(c @ w[0]), "data", "model")
        return shard(c + h @ w[1], "data"), None

    return jax.lax.scan(body, x, (up, down))[0]


PROGRAMS = [
    scanned,
    train_scanned,
    train_remat,
    looped,
    fori,
    branched,
    train_branched,
    nested,
    marked,
]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("pinned", [False, True], ids=["auto", "pinned"])
def test_numbers(function, pinned):
    pins = PINS if pinned else None
    args = (UP, DOWN, X)
    plan = make_plan(function, *args, cluster="cpu:8", mesh="data=4,model=2", shardings=pins)
    assert not plan.fallbacks
    assert_same(compile_plan(function, plan)(*args), jax.jit(function)(*args), 1e-5)


def pinned_module(function):
    args = (UP, DOWN, X)
    plan = make_plan(function, *args, cluster="cpu:8", mesh="data=4,model=2", shardings=PINS)
    step = compile_plan(function, plan).prepare(*args)
    return plan, step, step.jitted.lower(*args)


def regions_with_constraints(plan, function):
    graph = trace(function, (UP, DOWN, X)).graph
    return {graph.regions[graph.ops[c.op].region].kind for c in plan.constraints}


def test_scan_body_is_sharded():
    plan, _, lowered = pinned_module(train_scanned)
    assert "scan" in regions_with_constraints(plan, train_scanned)
    module = lowered.compile()
    up, down, x = module.input_shardings[0]
    assert up.spec == P(None, None, "model") and down.spec == P(None, "model")
    assert x.spec == P("data")
    assert module.output_shardings[0].is_equivalent_to(up, 3)
    text = module.as_text()
    assert " while(" in text
    assert "f32[32,32]" in text and "f32[4,32]" in text  # one layer's half, a quarter of the batch
    assert "f32[6,32,64]" not in text  # the whole of `up` is nowhere
    assert "f32[6,64,32]" not in text


def test_marks_inside_a_scan_are_in_its_body():
    plan, _, lowered = pinned_module(marked)
    assert "scan" in regions_with_constraints(plan, marked)
    body = lowered.as_text().split("stablehlo.while")[1]
    assert "sharding_constraint" in body or "@Sharding" in body


def test_remat_is_kept():
    plain = pinned_module(train_scanned)[2].as_text()
    _, step, lowered = pinned_module(train_remat)
    jaxpr = str(jax.make_jaxpr(step.jitted)(UP, DOWN, X))
    assert "remat" in jaxpr or "checkpoint" in jaxpr
    assert "optimization_barrier" in lowered.as_text()
    assert "optimization_barrier" not in plain
    assert plain.count("stablehlo.tanh") == 1
    assert lowered.as_text().count("stablehlo.tanh") == 2  # the forward is computed again


def test_remat_options_survive():
    def loss(up, down, x):
        saved = jax.checkpoint(
            layer, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable
        )
        return jnp.mean(saved(x, up[0], down[0]) ** 2)

    def train(up, down, x):
        return jax.grad(loss)(up, down, x)

    _, step, _ = pinned_module(train)
    expected = str(jax.make_jaxpr(train)(UP, DOWN, X))
    got = str(jax.make_jaxpr(step.jitted)(UP, DOWN, X))
    for text in ("prevent_cse=False", "dots_saveable"):
        assert (text in expected) == (text in got)
    assert "prevent_cse=False" in got
    assert_same(step(UP, DOWN, X), jax.jit(train)(UP, DOWN, X))


def test_scan_parameters_survive():
    def step(up, down, x):
        return jax.lax.scan(
            lambda c, w: (layer(c, *w), None), x, (up, down), reverse=True, unroll=2
        )[0]

    _, compiled, _ = pinned_module(step)
    text = str(jax.make_jaxpr(compiled.jitted)(UP, DOWN, X))
    assert "reverse=True" in text and "unroll=2" in text
    assert_same(compiled(UP, DOWN, X), jax.jit(step)(UP, DOWN, X))


def test_collectives_inside_a_loop_count_once():
    plan, _, _ = pinned_module(scanned)
    report = check(scanned, plan, UP, DOWN, X)
    rows = [r for r in plan.collectives if r.count > 1]
    assert rows and all(r.count == 6 for r in rows)
    assert report.max_rel_difference < 1e-5
    assert report.planned["all_reduce"] >= report.compiled["all_reduce"] >= 1


def test_branches_of_different_shardings_meet_as_the_plan_says() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    P = jax.sharding.PartitionSpec

    def over(spec: Any) -> Any:
        return jax.shard_map(lambda x: jnp.tanh(x), mesh=mesh, in_specs=spec, out_specs=spec)

    rows, columns = over(P("data")), over(P(None, "model"))

    def step(w: jax.Array, x: jax.Array, which: jax.Array) -> jax.Array:
        return jax.lax.switch(which, (rows, columns, lambda x: x * 2), x @ w) @ w

    draw = np.random.default_rng(0)
    w, x = (jnp.asarray(draw.normal(size=s) * 0.1, jnp.float32) for s in ((16, 16), (32, 16)))
    args = (w, x, jnp.asarray(1))
    plan = make_plan(step, *args, cluster="cpu:8")
    for which in range(3):
        args = (w, x, jnp.asarray(which))
        got = compile_plan(step, plan)(*args)
        want = (x @ w * 2 if which == 2 else jnp.tanh(x @ w)) @ w  # without regions
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
