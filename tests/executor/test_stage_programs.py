"""Stages that are programs of their own compute what the plain step computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from costmodels.orders import Order, Task, named_order, order_of_rows, write_order
from executor import compile_plan, parallelize
from executor.run.stages.compiled import StagedStep
from executor.run.stages.places import Places
from executor.run.stages.sending import Sender
from planner import load_plan, make_plan
from planner.errors import RequestError
from planner.microbatch.rewrite import microbatched
from planner.recipes import Rewriter
from planner.stages.programs import layered
from planner.stages.programs.homes import ALL
from tests.zoo.running import difference

pytestmark = pytest.mark.devices
KEY = jax.random.key(0)


def draw(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(KEY, number), shape) * 0.2


def trained(loss: Any) -> Any:
    """A step with momentum and clipping by the norm of all gradients."""

    def step(state: Any, batch: Any) -> Any:
        params, speed, count = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 0.1), grads)
        speed = jax.tree.map(lambda s, g: 0.9 * s + g, speed, grads)
        params = jax.tree.map(lambda p, s: p - 0.1 * s, params, speed)
        return (params, speed, count + 1), {"loss": value, "norm": norm}

    return step


def state_of(params: Any) -> Any:
    return params, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32)


def layers() -> tuple[Any, Any, Any]:
    """Unequal layers, and a table at both ends."""

    def loss(params: Any, batch: Any) -> Any:
        x = params["table"][batch["tokens"]].mean(axis=1)
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w) @ w.T
        scores = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(scores, batch["next"][:, None], axis=1))

    widths = (64, 128, 64, 96, 64, 128)
    params = {"table": draw(0, 512, 64), "layers": [draw(k, 64, n) for k, n in enumerate(widths)]}
    tokens = jax.random.randint(KEY, (16, 8), 0, 512)
    return trained(loss), state_of(params), {"tokens": tokens, "next": tokens[:, 0]}


def scanned() -> tuple[Any, Any, Any]:
    """Layers in a scan, with their parameters in one array."""

    def loss(params: Any, batch: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            return x + jnp.tanh(x @ p["w"] + p["b"]), None

        x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
        return jnp.mean((x @ params["out"] - batch["y"]) ** 2)

    params = {
        "in": draw(1, 32, 128),
        "layers": {"w": draw(2, 8, 128, 128), "b": jnp.zeros((8, 128))},
        "out": draw(3, 128, 32),
    }
    return trained(loss), state_of(params), {"x": draw(4, 16, 32), "y": draw(5, 16, 32)}


def recurrent() -> tuple[Any, Any, Any]:
    """A stack of recurrent layers over time."""

    def loss(params: Any, batch: Any) -> Any:
        x = jnp.moveaxis(batch["x"], 1, 0)
        for w, u in params:

            def cell(h: Any, v: Any, w: Any = w, u: Any = u) -> Any:
                h = jnp.tanh(h @ w + v @ u)
                return h, h

            _, x = jax.lax.scan(cell, jnp.zeros(x.shape[1:]), x)
        return jnp.mean((x[-1] - batch["y"]) ** 2)

    params = [(draw(k, 64, 64), draw(k + 9, 64, 64)) for k in range(4)]
    return trained(loss), state_of(params), {"x": draw(20, 16, 6, 64), "y": draw(21, 16, 64)}


def two_towers() -> tuple[Any, Any, Any]:
    """An encoder whose result every layer of the decoder reads."""

    def loss(params: Any, batch: Any) -> Any:
        memory = batch["x"]
        for w in params["encoder"]:
            memory = memory + jnp.tanh(memory @ w)
        x = batch["y"]
        for w, u in params["decoder"]:
            x = x + jnp.tanh(x @ w + memory @ u)
        return jnp.mean((x - batch["y"]) ** 2)

    params = {
        "encoder": [draw(k, 128, 128) for k in range(4)],
        "decoder": [(draw(k, 128, 128), draw(k + 5, 128, 128)) for k in range(4)],
    }
    return trained(loss), state_of(params), {"x": draw(40, 16, 128), "y": draw(41, 16, 128)}


def noisy() -> tuple[Any, Any, Any]:
    """Layers with dropout from a random key in the state."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        x = batch["x"]
        for number, w in enumerate(params):
            x = x + jnp.tanh(x @ w)
            if number == 2:
                x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0.0)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(state: Any, batch: Any) -> Any:
        params, speed, key = state
        key, drop = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, batch, drop)
        speed = jax.tree.map(lambda s, g: 0.9 * s + g, speed, grads)
        return (jax.tree.map(lambda p, s: p - 0.1 * s, params, speed), speed, key), value

    params = [draw(k, 64, 64) for k in range(8)]
    state = params, jax.tree.map(jnp.zeros_like, params), jax.random.key(7)
    return step, state, {"x": draw(60, 16, 64), "y": draw(61, 16, 64)}


