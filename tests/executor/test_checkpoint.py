"""Checkpoints: any plan to any plan, bit for bit; interrupted, damaged and foreign ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from executor import CheckpointError, Checkpoints, parallelize

pytestmark = pytest.mark.devices
ROOT = Path(__file__).resolve().parents[2]
OPTIMIZER = optax.adam(1e-2)


def fresh() -> Any:
    key = jax.random.key(0)
    params = {
        "a": jax.random.normal(key, (24, 48)),
        "layers": [{"w": jax.random.normal(key, (48, 48))} for _ in range(2)],
        "half": jnp.ones((24, 12), jnp.bfloat16),
    }
    return {"params": params, "opt": OPTIMIZER.init(params), "key": jnp.uint32(7)}


def train_step(state: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        h = jnp.tanh(x @ params["a"])
        for layer in params["layers"]:
            h = jnp.tanh(h @ layer["w"])
        return jnp.mean(h**2) + jnp.mean(params["half"].astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "key": state["key"] + 1}, value


X = np.linspace(-1, 1, 48 * 24, dtype=np.float32).reshape(48, 24)


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def trained(**options: Any) -> tuple[Any, Any]:
    step = parallelize(train_step, **options)
    state, _ = step(fresh(), X)
    return step, state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("run")
    step, state = trained(mesh="data=4,model=2", zero=3, cluster="cpu:8")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, plan=step.plan, extra={"position": 48})
    return folder, jax.tree.map(np.asarray, state)


def on(count: int, *sizes: int) -> jax.sharding.Mesh:
    names = ("a", "b", "c")[: len(sizes)]
    return jax.make_mesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:count]
    )


@pytest.mark.parametrize("sizes", [(6,), (4,), (1,), (2, 2), (3, 2), (2, 2, 2)])
def test_any_number_of_devices(saved: tuple[Path, Any], sizes: tuple[int, ...]) -> None:
    folder, state = saved
    mesh = on(int(np.prod(sizes)), *sizes)
    axes = mesh.axis_names

    def spec(x: Any) -> NamedSharding:
        if x.ndim < 2:
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(axes[0], axes[1:] or None))

    shardings = jax.tree.map(spec, state)
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(state, shardings=shardings)
    same(found, state)
    assert found["params"]["a"].sharding == shardings["params"]["a"]


def test_another_plan_goes_on_as_this_one_would(saved: tuple[Path, Any]) -> None:
    folder, state = saved
    step = parallelize(train_step, mesh="data=2,model=4", mode="AUTO_PARALLEL")
    shardings = step.prepare(fresh(), X).in_shardings[0]
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(fresh(), shardings=shardings)
        assert checkpoints.extra() == {"position": 48}
        plan = checkpoints.plan()
    assert plan is not None and str(plan.mesh) == "data=4,model=2"
    same(found, state)
    again, loss = step(found, X)
    expected, wanted = jax.jit(train_step)(state, X)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    assert int(again["key"]) == int(expected["key"])


def test_parameters_alone_and_shapes_alone(saved: tuple[Path, Any]) -> None:
    folder, state = saved
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore({"params": state["params"]}, partial=True)
        same(found["params"], state["params"])
        shapes = checkpoints.shapes()
        with pytest.raises(CheckpointError, match="that the state does not have, the first key"):
            checkpoints.restore({"params": state["params"], "opt": state["opt"]})
    assert shapes["params"]["a"] == jax.ShapeDtypeStruct((24, 48), jnp.float32)


def test_what_does_not_fit_is_named(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, state = saved
    wrong = {**state, "params": {**state["params"], "a": np.zeros((24, 4), np.float32)}}
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(CheckpointError, match=r"params/a was saved as float32\[24, 48\], exp"):
            checkpoints.restore(wrong)
        with pytest.raises(CheckpointError, match="has no new"):
            checkpoints.restore({**state, "new": np.zeros(3)})
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 9.*steps: 1"):
            checkpoints.restore(state, step=9)
    with Checkpoints(tmp_path / "empty") as checkpoints:
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            checkpoints.restore(state)
        assert checkpoints.steps == ()


def test_damage_and_foreign_folders_are_said(tmp_path: Path) -> None:
    state = {"a": jnp.arange(64.0)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        checkpoints.wait()
        for path in (tmp_path / "3" / "state").rglob("*"):
            if path.is_file() and path.parent.name == "d":
                path.write_bytes(b"rubbish")
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoints.restore(state)
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "weights.bin").write_bytes(b"x")
    told = r"4/state is damaged, or not a checkpoint|no checkpoint of step 4"
    with Checkpoints(tmp_path) as again, pytest.raises(CheckpointError, match=told):
        again.restore(state, step=4)


def test_the_latest_are_kept(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(4):
            checkpoints.save(step, {"a": jnp.full(4, float(step))})
        checkpoints.wait()
        assert checkpoints.steps == (2, 3)
        assert float(checkpoints.restore({"a": jnp.zeros(4)})["a"][0]) == 3.0
        with pytest.raises(CheckpointError, match="step 3 was not saved"):
            checkpoints.save(3, {"a": jnp.zeros(4)})


def test_a_save_that_is_killed_leaves_the_last_one(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import jax.numpy as jnp, os, threading, time
from executor import Checkpoints
c = Checkpoints({str(tmp_path)!r})
c.save(1, {{"a": jnp.ones(1000)}}); c.wait()
c.save(2, {{"a": jnp.ones((4000, 4000))}})
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=120
    )
    assert done.returncode == -9
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == (1,)
        assert float(checkpoints.restore({"a": jnp.zeros(1000)})["a"].sum()) == 1000.0
        checkpoints.save(2, {"a": jnp.zeros(1000)})
        checkpoints.wait()
        assert checkpoints.steps == (1, 2)
