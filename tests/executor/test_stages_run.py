"""Steps in pipeline stages on eight devices: equal numbers, and stages where the plan says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from executor import compile_plan, parallelize, train
from executor.run.export import python_text
from planner import MemoryLimitError, RequestError, load_plan, make_plan
from tests.planner.test_stages import MODELS, Model, plain
from tests.zoo.running import difference

pytestmark = pytest.mark.devices

SCANNED, WRITTEN = MODELS["scanned, all at once"], MODELS["written out, all at once"]


def trained(run: Any, model: Model, steps: int = 3) -> Any:
    """The state and metrics after some steps."""
    state, batch = model.args()
    metrics = None
    for _ in range(steps):
        state, metrics = run(state, batch)
    return plain((state, metrics))


@pytest.mark.parametrize("model", [SCANNED, WRITTEN], ids=["scanned", "written out"])
@pytest.mark.parametrize("stages", [2, 4])
def test_numbers_equal_the_unsharded_step(model: Model, stages: int) -> None:
    run = parallelize(model.step, stages=stages, microbatches=4)
    assert difference(trained(run, model), trained(jax.jit(model.step), model)) <= 5e-6
    plan = run.plan
    assert plan.stages == stages and plan.mesh.size("stage") == stages
    assert f"pipeline parallel over {stages}" in plan.strategy
    assert any(row.kind == "permute" and "stage" in row.axes for row in plan.collectives)


def test_layers_in_bfloat16() -> None:
    """Gradients are widened before they are added up; that is no reason to refuse stages."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch @ params[0]
            for w in params[1:]:
                x = x + jnp.tanh(x @ w)
            return jnp.mean(x.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return [w - 0.5 * g for w, g in zip(params, grads, strict=True)], value

    keys = jax.random.split(jax.random.key(0), 10)
    sizes = [(16, 64), *[(64, 64)] * 8]
    params = [
        0.1 * jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, sizes, strict=False)
    ]
    batch = jax.random.normal(keys[9], (32, 16), jnp.bfloat16)
    run = parallelize(step, stages=4, microbatches=4)
    alike = parallelize(step, microbatches=4)
    assert difference(run(params, batch), alike(params, batch)) <= 4e-3
    assert run.plan.stages == 4


def test_a_plan_in_a_file_runs_the_same(tmp_path: Any) -> None:
    args = SCANNED.args()
    plan = make_plan(SCANNED.step, *args, cluster="cpu:8", stages=4, microbatches=8)
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan and again.recipe.stages == 4 and again.staged == plan.staged
    assert "\nschedule (a row per stage" in str(plan)
    assert "\n  0  0123..4..5..6aa7bb" in str(plan)
    assert "\n  3  ...0aa1bb2cc3dd" in str(plan)
    got = compile_plan(SCANNED.step, again)(*args)
    assert difference(plain(got), plain(jax.jit(SCANNED.step)(*args))) <= 2e-6


def test_a_stage_holds_its_own_layers() -> None:
    """What a loop carries from stage to stage lies on that stage's devices alone."""
    args = SCANNED.args()
    run = parallelize(SCANNED.step, stages=4, microbatches=8, mesh="stage=4,data=2")
    run(*args)
    text = run.lower(*args).compile().as_text()
    sent = [line for line in text.splitlines() if " collective-permute(" in line]
    assert any("f32[1," in line for line in sent), sent[:3]


def test_a_state_goes_on_without_stages() -> None:
    state, batch = SCANNED.args()
    piped = parallelize(SCANNED.step, stages=4, microbatches=4)
    alone = parallelize(SCANNED.step)
    one, _ = jax.device_get(piped(state, batch))
    two, _ = alone(one, batch)
    expected = trained(jax.jit(SCANNED.step), SCANNED, 2)[0]
    assert difference(plain((two, 0))[0], expected) <= 5e-6


def test_a_checkpoint_of_stages_is_restored_without_them(tmp_path: Any) -> None:
    model = MODELS["scanned"]
    state, batch = model.args()
    state = plain((state, 0))[0]  # a key is no number

    def step(state: Any, batch: Any) -> Any:
        new, metrics = model.step({**state, "key": jax.random.key(0)}, batch)
        return plain((new, metrics))

    batches = [batch] * 4
    options: dict[str, Any] = {"directory": tmp_path, "progress": False, "log_every": 1}
    train(parallelize(step, stages=4, microbatches=4), state, batches, steps=2, **options)
    done = train(parallelize(step), state, batches, steps=4, **options)
    expected = state
    for _ in range(4):
        expected, _ = jax.jit(step)(expected, batch)
    assert done.step == 4 and difference(done.state, expected) <= 5e-6


def test_microbatches_follow_from_the_stages() -> None:
    plan = make_plan(SCANNED.step, *SCANNED.args(), cluster="h100:8", stages=2)
    assert plan.microbatches == 8  # four for each stage
    assert plan.remat in ("none", "full") or float(plan.remat) > 0


def test_auto_says_what_it_looked_at() -> None:
    plan = make_plan(SCANNED.step, *SCANNED.args(), cluster="h100:8", stages="auto")
    assert plan.stages == 1  # so small a model has no use for stages
    assert "pipelines of up to" in plan.notes[-1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no number": ({"stages": "many"}, "stages='many': expected a whole number from 1 on, or auto"),
    "fewer layers": ({"stages": 8, "microbatches": 4}, "has 4 turns, fewer than 8 stages"),
    "devices": ({"stages": 3, "microbatches": 4}, "8 devices can't be cut into 3 equal groups"),
    "one microbatch": ({"stages": 2, "microbatches": 1}, "ask for microbatches=2 or more"),
    "a mode": ({"stages": 2, "mode": "DATA_PARALLEL"}, "mode DATA_PARALLEL has no pipeline stages"),
    "a mesh without stages": (
        {"stages": 2, "microbatches": 4, "mesh": "data=8"},
        "stages=2: the mesh data=8 has no axis stage=2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str) -> None:
    options, text = BAD[name]
    with pytest.raises(RequestError) as refused:
        make_plan(SCANNED.step, *SCANNED.args(), cluster="cpu:8", **options)
    assert text in str(refused.value)


def test_no_exported_module_has_stages() -> None:
    plan = make_plan(SCANNED.step, *SCANNED.args(), cluster="cpu:8", stages=2, microbatches=4)
    with pytest.raises(RequestError, match="which no exported module carries out"):
        python_text(plan)


def test_no_plan_fits_says_so() -> None:
    with pytest.raises(MemoryLimitError, match="2 stages"):
        make_plan(SCANNED.step, *SCANNED.args(), cluster="cpu:8", stages=2, memory="1kB")