PROGRAMS = {f.__name__: f for f in (layers, scanned, recurrent, two_towers, noisy)}


def equal_steps(made: Any, step: Any, state: Any, batch: Any) -> Any:
    """Three steps, equal to those of the plain step; returns the state."""
    plain, want, got = jax.jit(step), state, state
    for _ in range(3):
        want, expected = plain(want, batch)
        got, found = made(got, batch)
        assert difference(found, expected) < 1e-5
    assert difference(got, want) < 1e-5
    return got


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", pytest.param("zb-h1", marks=pytest.mark.slow), "zb-h2"]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_the_plain_step(name: str, schedule: str) -> None:
    step, state, batch = PROGRAMS[name]()
    made = parallelize(step, stages=4, microbatches=8, schedule=schedule, cluster="cpu:8")
    equal_steps(made, step, state, batch)
    assert made.plan.schedule == schedule and made.plan.mesh.size("stage") == 4


def test_each_stage_holds_its_own_layers() -> None:
    step, state, batch = scanned()
    made = parallelize(step, stages=4, microbatches=8, schedule="1f1b", cluster="cpu:8")
    (params, _, _), _ = made(state, batch)
    rows = {
        (s.index[0].start or 0): {d.data.shape[0] for d in params["layers"]["w"].addressable_shards}
        for s in params["layers"]["w"].addressable_shards
    }
    assert set(rows) == {0, 2, 4, 6}
    ends = [{d.id for d in params[name].sharding.device_set} for name in ("in", "out")]
    assert ends == [{0, 1}, {6, 7}]


def halves() -> tuple[Any, Any, Any]:
    """Scanned layers in 16 bits, with a copy in 32 bits that is updated."""

    def loss(params: Any, batch: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params)
        return jnp.mean((x - batch["y"]).astype(jnp.float32) ** 2)

    def step(state: Any, batch: Any) -> Any:
        wide, narrow = state
        value, grads = jax.value_and_grad(loss)(narrow, batch)
        wide = wide - 0.1 * grads.astype(jnp.float32)
        return (wide, wide.astype(jnp.bfloat16)), value

    wide = draw(70, 8, 128, 128)
    batch = {"x": draw(71, 16, 128), "y": draw(72, 16, 128)}
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (wide, batch))
    return step, (wide, narrow[0]), narrow[1]


def test_gradients_in_16_bits_stay_at_their_stage() -> None:
    """They are added up in 32 bits: the conversion is of each stage's layers, not of all."""
    step, state, batch = halves()
    made = parallelize(step, stages=4, microbatches=8, schedule="1f1b", cluster="cpu:8")
    got, _ = made(state, batch)
    want, _ = jax.jit(microbatched(step, (state, batch), 8))(state, batch)
    assert difference(got[0], want[0]) < 1e-5


