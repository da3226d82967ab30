"""A traced run beside its plan."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from executor import parallelize, train
from executor.cli import main as cli
from executor.profile.graphs import named
from executor.profile.program import NAMELESS, OTHER, Part, read_program
from executor.profile.reading import Event, read_events, timed
from executor.verify.hlo.collectives import read_module
from planner import make_plan
from planner.errors import RequestError

pytestmark = pytest.mark.devices
WIDTH = 64

HLO = """HloModule jit_step, is_scheduled=true, num_partitions=2

FileNames
1 "/home/me/train.py"
2 "/lib/python3.11/site-packages/flax/linear.py"
3 "/src/executor/run/interpret.py"

FunctionNames
1 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}
2 {file_name_id=2 function_name_id=1 line=90 end_line=90 column=4 end_column=9}
3 {file_name_id=3 function_name_id=1 line=5 end_line=5 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=1}

%body (p: f32[8]) -> f32[8] {
  ROOT %tanh.1 = f32[8]{0} tanh(%p), metadata={op_name="jit(step)/tanh" stack_frame_id=2}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %all-gather-start.2 = f32[8]{0} all-gather-start(%x), metadata={op_name="GATHER" stack_frame_id=3}
  %all-gather-done.2 = f32[8]{0} all-gather-done(%all-gather-start.2), metadata={op_name="GATHER"}
  %neg = f32[8]{0} negate(%all-gather-done.2), metadata={op_name="neg" FILE}
  %odd = f32[8]{0} negate(%neg), metadata={op_name="jit(step)/neg" stack_frame_id=3}
  ROOT %while.1 = f32[8]{0} while(%odd), condition=%body, body=%body
}
""".replace("GATHER", "jit(step)/a.py:3 dot in/sharding_constraint").replace(
    "FILE", 'source_file="/home/me/b.py" source_line=4'
)


def test_instructions_have_kinds_and_the_users_lines() -> None:
    program = read_program(HLO)
    assert program.name == "jit_step"
    parts = dict(program.parts)
    assert parts["all-gather-start.2"] == Part("all_gather", "a.py:3", "sharding_constraint")
    assert parts["all-gather-done.2"].kind == "all_gather"
    assert parts["tanh.1"] == Part("", "train.py:7", "tanh")  # behind the library's line
    assert parts["neg"].line == "b.py:4" and parts["odd"].line == NAMELESS
    assert "while.1" not in parts
    with pytest.raises(ValueError, match="no HloModule line"):
        read_program("module @jit_step {}")


def test_lines_of_a_real_module_are_the_callers() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(optax.huber_loss(x))

    text = jax.jit(jax.grad(loss)).lower(jnp.ones(8)).compile().as_text()
    line = f"{Path(__file__).name}:{loss.__code__.co_firstlineno + 1}"
    lines = {part.line for part in read_program(text).parts.values()} - {NAMELESS}
    assert lines == {line}  # behind the library's lines


def test_kernels_of_graphs_are_their_instructions() -> None:
    """A GPU's graph has kernels named after instructions, and those of libraries in order."""
    call = "custom-call(%x), custom_call_target"
    text = (
        "HloModule jit_step\n\n%inner (p: f32[8]) -> f32[8] {\n"
        '  ROOT %exp.1 = f32[8]{0} exponential(%p), metadata={op_name="a" FILE}\n}\n\n'
        "ENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
        "  %loop_add_fusion.6 = f32[8]{0} fusion(%x), kind=kLoop, calls=%inner\n"
        f'  %gemm.1 = f32[8]{{0}} {call}="__cublas$gemm", metadata={{op_name="jit(step)/dot"}}\n'
        f'  %gemm.2 = f32[8]{{0}} {call}="__cublas$gemm", metadata={{op_name="jit(step)/dot"}}\n'
        "  ROOT %all-reduce.3 = f32[8]{0} all-reduce(%gemm.2), to_apply=%inner\n}\n"
    ).replace("FILE", 'source_file="/home/me/b.py" source_line=4')
    program = read_program(text)
    assert program.parts["loop_add_fusion.6"].line == "b.py:4"  # of what is inside
    kernels = ("loop_add_fusion_6", "Memset 0", "nvjet_1", "nvjet_2", "ncclAllReduce", "odd")
    events = [Event("graph_1", "jit_step", 0, 1, 1.0 * k, 0.5, x) for k, x in enumerate(kernels)]
    events.append(Event("graph_1", "another", 0, 1, 9.0, 0.5, "loop_add_fusion_6"))
    *ours, other = named(reversed(events), program)
    add = "loop_add_fusion.6"
    assert [e.name for e in ours] == [add, add, "gemm.1", "gemm.2", "all-reduce.3", OTHER]
    assert other.name == "graph_1"
    found = timed(ours, "jit_step", frozenset(program.parts))
    assert found.seconds[add] == 1.0 and found.seconds[OTHER] == 0.5


