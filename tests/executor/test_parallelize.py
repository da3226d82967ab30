"""``parallelize``: numbers, placement, tracing, donation, new shapes, refusals."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import compile_plan, detect_cluster, parallelize
from planner import ModelError, RequestError, make_plan, set_parallel_mode
from tests.executor.executor_steps import (
    PROGRAMS,
    assert_placed,
    assert_same,
    batch_of,
    losses_of,
    plain_state,
    plain_step,
)
from tests.planner.test_memory import residual

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("optimized")]
P = jax.sharding.PartitionSpec
ROOT = Path(__file__).resolve().parents[2]


def test_eight_devices_are_seen():
    assert jax.device_count() == 8
    assert detect_cluster() == "cpu:8"
    assert detect_cluster(jax.devices()[:3]) == "cpu:3"


@pytest.mark.parametrize("pinned", [False, True], ids=["auto", "pinned"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_equals_the_unsharded_run(name, pinned):
    program = PROGRAMS[name]
    options = {}
    if pinned:
        pins = {program.columns: P(None, "model"), r"'x'": P("data")}
        options = {"mesh": "data=4,model=2", "shardings": pins}
    state = program.state()
    expected, last = losses_of(jax.jit(program.step), state)
    step = parallelize(program.step, **options)
    got, trained = losses_of(step, state)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert_same(trained, last)
    assert jax.tree.structure(trained) == jax.tree.structure(last)
    assert_placed((trained, step.compiled.place(trained, batch_of())[1]), step.plan)
    if pinned:
        assert any(leaf.spec.entries == (None, "model") for leaf in step.plan.inputs)
        assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(trained))


def test_decorator_forms():
    @parallelize
    def bare(state, batch):
        """Doc."""
        return plain_step(state, batch)

    @parallelize(mesh="data=2,model=4", mode="AUTO_PARALLEL", search="recursive_programming")
    def optioned(state, batch):
        return plain_step(state, batch)

    expected, _ = losses_of(jax.jit(plain_step), plain_state(), steps=2)
    for step, name in ((bare, "bare"), (optioned, "optioned")):
        got, _ = losses_of(step, plain_state(), steps=2)
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        assert step.__name__ == name
    assert bare.__doc__ == "Doc."
    assert str(optioned.plan.mesh) == "data=2,model=4"
    assert optioned.plan.search.name == "recursive_programming"


def test_mode_in_force_is_taken_at_the_first_call():
    set_parallel_mode("DATA_PARALLEL", search="recursive_programming")
    step = parallelize(plain_step)
    set_parallel_mode("STAND_ALONE")
    step(plain_state(), batch_of())
    assert step.plan.mode == "STAND_ALONE"
    assert step.plan.mesh.num_devices == 1


def test_traces_once():
    traces = []

    def step(state, batch):
        traces.append(1)
        return plain_step(state, batch)

    run = parallelize(step)
    state, _ = run(plain_state(), batch_of())
    first, plan, compiled = len(traces), run.plan, run.compiled
    assert first >= 1
    for k in range(3):
        state, _ = run(state, batch_of(seed=k))
    assert len(traces) == first
    assert run.plan is plan and run.compiled is compiled


def test_arrays_from_anywhere_are_placed():
    step = parallelize(plain_step, mode="DATA_PARALLEL")
    state, batch = plain_state(), batch_of()
    expected = jax.jit(plain_step)(state, batch)
    assert_same(step(jax.device_get(state), batch), expected)
    assert_same(step(jax.device_put(state, jax.devices()[3]), batch), expected)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("other",))
    elsewhere = jax.device_put(batch, jax.sharding.NamedSharding(mesh, P("other")))
    assert_same(step(state, elsewhere), expected)
    placed = step.compiled.place(state, batch)
    assert_placed(placed, step.plan)
    assert placed[1]["x"].sharding.spec == P("data")
    assert_same(step(*placed), expected)


def test_donated_arrays_are_gone_and_others_are_not():
    donating = parallelize(plain_step, donate_argnums=0, mode="DATA_PARALLEL")
    state, _ = donating(plain_state(), batch_of())
    batch = donating.compiled.place(state, batch_of())[1]
    following, _ = donating(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves((following, batch)))
    keeping = parallelize(plain_step, mode="DATA_PARALLEL")
    first = plain_state()
    state, _ = keeping(first, batch)
    again, _ = keeping(state, batch)
    kept = (first, state, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(kept))
    assert_same(keeping(state, batch)[0], again, 0.0)


def test_donation_does_not_change_numbers():
    expected, _ = losses_of(jax.jit(plain_step), plain_state(), steps=5)
    got, _ = losses_of(parallelize(plain_step, donate_argnums=(0,)), plain_state(), steps=5)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def warnings_of(caplog):
    return [r for r in caplog.records if r.name == "meshwright" and r.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"remat": "full"}, "remat='full': nothing to compute again"),
        ({"chunks": 4}, "chunks=4: none: no product is that large"),
    ],
)
def test_what_was_requested_and_does_nothing_is_a_warning(caplog, option, said):
    run = parallelize(plain_step, **option)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        run(plain_state(), batch_of(16))
    assert [said in r.getMessage() for r in warnings_of(caplog)] == [True]
    assert said.partition(": ")[2] in str(run.plan)


@pytest.mark.long
def test_a_plan_that_passes_its_memory_is_a_warning(caplog):
    args = (
        [(jnp.zeros((512, 1024)), jnp.zeros((1024, 512)))] * 2,
        jnp.zeros((2048, 512)),
    )
    options = {"cluster": "v5e:2x4", "mesh": "a=2,b=4", "microbatches": 1, "remat": "none"}
    options["chunks"] = 1
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        run = parallelize(residual, **options, memory=7.0e6)
        run(*args)
    assert run.plan.prediction.peak_bytes > 7.0e6
    assert any("as it runs the plan takes" in r.getMessage() for r in warnings_of(caplog))


@pytest.mark.parametrize("rows", [24, 12], ids=["divisible", "indivisible"])
def test_new_shapes_plan_again_once(caplog, rows):
    traces = []

    def step(state, batch):
        traces.append(1)
        return plain_step(state, batch)

    run = parallelize(step, mode="DATA_PARALLEL")
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        state, _ = run(plain_state(), batch_of(16))
        first = run.plan
        assert not warnings_of(caplog)
        expected = jax.jit(plain_step)(jax.device_get(state), batch_of(rows))
        state, metrics = run(state, batch_of(rows))
        assert_same((state, metrics), expected)
        said = [r.getMessage() for r in warnings_of(caplog)]
        assert "planning again" in said[0]
        whole = [line for line in said[1:] if "the 12 examples of [1]['x'] are not split" in line]
        assert len(said) == 1 + len(whole) == (1 if rows % 8 == 0 else 2)
        second, traced = run.plan, len(traces)
        assert second is not first
        for n, plan in ((16, first), (rows, second), (16, first)):
            state, _ = run(state, batch_of(n))
            assert run.plan is plan
    assert len(traces) == traced
    assert len(warnings_of(caplog)) == len(said)


def test_new_structure_and_new_dtype_plan_again(caplog):
    def step(state, batch):
        h = jnp.tanh(batch["x"] @ state["up"])
        loss = jnp.mean(h) + (jnp.mean(state["more"]) if "more" in state else 0.0)
        return jax.tree.map(lambda p: p * 0.5, state), {"loss": loss}

    run = parallelize(step)
    state, _ = run(plain_state(), batch_of())
    more = {**state, "more": jnp.ones((4, 8))}
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        for k, given in enumerate((more, half)):
            assert_same(run(given, batch_of()), jax.jit(step)(jax.device_get(given), batch_of()))
            assert len(warnings_of(caplog)) == k + 1


def test_prepare_then_call_with_other_shapes():
    run = parallelize(plain_step, mode="DATA_PARALLEL")
    shapes = jax.eval_shape(lambda *a: a, plain_state(), batch_of(16))
    compiled = run.prepare(*shapes)
    assert run.plan is compiled.plan
    assert_same(run(plain_state(), batch_of(12)), jax.jit(plain_step)(plain_state(), batch_of(12)))
    assert run.prepare(*shapes) is compiled


def test_no_plan_before_the_first_call():
    step = parallelize(plain_step)
    for name in ("plan", "compiled"):
        with pytest.raises(RequestError, match="plain_step has not been called yet"):
            getattr(step, name)


def test_missing_argument_is_the_users_error():
    step = parallelize(plain_step)
    with pytest.raises(ModelError, match="missing 1 required positional argument"):
        step(plain_state())
    step(plain_state(), batch_of())
    with pytest.raises(ModelError, match="missing 1 required positional argument"):
        step(plain_state())


def test_error_in_the_step_keeps_its_cause():
    @parallelize
    def step(state, batch):
        raise KeyError("lost")

    with pytest.raises(ModelError, match="KeyError") as caught:
        step(plain_state(), batch_of())
    assert isinstance(caught.value.__cause__, KeyError)


def test_bad_requests():
    for options, text in (
        ({"mode": "AUTO"}, "unknown parallel mode"),
        ({"search": "luck"}, "unknown search"),
        ({"mesh": "data=16"}, "needs 16 devices"),
        ({"shardings": {"nowhere": P("data")}}, "no argument path matches"),
    ):
        with pytest.raises(RequestError, match=text):
            parallelize(plain_step, **options)(plain_state(), batch_of())


def test_cluster_larger_than_the_machine():
    with pytest.raises(RequestError, match="needs 16 devices, this process sees 8"):
        parallelize(plain_step, cluster="cpu:16", mode="DATA_PARALLEL")(plain_state(), batch_of())


def test_state_with_a_random_key():
    def step(state, batch):
        key, sub = jax.random.split(state["key"])
        kept = jax.random.bernoulli(sub, 0.5, batch["x"].shape)
        return {"key": key, "w": state["w"] + jnp.sum(batch["x"] * kept, 0)}, {"n": jnp.sum(kept)}

    run, alone = parallelize(step), jax.jit(step)
    a = b = {"key": jax.random.key(3), "w": jnp.zeros(8)}
    for k in range(3):
        (a, m), (b, n) = run(a, batch_of(seed=k)), alone(b, batch_of(seed=k))
        assert int(m["n"]) == int(n["n"])
        assert_same(a["w"], b["w"])
    assert (jax.random.key_data(a["key"]) == jax.random.key_data(b["key"])).all()


@pytest.mark.parametrize(
    "step, args",
    [
        (lambda x, n: x * n, (np.ones((16, 8), np.float32), 2)),
        (lambda x: (None, {"a": x.sum(), "b": None}), (np.ones((16, 8), np.float32),)),
        (lambda x, y: (x, y), (np.zeros((0, 4), np.float32), np.ones((8, 4), np.float32))),
        (lambda x: (x, x, x.T), (np.ones((16, 8), np.float32),)),
        (lambda x: x + np.eye(8, dtype=np.float32)[None, 0], (np.ones((16, 8), np.float32),)),
        (lambda x: (jnp.int32(4), x > 0), (np.ones((16, 8), np.float32),)),
        (lambda: jnp.arange(8) * 2, ()),
    ],
    ids=["scalar", "none", "empty", "repeated", "constant", "literal", "no-arguments"],
)
def test_unusual_signatures(step, args):
    assert_same(parallelize(step)(*args), jax.jit(step)(*args))


def test_callbacks_and_prints_run(capfd):
    def step(x):
        jax.debug.print("sum {}", x.sum())
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(lambda v: np.float32(np.asarray(v).sum()), shape, x)

    x = np.ones((16, 8), np.float32)
    assert float(parallelize(step)(x)) == 128.0
    jax.effects_barrier()
    assert "sum 128.0" in capfd.readouterr().out


def test_another_process_computes_the_same_plan():
    script = Path(__file__).with_name("executor_steps.py")
    expected = []
    for name in ("plain", "linen"):
        state = jax.eval_shape(PROGRAMS[name].state)
        plan = make_plan(PROGRAMS[name].step, state, batch_of(), cluster="cpu:8")
        expected.append(f"{name} {plan.digest}")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == expected


def test_plan_does_not_depend_on_where_arguments_are():
    step = parallelize(plain_step)
    state, _ = step(plain_state(), batch_of())
    shapes = jax.eval_shape(lambda *a: a, plain_state(), batch_of())
    assert make_plan(plain_step, *shapes, cluster="cpu:8", donate_argnums=()) == step.plan
    compile_plan(plain_step, step.plan)(state, batch_of())


def test_plan_of_arrays_that_are_on_a_mesh():
    step = parallelize(plain_step)
    state, _ = step(plain_state(), batch_of())
    plan = make_plan(plain_step, state, batch_of(), cluster="cpu:8", donate_argnums=())
    assert plan == step.plan


def test_large_operations_without_a_rule_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    from executor.run.parallelize import replicated
    from planner import make_plan
    from planner.graph.trace import trace

    mesh = jax.sharding.AbstractMesh((1,), ("one",))
    spec = jax.sharding.PartitionSpec()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        body = jax.shard_map(lambda w, x: x @ w, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(body(w, x))))(w)

    args = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 4096), (16384, 4096)))
    plan = make_plan(step, *args, cluster="h100:8")
    lines = replicated(trace(step, args), plan)
    assert lines and all("shard_map (test_parallelize.py:" in line for line in lines)
    assert "604 MB of operands and results" in lines[0]


def test_weak_types_are_said_when_a_step_is_planned_again(caplog):
    def step(state, x):
        scale = state["scale"] * x.astype(jnp.bfloat16)  # bfloat16 with a weak type, else float32
        return {"scale": state["scale"].astype(jnp.float32)}, jnp.mean(scale)

    parallel, x = parallelize(step), jnp.ones((8, 4))
    state, _ = parallel({"scale": jnp.log(10.0)}, x)
    with caplog.at_level(logging.WARNING):
        parallel(state, x)
    said = [m.getMessage() for m in warnings_of(caplog) if "planning again" in m.getMessage()]
    assert len(said) == 1 and "weak types" in said[0] and "scale" in said[0].split(" at ")[1]