def test_a_plan_from_a_file_runs(tmp_path: Any) -> None:
    step, state, batch = layers()
    plan = make_plan(
        step, state, batch, cluster="cpu:8", stages=2, microbatches=4, schedule="zb-h1"
    )
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan and again.schedule == "zb-h1"
    got = compile_plan(step, again)(state, batch)
    assert difference(got, jax.jit(step)(state, batch)) < 1e-5
    text = str(plan)
    assert "ZB-H1 through the stages" in text and "0  0" in text


def test_the_schedule_that_is_predicted_fastest_is_taken() -> None:
    step, state, batch = two_towers()
    options: Any = {"cluster": "h100:8x8", "stages": 4, "microbatches": 8, "remat": "none"}
    names = ("1f1b", "gpipe", "zb-h1", "zb-h2")
    plans = {n: make_plan(step, state, batch, schedule=n, **options) for n in names}
    chosen = make_plan(step, state, batch, schedule="auto", **options)
    least = min(p.prediction.step_s for p in plans.values())
    assert chosen.prediction.step_s <= 1.01 * least
    assert chosen.prediction == plans[chosen.schedule].prediction
    assert "schedules compared: 1f1b" in chosen.notes[-1]
    assert len({p.cuts for p in plans.values()}) == 1


def test_donated_arguments_are_given_away() -> None:
    step, state, batch = layers()
    made = parallelize(
        step, stages=2, microbatches=2, schedule="1f1b", cluster="cpu:8", donate_argnums=0
    )
    state, _ = made(state, batch)
    before = jax.tree.leaves(state)
    after, _ = made(state, batch)
    assert all(x.is_deleted() for x in before)
    assert np.isfinite(jax.tree.leaves(after)[0]).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "1f1b"}, "give stages=2 or more, or auto"),
        ({"schedule": "zigzag", "stages": 2}, "expected auto, one of 1f1b, gpipe, zb-h1, zb-h2"),
        ({"schedule": "1f1b", "stages": 4, "microbatches": 1}, "microbatches=2 or more"),
        (
            {"schedule": "interleaved-2", "stages": 4, "microbatches": 2},
            "a multiple of 4 microbatches",
        ),
        ({"schedule": "1f1b", "stages": 3}, "can't be cut into 3 equal groups"),
        ({"schedule": "1f1b", "stages": 8}, "blocks"),
        (
            {"schedule": "zb-h2", "stages": 2, "memory": "200kB"},
            "2 stages run by zb-h2 need|no plan fits",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: Any, said: str) -> None:
    step, state, batch = two_towers() if options.get("stages") != 8 else small()
    with pytest.raises(RequestError, match=said):
        make_plan(step, state, batch, cluster="cpu:8", **options)


def small() -> tuple[Any, Any, Any]:
    """One layer."""

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ params) ** 2)

    return trained(loss), state_of(draw(1, 16, 16)), {"x": draw(2, 16, 16)}


def test_what_acts_outside_of_the_microbatches_acts_once() -> None:
    step, state, batch = layers()
    seen: list[int] = []

    def told(state: Any, batch: Any) -> Any:
        jax.debug.callback(lambda n: seen.append(int(n)), state[2])
        state, metrics = step(state, batch)
        jax.debug.callback(lambda n: seen.append(int(n) + 100), state[2])
        return state, metrics

    made = parallelize(told, stages=2, microbatches=4, schedule="1f1b", cluster="cpu:8")
    for _ in range(2):
        state, _ = made(state, batch)
    jax.effects_barrier()
    assert sorted(set(seen)) == [0, 1, 101, 102]


def test_not_inside_of_another_program() -> None:
    step, state, batch = layers()
    made = parallelize(step, stages=2, microbatches=2, schedule="1f1b", cluster="cpu:8")
    made(state, batch)
    with pytest.raises(RequestError, match="can't run inside"):
        jax.jit(made)(state, batch)
    with pytest.raises(RequestError, match="no one program"):
        made.lower(state, batch)
    follower = parallelize(lambda state, batch: state[2], like=made)
    with pytest.raises(RequestError, match="no other step"):
        follower(state, batch)


