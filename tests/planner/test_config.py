"""Options from a file and from the environment; what is said of them, and what is refused."""

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
