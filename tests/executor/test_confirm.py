"""``confirm`` chooses among compiled candidates; compilation results are faked here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from costmodels import parse_cluster
from executor.verify import confirm as confirming
from executor.verify.aot import Compiled, CompilerAbsentError
from executor.verify.hlo.collectives import Module
from planner import make_plan
from planner.errors import PlanFormatError, RequestError
from planner.plan.compiled.lowering import PLAIN, by_axis, by_dimension
from planner.plan.compiled.option_sets import DEFAULT, OPTION_SETS
from planner.plan.contents.rows import MeshVerdict
from planner.plan.plan import Plan, load_plan, plan_from_json
from planner.report.table import plan_text

pytestmark = pytest.mark.usefixtures("optimized")

WIDTH, ROWS = 4096, 65536
CLOCK_HZ = 1.5e9  # of a v5e
BY_AXIS = by_axis(parse_cluster("v5e:4x4"))
BY_DIMENSION = by_dimension(parse_cluster("v5e:4x4"))


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, value


ARGS = (
    jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
)


def planned(**options: Any) -> Plan:
    return make_plan(step, *ARGS, cluster="v5e:4x4", **options)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """By lowering or mesh, the milliseconds and bytes, or the error, of a compilation."""
    monkeypatch.setenv(confirming.CACHE, str(tmp_path))
    answers: dict[str, Any] = {"asked": []}

    def compiled(traced: Any, plan: Plan, cluster: Any, **_: Any) -> Compiled:
        answers["asked"].append((str(plan.mesh), str(plan.lowering)))
        answer = answers.get(str(plan.mesh), answers.get(str(plan.lowering), answers.get("else")))
        if set(OPTION_SETS["v5e"]).issubset(plan.compiler_options):
            answer = answers.get("options", answer)
        if isinstance(answer, Exception):
            raise answer
        ms, nbytes = answer
        module = Module((), ms * 1e-3 * CLOCK_HZ, ())
        return Compiled(module, "", int(nbytes), 0, 0, 0, 0, 0, 0)

    monkeypatch.setattr(confirming, "compile_step", compiled)
    return answers


def verdicts(plan: Plan) -> list[tuple[str, str]]:
    assert plan.confirmed is not None
    return [(row.lowering, row.verdict) for row in plan.confirmed.rows]


def test_the_fastest_as_compiled_is_taken(said: dict[str, Any]) -> None:
    said.update({str(BY_AXIS): (10, 1e9), str(BY_DIMENSION): (12, 1e9), "plain": (8, 1e9)})
    said["else"] = (20, 1e9)
    plan = planned(confirm="tpu", candidates=1)
    assert plan.lowering == PLAIN
    assert verdicts(plan) == [
        ("physical joined scattered", "slower"),
        ("physical staged scattered", "slower"),
        ("plain", "chosen"),
        ("plain, async collectives", "slower"),
    ]
    chosen = plan.confirmed.chosen if plan.confirmed else None
    assert chosen is not None and chosen.step_s == pytest.approx(8e-3)
    assert "8.00 ms, peak 1.00 GB" in plan_text(plan, 120)


def test_the_first_stays_where_others_gain_little(said: dict[str, Any]) -> None:
    said["else"] = (9.95, 1e9)
    said[str(BY_AXIS)] = (10, 1e9)
    assert planned(confirm="tpu", candidates=1).lowering == BY_AXIS


def test_other_meshes_are_compiled_under_the_best_lowering(said: dict[str, Any]) -> None:
    first = planned()
    said.update({str(first.mesh): (10, 1e9), "else": (5, 1e9)})
    plan = planned(confirm="tpu", candidates=3)
    rows = plan.confirmed.rows if plan.confirmed else ()
    meshes = [row.mesh for row in rows]
    assert meshes[:3] == [str(first.mesh)] * 3 and len(set(meshes)) == 3
    assert str(plan.mesh) == meshes[3] != str(first.mesh)
    assert [row.lowering for row in rows[3:5]] == [str(BY_AXIS)] * 2
    assert rows[5].mesh == meshes[3] and "async" in rows[5].lowering
    assert plan.inputs != first.inputs  # the whole plan is the other one
    chosen = [row for row in plan.meshes if row.verdict is MeshVerdict.CHOSEN]
    assert [row.mesh for row in chosen] == [str(plan.mesh)]
    assert "best of 6 compiled candidates; 7 meshes searched" in plan_text(plan, 120)
    assert plan_from_json(plan.to_json()) == plan


def test_what_does_not_fit_is_left_out(said: dict[str, Any]) -> None:
    said.update({"else": (10, 1e9), str(BY_AXIS): (5, 1e11)})
    said[str(BY_DIMENSION)] = RequestError("the compiler refused the step: RESOURCE_EXHAUSTED: no")
    plan = planned(confirm="tpu", candidates=1)
    assert verdicts(plan) == [
        ("physical joined scattered", "does not fit"),
        ("physical staged scattered", "not compiled: out of memory"),
        ("plain", "chosen"),
        ("plain, async collectives", "slower"),
    ]


def test_options_are_tried_with_the_best_and_kept_if_they_gain(
    said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said.update({"else": (10, 1e9), str(BY_AXIS): (9, 1e9), "options": (8, 1.1e9)})
    plan = planned(confirm="tpu", candidates=1)
    assert plan.compiler_options == OPTION_SETS["v5e"] and plan.lowering == BY_AXIS
    assert verdicts(plan)[-1] == ("physical joined scattered, async collectives", "chosen")
    assert plan_from_json(plan.to_json()) == plan
    monkeypatch.setenv(confirming.CACHE, "")
    said["options"] = RequestError("the compiler refused the step: No such compile option: 'a'")
    asked = planned(confirm="tpu", candidates=2)
    assert asked.compiler_options == ()  # another compiler: the plan is confirmed without
    mine = {"xla_tpu_some_option": True}
    own = planned(confirm="tpu", candidates=1, compiler_options=mine)
    assert own.compiler_options == (("xla_tpu_some_option", "True"),)
    assert not any("async" in how for how, _ in verdicts(own))


@pytest.mark.devices
def test_a_confirmed_plan_for_tpus_runs_on_cpus_without_their_options(
    said: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from executor import compile_plan

    said.update({"else": (10, 1e9), "options": (8, 1e9)})
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = make_plan(step, shape, shape, cluster="v5e:2x4", confirm="tpu", candidates=1)
    assert plan.compiler_options
    w, x = (jnp.full((64, 64), value, jnp.float32) for value in (0.01, 0.02))
    expected = jax.jit(step)(w, x)
    found = compile_plan(step, plan)(w, x)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert "xla_enable_async_all_gather" in caplog.text and "left out" in caplog.text


@pytest.mark.parametrize(
    "error, expected",
    [
        (
            CompilerAbsentError("needs libtpu; run: pip install 'meshwright[aot-tpu]'"),
            "pip install",
        ),
        (RequestError("the compiler refused the step: No such compile option: 'a'"), "option: 'a'"),
        (RequestError("the compiler knows no v5e:4x4"), "knows no v5e:4x4"),
        (ValueError("first\nsecond"), "first second"),
    ],
)
def test_a_plan_without_the_compiler_says_so(
    said: dict[str, Any], error: Exception, expected: str
) -> None:
    said["else"] = error
    plan, plain = planned(confirm="tpu"), planned()
    assert plan.confirmed is not None and plan.confirmed.chosen is None
    assert expected in plan.confirmed.note
    assert dataclasses.replace(plan, confirmed=None) == plain
    text = " ".join(plan_text(plan, 200).split())
    assert "not confirmed" in text and expected in text


def test_a_limit_of_time_is_said(said: dict[str, Any]) -> None:
    said["else"] = (10, 1e9)
    plan = planned(confirm="tpu", confirm_limit_s=1e-9)
    assert len(said["asked"]) == 1
    assert plan.confirmed is not None and "5 candidates were not compiled" in plan.confirmed.note


def test_what_was_said_is_kept(said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    said["else"] = (10, 1e9)
    first = planned(confirm="tpu")
    count = len(said["asked"])
    said["else"] = RequestError("asked again")
    again = planned(confirm="tpu")
    assert again == first and len(said["asked"]) == count
    planned(confirm="tpu", compiler_options={"xla_tpu_some_option": True})
    assert len(said["asked"]) > count  # another question
    monkeypatch.setenv(confirming.CACHE, "")
    with_nothing_kept = planned(confirm="tpu")
    assert with_nothing_kept.confirmed is not None and not with_nothing_kept.confirmed.chosen


def test_a_saved_plan_has_it(said: dict[str, Any], tmp_path: Path) -> None:
    said["else"] = (10, 1e9)
    options = {"xla_tpu_some_option": True, "xla_level": 2}
    plan = planned(confirm="tpu", compiler_options=options)
    assert plan.compiler_options == (("xla_level", "2"), ("xla_tpu_some_option", "True"))
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "pair", [["xla_dump_to", "here"], ["xla_a", "/tmp/x"], ["xla_a", ".."], ["a", "1"]]
)
def test_a_plan_from_elsewhere_writes_no_files(pair: list[str], tmp_path: Path) -> None:
    raw = json.loads(planned(compiler_options={"xla_a": 1}).to_json())
    raw["compiler_options"] = [pair]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(PlanFormatError, match="compiler_options"):
        load_plan(path)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"confirm": "xpu"}, "expected one of tpu, gpu"),
        ({"confirm": "gpu"}, "write 'tpu'"),
        ({"confirm": "tpu", "candidates": 0}, "whole number from 1 on"),
        ({"candidates": 2}, "with confirm="),
        ({"confirm_limit_s": 2.0}, "with confirm="),
        ({"compiler_options": ["a"]}, "expected NAME=VALUE"),
        ({"compiler_options": {"a": []}}, "expected a name and text"),
        ({"compiler_options": 5}, "expected a mapping"),
        ({"compiler_options": ["xla_a=1", "xla_a=2"]}, "occurs twice"),
        ({"compiler_options": {"xla_dump_to": "x"}}, "names no file"),
    ],
)
def test_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        planned(**options)


def test_refused_for_cpus() -> None:
    with pytest.raises(RequestError, match="leave it out"):
        make_plan(step, *ARGS, cluster="cpu:8", confirm="gpu")


@pytest.mark.devices
def test_an_option_that_the_back_end_does_not_know() -> None:
    from executor import parallelize

    run = parallelize(step, cluster="cpu:8", compiler_options={"xla_no_such_option": True})
    with pytest.raises(RequestError, match=r"compiler_options: .*xla_no_such_option"):
        run(jnp.ones((64, 64)), jnp.ones((64, 64)))


def test_the_lesser_of_two_counters_is_what_a_step_needs_on_tpu() -> None:
    """A step of 0.99 GB of arguments, 19.2 GB of ``temp`` and 15.4 GB alive at once compiles for
    16.9 GB (libtpu 0.0.42); where results take the place of arguments the latter counts both."""
    tpu, other = Module((), 1.0, ()), Module((), 0.0, ())
    step = Compiled(tpu, "", 100, 90, 90, 900, 0, 0, 0, moment_bytes=800)
    assert (step.peak_bytes, step.allocated_bytes) == (800, 1000)
    assert dataclasses.replace(step, moment_bytes=1900).peak_bytes == 1000
    assert dataclasses.replace(step, moment_bytes=0).peak_bytes == 1000
    assert dataclasses.replace(step, module=other).peak_bytes == 1000


def attends(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(w: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(x @ w @ x.T)
        return jnp.mean((weights @ x) ** 2)

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


SMALL = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def test_plans_with_a_softmax_keep_it_apart_from_its_product_on_tpus(said: dict[str, Any]) -> None:
    plan = make_plan(attends, SMALL, SMALL, cluster="v5p:2x2x1")
    assert plan.compiler_options == DEFAULT and plan_from_json(plan.to_json()) == plan
    assert make_plan(attends, SMALL, SMALL, cluster="h100:8").compiler_options == ()
    assert make_plan(step, SMALL, SMALL, cluster="v5p:2x2x1").compiler_options == ()
    mine = {name: "true" for name, _ in DEFAULT} | {"xla_other": 1}
    own = make_plan(attends, SMALL, SMALL, cluster="v5p:2x2x1", compiler_options=mine)
    assert dict(own.compiler_options) == {name: str(value) for name, value in mine.items()}
    said.update({"else": (10, 1e9), "options": (8, 1e9)})
    confirmed = make_plan(attends, SMALL, SMALL, cluster="v5e:2x4", confirm="tpu", candidates=1)
    assert set(confirmed.compiler_options) == {*DEFAULT, *OPTION_SETS["v5e"]}
    how, verdict = verdicts(confirmed)[-1]
    assert how.endswith("scattered, async collectives") and verdict == "chosen"


@pytest.mark.devices
def test_without_the_default_options_where_the_back_end_does_not_know_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from executor import compile_plan
    from executor.run import compile as compiling

    plan = make_plan(attends, SMALL, SMALL, cluster="v5e:2x4")
    w, x = (jnp.full((64, 64), value, jnp.float32) for value in (0.01, 0.02))
    expected = jax.jit(attends)(w, x)

    def check() -> None:
        for a, b in zip(expected, compile_plan(attends, plan)(w, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)

    check()  # on CPUs they are left out
    assert not caplog.text
    monkeypatch.setattr(compiling, "_options", lambda plan, mesh: dict(plan.compiler_options))
    check()  # as on a TPU with an older compiler
    assert DEFAULT[0][0] in caplog.text and "compiled without it" in caplog.text


@pytest.mark.devices
def test_other_errors_of_the_compiler_do_not_drop_the_default_options(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from executor import compile_plan
    from executor.run import compile as compiling

    plan = make_plan(attends, SMALL, SMALL, cluster="v5e:2x4")
    monkeypatch.setattr(compiling, "_options", lambda plan, mesh: dict(plan.compiler_options))

    def fails(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: consider the option to recompute")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fails)
    w = jnp.full((64, 64), 0.01, jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_plan(attends, plan)(w, w)
    assert "compiled without it" not in caplog.text