def test_times_are_means_over_steps_and_devices() -> None:
    def events() -> Any:
        for run in (1, 2):
            for device in (0, 1):
                begun = 10.0 * run
                yield Event("a", "jit_step", device, run, begun, 1.0 + device)
                for k in range(3):
                    yield Event("b", "jit_step", device, run, begun + 2 + k, 0.5)
        yield Event("a", "other", 0, 9, 0.0, 100.0)
        yield Event("while.1", "jit_step", 0, 1, 10.0, 9.0)

    found = timed(events(), "jit_step", frozenset("ab"))
    assert (found.devices, found.runs) == (2, 2)
    assert found.seconds == {"a": 1.5, "b": 1.5} and found.counts == {"a": 1.0, "b": 3.0}
    assert found.steps_s == (4.5, 4.5) and found.step_s == 4.5
    with pytest.raises(RequestError, match="no run of jit_fit; it has jit_step, other"):
        timed(events(), "jit_fit", frozenset("ab"))


def test_runs_without_numbers_are_counted() -> None:
    rows = [Event("a", "", d, 0, 3.0 * k, 1.0) for d in (0, 1) for k in range(4)]
    rows += [Event("b", "", d, 0, 3.0 * k + 1, 0.5) for d in (0, 1) for k in range(8)]
    found = timed(iter(rows), "jit_step", frozenset("ab"))
    assert (found.devices, found.runs) == (2, 4)
    assert found.seconds == {"a": 1.0, "b": 1.0} and found.counts == {"a": 1.0, "b": 2.0}
    assert found.step_s == pytest.approx((3.0 * 7 + 1.5) / 4)


