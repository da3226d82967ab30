"""``compile_plan``: saved plans, plans for something else, too few devices."""

import jax
import numpy as np
import pytest

from executor import build_mesh, compile_plan
from planner import MeshSpec, PlanMismatchError, RequestError, load_plan, make_plan
from tests.executor.executor_steps import (
    assert_placed,
    assert_same,
    batch_of,
    losses_of,
    plain_state,
    plain_step,
)

pytestmark = pytest.mark.devices
P = jax.sharding.PartitionSpec


def a_plan(**options):
    options = {"cluster": "cpu:8", "mesh": "data=4,model=2"} | options
    return make_plan(plain_step, plain_state(), batch_of(), **options)


def test_saved_and_loaded_plan_runs(tmp_path):
    plan = a_plan(shardings={"'up'": P(None, "model"), "'x'": P("data")})
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.digest == plan.digest
    step = compile_plan(plain_step, loaded, donate_argnums=0)
    got, state = losses_of(step, plain_state())
    expected, alone = losses_of(jax.jit(plain_step), plain_state())
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert_same(state, alone)
    assert_placed(step.compiled.place(state, batch_of()), plan)
    assert state["up"].sharding.spec == P(None, "model")


def test_prepare_compiles_nothing_but_knows_the_shardings():
    step = compile_plan(plain_step, a_plan()).prepare(plain_state(), batch_of())
    assert dict(step.mesh.shape) == {"data": 4, "model": 2}
    assert jax.tree.structure(step.in_shardings) == jax.tree.structure((plain_state(), batch_of()))
    assert step.jitted._cache_size() == 0


def test_another_step_is_refused_by_its_first_other_operation():
    def other(state, batch):
        return plain_step({"up": state["up"] * 2.0, "down": state["down"]}, batch)

    with pytest.raises(PlanMismatchError) as caught:
        compile_plan(other, a_plan())(plain_state(), batch_of())
    text = str(caught.value)
    assert "operation 0 (test_compile_plan.py:" in text
    assert "mul" in text and "the plan has dot_general" in text


def test_a_longer_step_is_refused():
    def longer(state, batch):
        state, metrics = plain_step(state, batch)
        return state, {"loss": metrics["loss"] * 3.0}

    with pytest.raises(PlanMismatchError, match="another step"):
        compile_plan(longer, a_plan())(plain_state(), batch_of())


def test_other_arguments_are_refused_by_name():
    step = compile_plan(plain_step, a_plan())
    with pytest.raises(PlanMismatchError, match=r"\['x'\].*plan again"):
        step(plain_state(), batch_of(24))
    step(plain_state(), batch_of())
    for rows in (24, 12):
        with pytest.raises(PlanMismatchError, match=r"\['x'\].*plan again"):
            step(plain_state(), batch_of(rows))
    with pytest.raises(PlanMismatchError, match=r"\['zzz'\]|array arguments"):
        step({**plain_state(), "zzz": np.ones(3, np.float32)}, batch_of())
    step(plain_state(), batch_of())


def test_too_few_devices():
    plan = a_plan(cluster="cpu:16", mesh="data=16")
    with pytest.raises(RequestError) as caught:
        compile_plan(plain_step, plan)(plain_state(), batch_of())
    text = str(caught.value)
    assert "data=16" in text and "needs 16 devices, this process sees 8 (cpu)" in text
    assert "--xla_force_host_platform_device_count=16" in text


def test_mesh_is_row_major_over_the_first_devices():
    mesh = build_mesh(MeshSpec(("data", "model"), (3, 2)))
    assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()[:6]]
    assert mesh.axis_names == ("data", "model") and mesh.devices.shape == (3, 2)
    last = jax.devices()[-2:]
    assert list(build_mesh(MeshSpec(("data",), (2,)), last).devices) == last


@pytest.mark.parametrize("devices, rows", [(6, 12), (3, 12), (5, 10), (6, 16)])
def test_meshes_that_are_no_power_of_two(devices, rows):
    args = (plain_state(width=24), batch_of(rows))
    plan = make_plan(plain_step, *args, cluster=f"cpu:{devices}")
    assert plan.mesh.num_devices == devices
    step = compile_plan(plain_step, plan)
    assert_same(step(*args), jax.jit(plain_step)(*args))
    assert len(step.compiled.mesh.devices.flat) == devices


def test_six_devices_on_two_axes():
    pins = {"'up'": P(None, "model"), "'down'": P("model"), "'x'": P("data")}
    args = (plain_state(width=24), batch_of(12))
    for mesh in ("data=2,model=3", "data=3,model=2"):
        plan = make_plan(plain_step, *args, cluster="cpu:6", mesh=mesh, shardings=pins)
        state, _ = compile_plan(plain_step, plan)(*args)
        assert_same(state, jax.jit(plain_step)(*args)[0])
        assert state["up"].sharding.spec == P(None, "model")


def test_arrays_of_a_mesh_with_explicit_axes():
    """Their type names axes that the plan's mesh lacks: they are placed anew, at every call."""
    plan, state, batch = a_plan(), plain_state(), batch_of()
    kinds = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((8,), ("rows",), axis_types=kinds)
    foreign = jax.device_put(batch, jax.sharding.NamedSharding(mesh, P("rows")))
    expected = compile_plan(plain_step, plan)(state, batch)
    run = compile_plan(plain_step, plan)
    for given in (foreign, foreign, batch, foreign):
        assert_same(run(state, given), expected)
