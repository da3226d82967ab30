"""The training loop: goes on where it stopped, says what goes wrong, stops when told."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from executor import (
    Batches,
    CheckpointError,
    NotFiniteError,
    PreemptedError,
    compile_plan,
    mean_metrics,
    parallelize,
    train,
)
from executor.processes.failure_detection import AGAIN
from executor.train.metrics import named_scalars
from executor.train.speed import speed_of
from planner import make_plan
from planner.errors import RequestError

pytestmark = pytest.mark.devices
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 16)).astype(np.float32)
Y = (X @ RNG.normal(size=(16, 4))).astype(np.float32)
ROWS = {"x": X, "y": Y}


def fresh() -> Any:
    return {"w": jnp.zeros((16, 4)), "rate": jnp.float32(0.05)}


def fit(state: Any, batch: Any) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["w"])
    return {**state, "w": state["w"] - state["rate"] * gradient}, {"loss": value}


def made(mesh: str = "data=8", **options: Any) -> tuple[Any, Batches]:
    step = parallelize(fit, mesh=mesh, cluster="cpu:8", donate_argnums=0)
    shardings = step.prepare(fresh(), {"x": X[:8], "y": Y[:8]}).in_shardings[1]
    return step, Batches(ROWS, shardings, batch_size=8, seed=1, **options)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def plain() -> Iterator[Any]:
    for k in itertools.count():
        yield {"x": X[k % 8 * 8 :][:8], "y": Y[k % 8 * 8 :][:8]}


def test_a_run_in_parts_is_the_run_in_one(tmp_path: Path) -> None:
    step, batches = made()
    whole = train(step, fresh(), batches, steps=23, directory=tmp_path / "one", progress=False)
    for steps, mesh in ((9, "data=8"), (17, "data=2,model=4"), (23, "data=4,model=2")):
        step, batches = made(mesh)
        part = train(
            step, fresh(), batches, steps=steps, directory=tmp_path / "parts", progress=False
        )
        assert part.step == steps
        assert str(step.plan.mesh) == mesh
    np.testing.assert_allclose(part.state["w"], whole.state["w"], rtol=1e-5)
    assert [x["step"] for x in lines(tmp_path / "parts")] == list(range(1, 24))
    one, parts = ([x["loss"] for x in lines(tmp_path / name)] for name in ("one", "parts"))
    np.testing.assert_allclose(one, parts, rtol=1e-4)
    assert one[-1] < one[0] / 2 and whole.metrics == {"loss": one[-1]}


def test_a_plain_iterator_is_drawn_up_to_its_place(tmp_path: Path) -> None:
    step = jax.jit(fit)
    whole = train(step, fresh(), plain(), steps=12, progress=False)
    train(step, fresh(), plain(), steps=5, directory=tmp_path, progress=False)
    again = train(step, fresh(), plain(), steps=12, directory=tmp_path, progress=False)
    np.testing.assert_array_equal(again.state["w"], whole.state["w"])


def test_batches_may_end_first(tmp_path: Path) -> None:
    step, batches = made(epochs=1)
    result = train(step, fresh(), batches, steps=100, directory=tmp_path, progress=False)
    assert result.step == 8 and len(lines(tmp_path)) == 8
    step, batches = made(epochs=1)
    again = train(step, fresh(), batches, steps=100, directory=tmp_path, progress=False)
    assert again.step == 8 and again.metrics == {}
    np.testing.assert_array_equal(again.state["w"], result.state["w"])


def test_unplanned_steps_are_planned_with_the_first_batch(tmp_path: Path) -> None:
    step = parallelize(fit, mode="DATA_PARALLEL", cluster="cpu:8")
    seen: list[Any] = []

    def noted() -> Iterator[Any]:
        for batch in itertools.islice(plain(), 3):
            seen.append(batch)
            yield batch

    assert train(step, fresh(), noted(), steps=5, progress=False).step == 3 == len(seen)
    assert str(step.plan.mesh) == "data=8"


def test_what_is_not_finite_is_named_and_not_saved(tmp_path: Path) -> None:
    def breaks(state: Any, batch: Any) -> Any:
        state, metrics = fit(state, batch)
        bad = jnp.where(batch["x"].sum() == 0, jnp.nan, 1.0)
        return {**state, "w": state["w"] * bad}, {"loss": metrics["loss"] * bad, "one": 1.0}

    def zeros() -> Iterator[Any]:
        for k, batch in enumerate(plain()):
            yield {**batch, "x": np.zeros_like(batch["x"])} if k == 12 else batch

    said = (
        r"loss became nan at step 13; not finite in the state after step 16: 1 of 2 arrays, .*'w'"
    )
    with pytest.raises(NotFiniteError, match=said):
        train(
            jax.jit(breaks),
            fresh(),
            zeros(),
            steps=100,
            directory=tmp_path,
            save_every=8,
            log_every=4,
            progress=False,
        )
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["8"]
    assert [x["step"] for x in lines(tmp_path)] == list(range(1, 14))


def shaped(values: list[float]) -> tuple[Any, Any]:
    """A step whose losses are these, and its state."""
    table = jnp.asarray(values)

    def step(state: Any, batch: Any) -> Any:
        return {"k": state["k"] + 1}, {"loss": table[state["k"]], "accuracy": state["k"] / 9}

    return jax.jit(step), {"k": jnp.int32(0)}


def told_of(caplog: pytest.LogCaptureFixture, values: list[float], **options: Any) -> list[str]:
    step, state = shaped(values)
    with caplog.at_level(logging.WARNING, "meshwright"):
        train(step, state, itertools.repeat(0), steps=len(values), progress=False, **options)
    return [r.message for r in caplog.records if "diverges" in r.message]


def test_divergence_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    falling = [5.0 - k / 10 for k in range(40)]
    told = told_of(caplog, [*falling, *[40.0] * 40, *[1.0] * 20])
    assert told == ["the loss diverges: 40 at step 50; it began at 5 and was 1.55 at its lowest"]


def test_noise_is_no_divergence(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    noise = (RNG.normal(size=100) / 100).tolist()
    falling = [5.0 - k / 10 for k in range(40)]
    assert not told_of(caplog, falling, directory=tmp_path)
    values = [*falling, *(1.0 + x for x in noise)]  # goes on, at a plateau
    assert not told_of(caplog, values, directory=tmp_path)
    assert [x["step"] for x in lines(tmp_path)] == list(range(1, 141))


def test_sigterm_saves_and_asks_for_a_restart(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def told(step: int, metrics: Any) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    step, batches = made()
    with pytest.raises(PreemptedError) as stopped:
        train(
            step,
            fresh(),
            batches,
            steps=50,
            directory=tmp_path,
            log_every=3,
            on_metrics=told,
            progress=False,
        )
    assert stopped.value.code == AGAIN
    assert signal.getsignal(signal.SIGTERM) is before
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["7"]
    step, batches = made()
    again = train(step, fresh(), batches, steps=20, directory=tmp_path, progress=False)
    step, batches = made()
    whole = train(step, fresh(), batches, steps=20, progress=False)
    np.testing.assert_array_equal(again.state["w"], whole.state["w"])


def test_a_late_sigterm_ends_the_process_as_ever(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        train(
            jax.jit(fit),
            fresh(),
            plain(),
            steps=4,
            directory=tmp_path,
            log_every=4,
            on_metrics=lambda step, m: os.kill(os.getpid(), signal.SIGTERM),
            progress=False,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]  # handed on, after the last step was saved
    assert (tmp_path / "4").is_dir()


def test_the_checkpoint_is_there_before_the_evaluation(tmp_path: Path) -> None:
    def breaks(state: Any) -> dict[str, float]:
        raise OSError("no data to evaluate on")

    with pytest.raises(OSError, match="no data"):
        train(
            jax.jit(fit),
            fresh(),
            plain(),
            steps=4,
            directory=tmp_path,
            evaluate=breaks,
            progress=False,
        )
    assert (tmp_path / "4").is_dir()


def test_batches_that_end_first_are_evaluated_too(tmp_path: Path) -> None:
    step, batches = made(epochs=1)
    told: list[tuple[int, float]] = []
    train(
        step,
        fresh(),
        batches,
        steps=100,
        directory=tmp_path,
        evaluate=lambda state: {"norm": float(jnp.abs(state["w"]).sum())},
        on_metrics=lambda k, m: told.append((k, m.get("eval/norm", 0.0))),
        progress=False,
    )
    assert told[-1][0] == 8 and told[-1][1] > 0
    (line,) = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found.pop("owner").startswith("1 ")
    assert found == {"step": 8, "eval/norm": told[-1][1]}


def test_metrics_that_are_arrays_of_the_state_outlive_it() -> None:
    jitted = jax.jit(fit, donate_argnums=0)

    def step(state: Any, batch: Any) -> Any:
        state, metrics = jitted(state, batch)
        return state, {**metrics, "rate": state["rate"]}

    done = train(step, fresh(), plain(), steps=25, progress=False)
    assert done.metrics["rate"] == pytest.approx(0.05)


def test_only_the_loss_must_be_finite(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def step(state: Any, batch: Any) -> Any:
        state, metrics = fit(state, batch)
        return state, {**metrics, "best": jnp.float32(jnp.inf)}

    with caplog.at_level(logging.WARNING, "meshwright"):
        train(jax.jit(step), fresh(), plain(), steps=30, directory=tmp_path, progress=False)
    assert [r.message for r in caplog.records].count("best is inf at step 1") == 1
    assert all(x["best"] is None for x in lines(tmp_path))


def test_evaluation_follows_the_plan_of_training() -> None:
    def errors(w: jax.Array, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    step = parallelize(fit, mesh="data=2,model=4", cluster="cpu:8", zero=3)
    evaluation = parallelize(errors, like=step)
    told: list[tuple[int, dict[str, float]]] = []

    def evaluated(state: Any) -> dict[str, float]:
        return mean_metrics(evaluation, state["w"], itertools.islice(plain(), 8))

    result = train(
        step,
        fresh(),
        plain(),
        steps=25,
        evaluate=evaluated,
        evaluate_every=10,
        on_metrics=lambda k, m: told.append((k, dict(m))),
        progress=False,
    )
    found = [(k, m["eval/loss"]) for k, m in told if "eval/loss" in m]
    assert [k for k, _ in found] == [10, 20, 25]
    expected = float(np.mean((X @ np.asarray(result.state["w"]) - Y) ** 2))
    assert found[-1][1] == pytest.approx(expected, rel=1e-5)
    assert evaluation.plan.mesh == step.plan.mesh
    mine = evaluation.compiled.in_shardings[0]
    assert mine == step.compiled.in_shardings[0]["w"] and any(mine.spec)


def test_a_follower_finds_arrays_by_name_when_it_sees_shapes_only() -> None:
    step = parallelize(fit, mesh="data=2,model=4", cluster="cpu:8", zero=3)
    step.prepare(fresh(), next(plain()))

    def errors(state: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ state["w"] - batch["y"]) ** 2)

    follower = parallelize(errors, like=step)
    shapes = jax.eval_shape(fresh)
    placed = follower.prepare(shapes, next(plain())).in_shardings[0]["w"]
    assert placed == step.compiled.in_shardings[0]["w"] and any(placed.spec)
    elsewhere = jax.make_mesh((4,), ("other",), devices=jax.devices()[:4])
    far = jax.device_put(X[:8], jax.sharding.NamedSharding(elsewhere, P("other")))
    follower = parallelize(errors, like=step)
    follower.prepare(shapes, {**next(plain()), "x": far})  # no mark: it is on other devices
    assert follower.plan.mesh == step.plan.mesh
    with pytest.raises(RequestError, match="has not been called yet"):
        parallelize(errors, like=parallelize(fit))(fresh(), next(plain()))


def test_a_follower_is_planned_for_the_same_devices() -> None:
    step = parallelize(fit, mesh="data=4", cluster="cpu:4", whole_below="1MB")
    train(step, fresh(), plain(), steps=1, progress=False)
    follower = parallelize(fit, like=step)
    follower.prepare(fresh(), next(plain()))
    assert str(follower.plan.mesh) == "data=4" and "cpu:4" in follower.plan.cluster


def test_a_profile_is_written(tmp_path: Path) -> None:
    train(
        jax.jit(fit), fresh(), plain(), steps=4, directory=tmp_path, profile=(2, 3), progress=False
    )
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_lines_are_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    train(jax.jit(fit), fresh(), plain(), steps=20)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and shown.pop().startswith("step time ")
    assert shown[0].startswith("step 10/20  loss ") and shown[1].endswith("steps/s")


def test_a_planned_step_says_its_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    step = parallelize(fit, mesh="data=8")
    train(step, fresh(), plain(), steps=20)
    shown = capsys.readouterr().out.splitlines()
    rows = step.compiled.traced.graph.values[step.compiled.traced.graph.inputs[-1]].shape[0]
    said = re.fullmatch(r"step 20/20 .* (\S+) steps/s  (\S+) examples/s", shown[1])
    assert said is not None  # virtual CPU devices have no peak worth a utilization
    number = float(said[2].rstrip("k")) * (1000 if said[2].endswith("k") else 1)
    assert number == pytest.approx(rows * float(said[1]), rel=0.02)


def test_speed_beside_the_plan() -> None:
    def embed(w: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grad = jax.value_and_grad(lambda w: jnp.mean((w[ids] @ w.T) ** 2))(w)
        return w - grad, value

    shapes = (
        jax.ShapeDtypeStruct((512, 256), jnp.float32),
        jax.ShapeDtypeStruct((64, 128), jnp.int32),
    )
    plan = make_plan(embed, *shapes, cluster="h100:8", mesh="data=8", microbatches=2)
    step = compile_plan(embed, plan)
    assert speed_of(jax.jit(embed)) is None and speed_of(step) is None
    step.prepare(*shapes)
    speed = speed_of(step)
    assert speed is not None and (speed.unit, speed.units) == ("tokens", 64 * 128)
    flop = 3 * 2.0 * 64 * 128 * 512 * 256  # forward, and both gradients
    assert speed.ideal_s == pytest.approx(flop / (8 * 494.7e12))
    planned = 100 * speed.ideal_s / plan.prediction.step_s
    assert speed.text(2.0) == (
        f"16.4k tokens/s  MFU {100 * 2.0 * speed.ideal_s:.1f} % (planned {planned:.1f} %)"
    )
    assert "MFU" not in dataclasses.replace(speed, ideal_s=0.0).text(2.0)


def test_a_file_cut_off_by_a_kill_is_mended(tmp_path: Path) -> None:
    train(jax.jit(fit), fresh(), plain(), steps=10, directory=tmp_path, progress=False)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "loss": 1}\n{"step": 12, "lo')
    train(jax.jit(fit), fresh(), plain(), steps=12, directory=tmp_path, progress=False)
    found = lines(tmp_path)
    assert [x["step"] for x in found] == list(range(1, 13)) and found[10]["loss"] != 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": -1}, "steps=-1"),
        ({"save_every": 0}, "save_every=0: expected at least 1"),
        ({"log_every": 0}, "log_every=0"),
        ({"profile": (3, 2)}, r"profile=\(3, 2\)"),
        ({"profile": (2, 3)}, "needs a directory"),
        ({"profile": (8, 9), "directory": "unused"}, r"\(8, 9\): the first step to trace is after"),
    ],
)
def test_broken_requests(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        train(jax.jit(fit), fresh(), plain(), progress=False, **{"steps": 5, **options})


def test_batches_that_end_early_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batches = itertools.islice(plain(), 3)
    made = train(jax.jit(fit), fresh(), batches, steps=5, directory=tmp_path, progress=False)
    assert made.step == 3 and "the batches ended after step 3 of 5" in caplog.text
    train(jax.jit(fit), fresh(), plain(), steps=4, directory=tmp_path, profile=(2, 4))
    assert "nothing is traced, step 3 was made before" in caplog.text


def test_a_bare_array_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    step = jax.jit(lambda w, b: (w, {"loss": jnp.sum(w)}))
    with pytest.raises(RequestError, match="the state is one bare array"):
        train(step, jnp.ones(3), plain(), steps=2, directory=tmp_path, progress=False)


def test_steps_of_another_form(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"returned dict, expected \(state, metrics\)"):
        train(jax.jit(lambda s, b: s), fresh(), plain(), steps=1, progress=False)
    with pytest.raises(RequestError, match=r"metric x has shape \(8, 16\), expected a scalar"):
        train(jax.jit(lambda s, b: (s, b)), fresh(), plain(), steps=1, progress=False)
    with pytest.raises(RequestError, match="metric x: it is complex"):
        train(jax.jit(lambda s, b: (s, {"x": jnp.complex64(1)})), fresh(), plain(), steps=1)
    with pytest.raises(RequestError, match="metric a/b: there is another of that name"):
        named_scalars({"a/b": 1.0, "a": {"b": 2.0}})
    with pytest.raises(RequestError, match="no batches to plan"):
        train(parallelize(fit, cluster="cpu:8"), fresh(), [], steps=1, progress=False)
    with pytest.raises(RequestError, match="no batches to evaluate on"):
        mean_metrics(jax.jit(fit), fresh(), [])
    train(jax.jit(fit), fresh(), plain(), steps=1, directory=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="w was saved as"):
        train(
            jax.jit(fit),
            {**fresh(), "w": jnp.zeros((16, 5))},
            plain(),
            steps=2,
            directory=tmp_path,
            progress=False,
        )
    step, batches = made()
    with pytest.raises(RequestError, match="has no position in the data"):
        train(step, fresh(), batches, steps=2, directory=tmp_path, progress=False)
