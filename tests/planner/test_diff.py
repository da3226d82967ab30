"""Plans in review: what makes no difference, what is said of one, and the commands."""

import dataclasses
import json
import os
import stat
from pathlib import Path

import pytest

from planner.cli import main as cli
from planner.compare.difference import difference
from planner.plan.canonical import without_place
from planner.plan.plan import Plan, load_plan

MODEL = """import jax, jax.numpy as jnp
def train_step(w, x):
    g = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))(w)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), jnp.mean(x)
def example_args():
    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    return {"a": f(1024, 4096), "b": f(4096, 1024)}, f(8192, 1024)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "user_diff.py"
    path.write_text(MODEL)
    return path


def saved(model: Path, name: str, *words: str) -> Path:
    path = model.with_name(name)
    assert cli.main(["inspect", str(model), *words, "--save", str(path)]) == 0
    return path


REFORMATTED = {
    "a comment": ("def train_step", "\n\n# a comment\ndef train_step"),
    "a split line": ("jnp.mean((jnp.tanh(x", "jnp.mean((jnp.tanh(\n        x"),
    "another name of the function": ("train_step", "step_to_train"),
}


@pytest.mark.parametrize("name", REFORMATTED)
def test_another_layout_of_the_code_makes_no_difference(
    model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = ("--mesh", "data=4,model=2")
    old = saved(model, "old.json", *words)
    renamed = model.with_name("user_renamed.py")
    renamed.write_text(MODEL.replace(*REFORMATTED[name]))
    function = "step_to_train" if "function" in name else "train_step"
    new = renamed.with_name("new.json")
    assert cli.main(["inspect", f"{renamed}:{function}", *words, "--save", str(new)]) == 0
    a, b = load_plan(old), load_plan(new)
    assert a.digest != b.digest and a.canonical_digest == b.canonical_digest
    capsys.readouterr()
    assert cli.main(["diff", str(old), str(new), "--exit-code"]) == 0
    assert "the same plan, except for source lines" in capsys.readouterr().out
    assert cli.main(["check", str(old), f"{renamed}:{function}", *words]) == 0


def test_another_mesh_does(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = saved(model, "old.json", "--mesh", "data=8")
    new = saved(model, "new.json", "--mesh", "data=4,model=2")
    capsys.readouterr()
    assert cli.main(["diff", str(old), str(new)]) == 0
    assert cli.main(["diff", str(old), str(new), "--exit-code"]) == 1
    assert "data=8 -> data=4,model=2" in capsys.readouterr().out
    assert cli.main(["diff", str(old), str(new), "--exit-code", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["same"] and found["same_step"]
    assert cli.main(["check", str(old), str(model), "--mesh", "data=4,model=2", "--markdown"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("### Plan: `old.json` to `the step as it is now`")
    assert "| mesh | data=8 to data=4,model=2 |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


def test_another_model_does(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = saved(model, "old.json", "--mesh", "data=8")
    model.write_text(MODEL.replace("0.1 * d", "0.1 * d * d"))
    assert cli.main(["check", str(old), str(model), "--mesh", "data=8"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "different steps or shapes: " in said and " -> " in said.partition("shapes: ")[2][:200]


def changed(plan: Plan) -> dict[str, Plan]:
    leaf = plan.inputs[0]
    row = plan.collectives[0]
    figures = dataclasses.replace(plan.prediction, peak_bytes=plan.prediction.peak_bytes + 1)
    return {
        "a sharding": dataclasses.replace(
            plan, inputs=(dataclasses.replace(leaf, memory="pinned_host"), *plan.inputs[1:])
        ),
        "a constraint": dataclasses.replace(plan, constraints=plan.constraints[1:]),
        "a collective": dataclasses.replace(
            plan,
            collectives=(
                dataclasses.replace(row, payload_bytes=row.payload_bytes + 4),
                *plan.collectives[1:],
            ),
        ),
        "memory": dataclasses.replace(plan, prediction=figures),
        "a recipe": dataclasses.replace(plan, microbatches=2),
    }


def test_everything_that_runs_is_reviewed(model: Path) -> None:
    plan = load_plan(saved(model, "plan.json", "--mesh", "data=4,model=2"))
    assert plan.collectives
    for what, other in changed(plan).items():
        assert other.canonical_digest != plan.canonical_digest, what
        assert not difference(plan, other).same, what
    for other in (
        dataclasses.replace(plan, notes=("something",)),
        dataclasses.replace(plan, collectives=plan.collectives[::-1]),
        dataclasses.replace(plan, planning_s=9.0),
    ):
        assert other.canonical_digest == plan.canonical_digest and difference(plan, other).same


def test_moved_lines_hide_no_change_and_are_none(model: Path) -> None:
    plan = load_plan(saved(model, "plan.json", "--mesh", "data=4,model=2"))
    assert plan.collectives

    def moved(count: float) -> Plan:
        rows = [
            dataclasses.replace(r, source="user_diff.py:99", count=r.count * count)
            for r in plan.collectives
        ]
        return dataclasses.replace(plan, collectives=tuple(rows))

    assert difference(plan, moved(1)).exchanges == ()
    found = difference(plan, moved(2)).exchanges
    assert found and all(e.count[1] == 2 * e.count[0] for e in found)


def test_places_are_left_out_of_texts() -> None:
    assert without_place("dot (model.py:12) at my_file.py:3:4") == "dot (.py) at .py:4"
    assert without_place("f32[3:4] py:5 8:30") == "f32[3:4] py:5 8:30"


def test_what_else_differs_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = load_plan(saved(model, "plan.json", "--mesh", "data=4,model=2"))
    other = dataclasses.replace(plan, constraints=plan.constraints[1:])
    found = difference(plan, other)
    assert not found.same and found.fields == ("constraints",)
    other.save(model.with_name("other.json"))
    capsys.readouterr()
    words = ["diff", str(model.with_name("plan.json")), str(model.with_name("other.json"))]
    assert cli.main([*words, "--exit-code"]) == 1
    assert "other fields that differ\n  constraints" in capsys.readouterr().out
    assert cli.main([*words, "--markdown"]) == 0
    assert "Other fields that differ: `constraints`" in capsys.readouterr().out


def test_a_saved_plan_has_the_permissions_of_any_file(model: Path) -> None:
    before = os.umask(0o022)
    try:
        path = saved(model, "plan.json", "--mesh", "data=8")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.chmod(0o600)
    link = path.with_name("link.json")
    link.symlink_to(path)
    text = path.read_text()
    path.write_text("")
    load = saved(model, "link.json", "--mesh", "data=8")
    assert load.is_symlink() and path.read_text() == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_comparison_of_files_takes_no_cluster(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(saved(model, "plan.json", "--mesh", "data=8"))
    capsys.readouterr()
    assert cli.main(["compare", "--plan", plan, plan, "--cluster", "h100:8"]) == 2
    assert "--cluster, --batch" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["diff", "a.json"], ["check", "a.json"]])
def test_bad_requests(words: list[str], model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, str(model.with_name("none.json"))]) == 2
    assert capsys.readouterr().err.startswith("planner: error: cannot read plan a.json")
