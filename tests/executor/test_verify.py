"""``planner verify``: predictions beside findings, tolerances, exit codes."""

import dataclasses
import json
import sys
from importlib import metadata
from pathlib import Path

import jax
import pytest

from executor.cli.main import main
from executor.verify import aot
from executor.verify.compiled import carried_argnums
from executor.verify.predictions import (
    Row,
    Tolerances,
    communication_rows,
    planned_wire,
    shardy_rung,
)
from planner import load_plan
from planner.cli.main import main as planner_main
from planner.plan.compiled.lowering import STEP_BY_STEP

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("optimized")]

MODEL = """
import jax, jax.numpy as jnp
def train_step(w, x):
    g = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))(w)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), jnp.mean(x)
def example_args():
    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    return {"a": f(64, 32), "b": f(32, 16)}, f(512, 64)
"""


@pytest.fixture
def model(tmp_path: Path):  # type: ignore[no-untyped-def]
    known = set(sys.modules)
    path = tmp_path / "user_verified.py"
    path.write_text(MODEL)
    yield str(path)
    for name in set(sys.modules) - known:
        if name.startswith("user_"):
            del sys.modules[name]


def test_row_difference_and_tolerance() -> None:
    assert Row("wire bytes", "bytes", 100, 120, 0.2).passed
    assert not Row("wire bytes", "bytes", 100, 121, 0.2).passed
    assert not Row("wire bytes", "bytes", 100, 79, 0.2).passed
    assert Row("wire bytes", "bytes", 100, 1000).passed  # not judged
    assert not Row("wire bytes", "bytes", 0, 1, 5.0).passed
    assert Row("wire bytes", "bytes", 0, 0, 0.0).passed


def test_verify_on_cpu_devices(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    options = ["--cluster", "cpu:8", "--mesh", "data=8", "--mode", "DATA_PARALLEL"]
    assert planner_main(["inspect", model, *options, "--save", str(file)]) == 0
    capsys.readouterr()
    plan = load_plan(file)
    assert carried_argnums(plan) == (0,)
    assert shardy_rung(plan, [], Tolerances()).notes == ()
    staged = dataclasses.replace(plan, lowering=STEP_BY_STEP)
    assert "staged scattered" in shardy_rung(staged, [], Tolerances()).notes[0]
    tolerances = ["--tolerance-communication", "0.01", "--tolerance-memory", "100"]
    assert main(["verify", model, "--plan", str(file), *tolerances, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["passed"] and out["mesh"] == "data=8" and out["plan"] == plan.digest
    (rung,) = [r for r in out["rungs"] if r["name"] == "compiled"]
    rows = {row["quantity"]: row for row in rung["rows"]}
    # gradients of a and b, and the mean of x, are summed over eight devices
    sent = (64 * 32 + 32 * 16 + 1) * 4 * 2 * 7 / 8
    assert rows["wire bytes"]["found"] == sent
    assert rows["all_reduce"]["predicted"] == sent == planned_wire(plan)["all_reduce"][1]
    assert rows["peak memory"]["found"] > 0


def test_a_passed_tolerance_is_exit_code_1(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", model, "--cluster", "cpu:8", "--tolerance-memory", "0"]) == 1
    out = capsys.readouterr().out
    assert "NOT within tolerance: peak memory" in out
    assert main(["verify", model, "--cluster", "cpu:8"]) == 0
    assert "nothing was judged" in capsys.readouterr().out


def test_absent_compiler(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(aot.metadata, "version", version)
    verify = ["verify", model, "--cluster", "v5p:2x2x2", "--mode", "DATA_PARALLEL"]
    assert main(verify) == 0
    extra = "meshwright[aot-tpu]" if jax.__version__ == "0.10.2" else "libtpu=="
    assert f"pip install '{extra}" in capsys.readouterr().out
    assert main([*verify, "--require-compiled"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"pip install '{extra}" in captured.err
    monkeypatch.setattr(jax, "__version__", "0.99.0")
    assert main([*verify, "--require-compiled"]) == 2
    assert "aot-tpu" not in capsys.readouterr().err


def test_refusals(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    options = ["--cluster", "cpu:8", "--mode", "DATA_PARALLEL"]
    assert planner_main(["inspect", model, *options, "--save", str(file)]) == 0
    assert main(["verify", model, "--plan", str(file), "--mesh", "data=8"]) == 2
    assert "--mesh is for making a plan" in capsys.readouterr().err
    assert main(["verify", model, "--plan", str(file), "--cluster", "cpu:4"]) == 2
    assert "the plan is for 8 devices, cpu:4 has 4" in capsys.readouterr().err
    assert main(["verify", model, "--tolerance-memory", "-1"]) == 2
    assert main(["verify", "nothing.py"]) == 2


def test_failing_model_is_exit_code_3(tmp_path: Path) -> None:
    path = tmp_path / "user_broken.py"
    path.write_text(
        "def train_step(x):\n    return x + nope\ndef example_args():\n    return (1.0,)"
    )
    assert main(["verify", str(path)]) == 3


def test_commands_of_both_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in ("inspect", "search", "verify"))
    assert planner_main(["verify", "model.py"]) == 2  # not without the executor


def test_kinds_on_either_side_are_shown() -> None:
    plan = type("Plan", (), {})()
    plan.mesh = type("Mesh", (), {"names": ("data",), "sizes": (8,)})()
    row = type("Row", (), {})()
    row.kind, row.count, row.payload_bytes, row.axes = "all_gather", 2.0, 800.0, ("data",)
    plan.collectives = (row,)
    rows = communication_rows(plan, {"permute": (14.0, 1400.0)}, 0.0)
    assert [(r.quantity.strip(), r.predicted, r.found) for r in rows] == [
        ("wire bytes", 1400.0, 1400.0),
        ("all_gather", 1400.0, 0),
        ("permute", 0, 1400.0),
    ]
    assert [r.passed for r in rows] == [True, True, True]