def test_devices_with_planes_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU's kernels stand on streams, and the host says which it starts; a TPU's instructions on
    a line of their own beside what they wait for."""

    def event(name: str, begun: int, spent: int, **stats: Any) -> Any:
        return SimpleNamespace(
            name=name, start_ns=begun, duration_ns=spent, stats=list(stats.items())
        )

    def plane(name: str, **lines: Any) -> Any:
        rows = [SimpleNamespace(name=n.replace("_", " "), events=e) for n, e in lines.items()]
        return SimpleNamespace(name=name, lines=rows)

    kernel = {"hlo_op": "a", "hlo_module": "jit_step", "run_id": 1}
    gpu = plane("/device:GPU:3", Stream_7=[event("gemm", 5, 2, **kernel)])
    host = plane("/host:CPU", python=[event("a", 1, 9, device_ordinal=3, **kernel)])
    tpu = plane(
        "/device:TPU:0",
        XLA_Ops=[event("%b.1 = f32[8] fusion(%x)", 0, 4)],
        Async_XLA_Ops=[event("copy", 0, 4, hlo_op="copy.1")],
        Steps=[event("1", 0, 9)],
    )

    def read(*planes: Any) -> list[Event]:
        data = SimpleNamespace(planes=planes)
        fake = SimpleNamespace(from_file=lambda _: data)
        monkeypatch.setattr(jax.profiler, "ProfileData", fake)
        return list(read_events(tmp_path))

    assert [(e.name, e.device, e.module) for e in read(host, gpu)] == [("a", 3, "jit_step")]
    assert [(e.name, e.device) for e in read(tpu)] == [("b.1", 0)]
    assert [(e.name, e.device, e.run) for e in read(host)] == [("a", 3, 1)]


def fit(state: Any, batch: Any) -> Any:
    def loss(layers: Any) -> jax.Array:
        h = batch["x"]
        for layer in layers:
            h = h + jnp.tanh(h @ layer["up"]) @ layer["down"]
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), {"loss": value}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    layer = {"up": jnp.ones((WIDTH, 4 * WIDTH)), "down": jnp.ones((4 * WIDTH, WIDTH))}
    batches = [{"x": jnp.ones((256, WIDTH))}] * 6
    step = parallelize(fit, mesh="data=8", zero=3)
    train(step, [layer] * 2, batches, steps=6, directory=folder, profile=(3, 5), progress=False)
    return folder


def test_a_run_beside_its_plan(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", str(traced), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["program"], found["devices"], found["runs"]) == ("jit_fit", 8, 3)
    assert min(found[name] for name in ("compute_s", "collective_s", "step_s")) > 0
    plan = json.loads((traced / "profile" / "plan.json").read_text())
    assert found["planned_step_s"] == plan["prediction"]["step_s"]
    rows = {(r["kind"], r["line"]): r for r in found["collectives"]}
    (gathers,) = (r for (kind, _), r in rows.items() if kind == "all_gather")
    assert gathers["line"].startswith("test_profile.py:") and gathers["planned_s"] > 0
    assert "use of [0][0]['down']" in gathers["causes"]
    compiled = read_module((traced / "profile" / "program.txt").read_text()).by_kind()
    for kind, total in compiled.items():
        assert sum(r["measured_count"] for (k, _), r in rows.items() if k == kind) == total.count
    sums = [sum(r[name] for r in found["collectives"]) for name in ("measured_s", "planned_s")]
    assert sums[0] == pytest.approx(found["collective_s"])
    assert sums[1] == pytest.approx(found["planned_collective_s"])
    lines = found["lines"]
    assert sum(row["measured_s"] for row in lines) == pytest.approx(found["compute_s"])
    assert lines[0]["line"].startswith("test_profile.py:") and lines[0]["planned_s"] > 0
    planned = sum(row["planned_s"] for row in lines)
    assert 0.5 < planned / found["planned_compute_s"] < 1.001  # without the start of the step
    assert cli.main(["profile", str(traced)]) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("jit_fit: 3 steps on 8 devices\nthe plan: for cpu:8\n")
        and "times the plan" in out
    )
    assert "all_gather" in out and max(map(len, out.splitlines())) <= 100


def test_what_is_missing_is_named(
    traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert cli.main(["profile", *words]) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1, err
        return err

    assert "no trace (*.xplane.pb)" in said(str(tmp_path))
    (trace,) = traced.rglob("*.xplane.pb")
    (tmp_path / "t.xplane.pb").write_bytes(trace.read_bytes())
    assert "no plan.json: give it by --plan" in said(str(tmp_path))
    plan = str(traced / "profile" / "plan.json")
    assert "no program.txt: give it by --program" in said(str(tmp_path), "--plan", plan)
    other = tmp_path / "other.txt"
    other.write_text(HLO)
    words = [str(tmp_path), "--plan", plan, "--program", str(other)]
    assert "the trace has no run of jit_step; it has " in said(*words)
    layer = {"up": jnp.ones((2 * WIDTH, WIDTH)), "down": jnp.ones((WIDTH, 2 * WIDTH))}
    args = [layer] * 2, {"x": jnp.ones((256, 2 * WIDTH))}
    for cluster, reason in (
        ("cpu:4", "it is for 4 devices (cpu:4), jit_fit was compiled for 8"),
        ("cpu:8", "of the 5 arguments of jit_fit 5 have shapes on a device that no argument"),
    ):
        make_plan(fit, *args, cluster=cluster, zero=3).save(tmp_path / "another.json")
        err = said(str(traced), "--plan", str(tmp_path / "another.json"))
        assert "the plan is not of this program" in err and reason in err
    other.write_text("no program")
    assert "other.txt: not the text of an HLO module" in said(*words)
    (tmp_path / "t.xplane.pb").write_bytes(b"no trace at all")
    assert cli.main(["profile", *words]) == 2
