"""Options from a file and from the environment; what is said of them, and what is refused."""

import json
from pathlib import Path

import pytest

from planner.cli import main as cli
from planner.cli.table import EXECUTOR

MODEL = """import jax, jax.numpy as jnp
def train_step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
def example_args():
    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    return f(1024, 1024), f(8192, 1024)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user_config.py").write_text(MODEL)
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for name in ("CLUSTER", "MESH", "ZERO", "TIME_LIMIT"):
        monkeypatch.delenv(f"MESHWRIGHT_{name}", raising=False)
    return tmp_path


def run(*words: str) -> int:
    return cli.main(list(words), EXECUTOR)


INSPECT = ("inspect", "../user_config.py")


def test_a_file_above_is_read_and_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "meshwright.toml"
    path.write_text('cluster = "h100:8"\ntime-limit = 5\n[inspect]\nmesh = "data=8"\nzero = 3\n')
    assert run(*INSPECT) == 0
    said = capsys.readouterr()
    assert "on h100:8" in said.out and "FSDP over 8" in said.out
    assert said.err == f"planner: from {path}: cluster, time-limit, mesh, zero\n"
    assert run(*INSPECT, "--cluster", "v5e:4", "--mesh", "data=4") == 0
    said = capsys.readouterr()
    assert "on v5e:2x2" in said.out and "zero" in said.err
    assert run("compare", "../user_config.py", "--cluster", "cpu:2", "--cluster", "cpu:4") == 0
    out = capsys.readouterr().out
    assert "cpu:2" in out and "h100" not in out


def test_the_environment_wins_over_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "meshwright.toml").write_text('cluster = "h100:8"\n')
    monkeypatch.setenv("MESHWRIGHT_CLUSTER", "a100:4")
    monkeypatch.setenv("MESHWRIGHT_TIME_LIMIT", "7")
    assert run(*INSPECT) == 0
    assert "on a100:4" in capsys.readouterr().out
    assert run("--show-config", *INSPECT, "--zero", "1") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["cluster"].split(maxsplit=1) == ["a100:4", "MESHWRIGHT_CLUSTER"]
    assert rows["time-limit"].split() == ["7.0", "MESHWRIGHT_TIME_LIMIT"]
    assert rows["zero"].split(maxsplit=1) == ["1", "command line"]
    assert rows["mesh"].split() == ["-", "default"] and rows["json"].split() == ["false", "default"]


def test_any_option_may_come_from_the_environment_and_unread_variables_are_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "meshwright.toml").write_text('cluster = "h100:8"\nzero = 3\n')
    monkeypatch.setenv("MESHWRIGHT_JSON", "true")
    monkeypatch.setenv("MESHWRIGHT_ZERO", "1")
    monkeypatch.setenv("MESHWRIGHT_CLUSTER", "")
    monkeypatch.setenv("MESHWRIGHT_CLUSTR", "a100:4")
    monkeypatch.setenv("MESHWRIGHT_PROCESSES", "3")
    monkeypatch.setenv("MESHWRIGHT_TRAIN_STEPS", "3")
    assert run(*INSPECT) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["cluster"] == "h100:8"
    lines = said.err.splitlines()
    assert f"planner: from {home / 'meshwright.toml'}: cluster" in lines
    assert "planner: from MESHWRIGHT_ZERO: zero" in lines
    hint = "did you mean MESHWRIGHT_CLUSTER?"
    assert f"planner: MESHWRIGHT_CLUSTR is set, and nothing reads it; {hint}" in lines
    assert not [line for line in lines if "PROCESSES" in line or "TRAIN" in line]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["inspect", "m.py", "--mode", "fdsp"], "did you mean fsdp?"),
        (["inspect", "m.py", "--mode", "zero3"], "did you mean fsdp?"),
        (["inspect", "m.py", "--mode", "auto"], "did you mean AUTO_PARALLEL?"),
        (["inspect", "m.py", "--clutser", "h100:8"], "did you mean --cluster?"),
        (["inspct", "m.py"], "did you mean inspect?"),
    ],
)
def test_a_wrong_word_has_the_nearest_one(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2 and err[0].endswith(hint) and err[1].startswith("see planner")


def test_a_table_of_the_project(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[project]\nname = "x"\n[tool.meshwright]\ncluster = "h100:4"\nnever-fsdp = ["a", "b"]\n'
    (home / "pyproject.toml").write_text(text)
    assert run("--show-config", *INSPECT) == 0
    out = capsys.readouterr().out
    assert "h100:4" in out and "a, b" in out
    (home / "inner" / "pyproject.toml").write_text("[project]\n")  # says nothing, so look above
    assert run("--show-config", *INSPECT) == 0
    assert "h100:4" in capsys.readouterr().out


def test_options_of_other_subcommands_are_no_fault(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "tolerance-memory = 0.1\n[verify]\ntolerance-time = 3\n"
    (home / "meshwright.toml").write_text(text)
    assert run("--show-config", *INSPECT) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[inspect]\nmemry = 1", "[inspect] has no option 'memry'; did you mean memory?"),
        ("clustre = 1", "no subcommand has an option 'clustre'; did you mean cluster?"),
        ("[inspct]\nzero = 1", "[inspct] is no subcommand; did you mean inspect?"),
        ("inspect = 3", "inspect: expected a table of options, got 3"),
        ("zero = 'x'", "--zero: 'x': "),
        ("mode = 'MAGIC'", "--mode: got 'MAGIC', expected one of STAND_ALONE"),
        ("cluster = ['a', 'b']", "--cluster: expected one value"),
        ("cluster = true", "--cluster: expected a text or a number, got True"),
        ("[inspect]\njson = 'maybe'", "--json: expected true or false, got 'maybe'"),
        ("cluster = ", "meshwright.toml: Invalid value"),
    ],
)
def test_what_is_refused(
    text: str, said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "meshwright.toml").write_text(text)
    assert run(*INSPECT) == 2
    err = capsys.readouterr().err
    assert err.startswith("planner: error: ") and said in err and "meshwright.toml" in err