@pytest.mark.parametrize("schedule", ["interleaved-2", "zb-v"])
@pytest.mark.parametrize("name", ["layers", pytest.param("two_towers", marks=pytest.mark.slow)])
def test_several_chunks_on_a_group_of_devices(name: str, schedule: str) -> None:
    step, state, batch = PROGRAMS[name]()
    options: Any = {"stages": 2, "microbatches": 8, "schedule": schedule}
    made = parallelize(step, cluster="cpu:8", **options)
    got = equal_steps(made, step, state, batch)
    assert len(made.plan.cuts) == 4 and made.plan.mesh.size("stage") == 2
    held = [frozenset(d.id for d in x.devices()) for x in jax.tree.leaves(got[0])]
    assert len(set(held) - {frozenset(range(8))}) == 2
    assert schedule in str(made.plan)


def own(order: Order, path: Path) -> Path:
    """The file of an order under another name."""
    path.write_text(write_order(dataclasses.replace(order, name="Mine")))
    return path


@pytest.mark.parametrize(
    ("base", "chunks"), [("zb-h1", 2), pytest.param("zb-v", 4, marks=pytest.mark.slow)]
)
def test_a_schedule_of_ones_own(
    base: str, chunks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file gives the numbers of stages and microbatches; the plan holds the passes."""
    step, state, batch = PROGRAMS["layers"]()
    path = own(named_order(base, 2, 4), tmp_path / "Order.json")
    made = parallelize(step, cluster="cpu:8", schedule=path)
    equal_steps(made, step, state, batch)
    plan = made.plan
    assert (plan.schedule, plan.stages, plan.microbatches) == ("Mine", 2, 4)
    assert len(plan.cuts) == chunks and len(plan.order) == 2
    assert "stages run by Mine" in str(plan)
    path.unlink()
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan and again.digest == plan.digest
    ran = compile_plan(step, again)(state, batch)
    assert difference(ran, jax.jit(step)(state, batch)) < 1e-5
    given = make_plan(
        step,
        state,
        batch,
        cluster="cpu:8",
        schedule=str(own(order_of_rows("Mine", plan.order), path)),
    )
    assert (given.order, given.cuts) == (plan.order, plan.cuts)
    assert "turns that off" not in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 4}, "stages=4: schedule 'Mine' is one of 2 stages"),
        ({"microbatches": 8}, "microbatches=8: schedule 'Mine' is one of 4 microbatches"),
        ({"stages": {"encoder": 0, "decoder": 1}}, "has 4 chunks on 2 groups of devices"),
        ({"schedule": "nowhere.json"}, "'nowhere.json' can't be read"),
        ({"memory": "200kB"}, "2 stages run by Mine need|no plan fits"),
    ],
)
def test_a_schedule_of_ones_own_that_cannot_be(options: Any, said: str, tmp_path: Path) -> None:
    step, state, batch = two_towers()
    path = own(named_order("zb-v", 2, 4), tmp_path / "order.json")
    with pytest.raises(RequestError, match=said):
        make_plan(step, state, batch, **{"cluster": "cpu:8", "schedule": path, **options})


def test_a_file_that_deadlocks_is_refused_with_the_cycle(tmp_path: Path) -> None:
    step, state, batch = two_towers()
    rows = ["B0.0 F0.0", "F1.0 B1.0"]
    path = tmp_path / "order.json"
    path.write_text(write_order(order_of_rows("stuck", rows)))
    with pytest.raises(RequestError, match="schedule 'stuck' deadlocks: device 0 waits with B0"):
        make_plan(step, state, batch, cluster="cpu:8", schedule=path)


def test_a_plan_with_cuts_is_not_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state, batch = two_towers()
    stages = {"encoder": 0, "decoder": 1}
    plan = make_plan(step, state, batch, cluster="cpu:8", stages=stages, microbatches=8)

    def refuse(*_: Any) -> Any:
        raise AssertionError("stages were cut again")

    monkeypatch.setattr(layered, "balanced", refuse)
    assert difference(compile_plan(step, plan)(state, batch), jax.jit(step)(state, batch)) < 1e-5


@pytest.mark.parametrize("remat", ["none", "full"])
def test_manual_stages(remat: str) -> None:
    """What a pattern names lives where it was said, also if blocks that are computed again reach
    across the border of two stages."""
    step, state, batch = two_towers()
    stages = {"encoder": 0, r"decoder'\]\[0\]": 1, r"decoder'\]\[2\]": 2, r"decoder'\]\[3\]": 3}
    made = parallelize(step, stages=stages, microbatches=8, remat=remat, cluster="cpu:8")
    got, want = made(state, batch), jax.jit(step)(state, batch)
    assert difference(got, want) < 1e-5
    assert made.plan.stages == 4 and made.plan.schedule == "1f1b"
    homes = [{d.id for d in w.devices()} for w in got[0][0]["encoder"]]
    assert homes == [{0, 1}] * 4
    homes = [{d.id for d in w.devices()} for w, _ in got[0][0]["decoder"]]
    assert homes == [{2, 3}, {2, 3}, {4, 5}, {6, 7}]
    plan = make_plan(step, state, batch, cluster="cpu:8", stages=stages, microbatches=8)
    assert plan.cuts == made.plan.cuts


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({"encoder": 0, "decoder": 2}, r"names the stages \[0, 2\]; expected all from 0"),
        ({"encoder": 0}, "two or more"),
        ({"(": 0, "decoder": 1}, "no regular expression"),
        ({"encoder": "a", "decoder": 1}, "expected a regular expression over paths or lines"),
        ({"encoder": 0, "attention": 1}, "'attention' .stage 1. matches no line"),
        (
            {"decoder": 1, "encoder": 2, "programs.py": 0},
            "stage 2 begins at .*, which is not behind",
        ),
        ("encoder=0,attention=1", "'attention' .stage 1. matches no line"),
    ],
)
def test_manual_stages_that_cannot_be(stages: Any, said: str) -> None:
    step, state, batch = two_towers()
    with pytest.raises(RequestError, match=said):
        make_plan(step, state, batch, cluster="cpu:6", stages=stages, microbatches=8)


def test_it_is_known_which_pass_runs() -> None:
    step, state, batch = layers()
    made = parallelize(step, stages=2, microbatches=4, schedule="1f1b", cluster="cpu:8")
    made(state, batch)
    shapes = made.compiled.runner.shapes  # type: ignore[attr-defined]
    assert shapes.where() == ""
    shapes.at = Task("B", 1, 3)
    assert shapes.where() == ", at B of microbatch 3 of stage 1 (on process 0),"


def test_an_array_over_all_stages_comes_whole_to_one() -> None:
    devices = np.asarray(jax.devices()[:8]).reshape(4, 2)
    places = Places.of(Mesh(devices, ("stage", "data")), (0, 1, 2, 3))
    x = jnp.arange(64.0).reshape(8, 8)
    spread = jax.device_put(x, places.sharding(ALL, P("stage", "data")))
    (moved,) = Sender(places).moved([spread], ALL, 2, [P(None, "data")])
    np.testing.assert_array_equal(moved, x)
    assert moved.sharding == places.sharding(2, P(None, "data"))
    assert {d.id for d in moved.devices()} == {d.id for d in devices[2]}


def test_every_process_needs_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state, batch = two_towers()
    plan = make_plan(step, state, batch, cluster="cpu:8", stages=2, microbatches=4, schedule="1f1b")
    _, traced = Rewriter(step, (state, batch))(plan.recipe)
    monkeypatch.setattr(jax, "process_count", lambda *_: 2)
    with pytest.raises(RequestError, match=r"on processes \[0\] of 2: with schedule= every"):
        StagedStep(traced, plan)
