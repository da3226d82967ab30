"""The command: exit codes, messages, ways to name a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from planner import load_plan
from planner.cli.main import main
from planner.frontend.failure import failure_text
from planner.frontend.loading import module_names, parse_target
from planner.modes import get_parallel_mode, set_parallel_mode

ROOT = Path(__file__).resolve().parents[2]
Writer = Callable[[str], str]

STEP = """
import jax, jax.numpy as jnp
print("noise from the model")
def train_step(w, x):
    g = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))(w)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), jnp.mean(x)
"""
ARGS = """
def example_args():
    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    return {"a": f(16, 32), "b": f(32, 16)}, f(64, 16)
"""
SCRIPT = STEP.replace(
    "def train_step", "from executor import parallelize\n@parallelize(%s)\ndef step"
)
CALL = """
if __name__ == "__main__":
    import sys
    assert sys.argv[1:] == [] and sys.argv[0].endswith(".py")
    step({"a": jnp.ones((16, 32)), "b": jnp.ones((32, 16))}, jnp.ones((64, 16)))
    raise SystemExit("ran past the first call")
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    known, mode = set(sys.modules), get_parallel_mode()
    yield
    set_parallel_mode(mode.mode, search=mode.search)
    for name in set(sys.modules) - known:
        if name.startswith("user_"):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    def write(text: str) -> str:
        path = tmp_path / "user_model.py"
        path.write_text(text)
        return str(path)

    return write


def inspect(*arguments: str) -> int:
    return main(["inspect", *arguments])


def test_function_with_json(write: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(write(STEP + ARGS) + ":train_step", "--mesh", "data=4,model=2", "--json") == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert plan["mesh"] == {"data": 4, "model": 2}
    assert plan["cluster"] == "cpu:8"
    assert "noise from the model" in err


def test_text_on_a_named_cluster_and_mode(
    write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(STEP + ARGS)
    assert inspect(path, "--cluster", "h100:4", "--mode", "data_parallel", "--no-color") == 0
    out = capsys.readouterr().out
    assert out.startswith("plan: DATA_PARALLEL on h100:4\n")
    assert "data=4 (4 devices)" in out
    assert "noise" not in out


def test_what_comes_next_is_the_end(
    tmp_path: Path, write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    path, saved = write(STEP + ARGS), tmp_path / "p.json"

    def words(*options: str) -> str:
        assert inspect(path, "--cluster", "h100:2", *options) == 0
        return "".join(capsys.readouterr().out.partition("\nnext\n")[2].split())

    first = words()
    assert first.startswith("keepit--saveplan.jsonrunitmw.compile_plan(step,")
    assert "checkit--confirmgpu:" in first and "checkit--confirmtpu:" in words("--cluster", "v5e:4")
    assert first.endswith(f"plannercompare{path}--clusterh100:2")
    assert words("--save", str(saved)).startswith(
        f'runitmw.compile_plan(step,mw.load_plan("{saved}"))'
    )
    assert words("--json") == ""


def test_save_round_trips(
    write: Writer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    assert inspect(write(STEP + ARGS), "--mesh", "data=8", "--json", "--save", str(saved)) == 0
    assert load_plan(saved).to_json() == capsys.readouterr().out
    assert load_plan(saved).to_json(folded=True) == saved.read_text()


def test_script_is_run_up_to_its_first_parallelized_call(
    write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(SCRIPT % "cluster='cpu:4', mesh='data=2,model=2'" + CALL)
    assert inspect(script, "--json") == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert (plan["cluster"], plan["mesh"]) == ("cpu:4", {"data": 2, "model": 2})
    assert "noise from the model" in err


def test_command_line_wins_over_the_script(
    write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(SCRIPT % "cluster='cpu:4', mesh='data=2,model=2', donate_argnums=0" + CALL)
    assert inspect(script, "--json", "--cluster", "cpu:2", "--mesh", "data=2") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["cluster"], plan["mesh"]) == ("cpu:2", {"data": 2})


def test_script_mode_is_kept(write: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(
        "from planner import set_parallel_mode\nset_parallel_mode('DATA_PARALLEL')\n"
        + SCRIPT % ""
        + CALL
    )
    assert inspect(script, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["mode"], plan["cluster"]) == ("DATA_PARALLEL", "cpu:8")


def test_parallelized_function_by_name(write: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(SCRIPT % "cluster='cpu:2'" + ARGS)
    assert inspect(path + ":step", "--json", "--mesh", "data=2") == 0
    assert json.loads(capsys.readouterr().out)["cluster"] == "cpu:2"


NNX = """
import jax, jax.numpy as jnp
from flax import nnx
class Model(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
    def __call__(self, x):
        return self.last(self.drop(self.norm(self.first(x))))
"""
LINEN = """
import jax, jax.numpy as jnp
from flax import linen as nn
class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(32)(x))
        return nn.Dense(8)(nn.Dropout(0.1, deterministic=not train)(x))
"""
X = "jax.ShapeDtypeStruct((64, 16), jnp.float32)"


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        (
            f"{NNX}def make_model(): return Model(nnx.Rngs(0))\ndef example_inputs(): return {X}",
            "[0]['params']['first']['kernel'].value",
        ),
        (
            f"{NNX}model = Model(nnx.Rngs(0))\ndef example_inputs(): return ({X},)",
            "[0]['params']['first']['kernel'].value",
        ),
        (
            f"{LINEN}model = Model()\ndef example_inputs(): return {X}, True",
            "[0]['params']['Dense_0']['kernel']",
        ),
        (
            f"{LINEN}def make_model(): return Model()\ndef example_inputs(): return {X}, True\n"
            "def loss(outputs, inputs): return jnp.mean(outputs) + jnp.mean(inputs[0])",
            "[0]['params']['Dense_0']['kernel']",
        ),
    ],
    ids=["nnx-make", "nnx", "linen", "linen-make-loss"],
)
def test_model_only(
    write: Writer, text: str, kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(write(text), "--mesh", "data=4,model=2", "--json") == 0
    inputs = {i["path"]: i for i in json.loads(capsys.readouterr().out)["inputs"]}
    assert inputs[kernel]["shape"] == [16, 32]
    assert all(i["tied"] for path, i in inputs.items() if path.startswith("[0]"))
    assert any(".mu" in path for path in inputs)


REFUSED = {
    "no such file": (None, [], "no such file"),
    "no such function": (STEP + ARGS, [":nope"], "has no function 'nope'; it has .*train_step"),
    "not a function": (STEP + ARGS + "number = 1\n", [":number"], "is a int, not a function"),
    "no example_args": (STEP, [":train_step"], r"has no example_args\(\)"),
    "bad example_args": (STEP + "def example_args(): return 1", [], "must return the tuple"),
    "never called": ("x = 1\n", [], "never called a parallelized function; name one: .*:function"),
    "clean exit": ("raise SystemExit(0)\n", [], "never called a parallelized function"),
    "not a model": ("model = 1\ndef example_inputs(): return ()", [], "model is a int; expected"),
    "no float output": (
        f"{NNX}class Whole(Model):\n    def __call__(self, x): return x.astype(int)\n"
        f"def make_model(): return Whole(nnx.Rngs(0))\ndef example_inputs(): return {X}",
        [],
        "no float outputs",
    ),
    "mesh": (STEP + ARGS, ["", "--mesh", "data=3"], "needs 3 devices, cluster cpu:8 has 8"),
    "mesh form": (STEP + ARGS, ["", "--mesh", "4x2"], "expected name=size"),
    "cluster": (STEP + ARGS, ["", "--cluster", "abacus:3"], "abacus"),
    "search": (STEP + ARGS, ["", "--search", "guess"], "unknown search 'guess'"),
    "memory": (
        STEP + ARGS,
        ["", "--memory", "1kB", "--mesh", "data=8"],
        "the lowest peak tried is",
    ),
    "memory form": (STEP + ARGS, ["", "--memory", "lots"], "lots"),
    "mode": (STEP + ARGS, ["", "--mode", "PSYCHIC"], "invalid choice: 'PSYCHIC'"),
    "time limit": (STEP + ARGS, ["", "--time-limit", "-1"], "--time-limit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(
    case: str, write: Writer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    text, extra, message = REFUSED[case]
    path = "absent.py" if text is None else write(text)
    saved = tmp_path / "plan.json"
    suffix, *options = extra or [""]
    assert inspect(path + suffix, "--json", "--save", str(saved), *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err)
    assert list(tmp_path.glob("plan*")) == []


def test_save_into_no_directory(
    write: Writer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(STEP + ARGS)
    assert inspect(path, "--save", str(tmp_path / "no" / "plan.json")) == 2
    assert "its directory does not exist" in capsys.readouterr().err


BAD_STEP = STEP.replace('@ w["b"]', '@ w["b"] @ jnp.ones((3, 3))')
FAILED = {
    "trace": (BAD_STEP + ARGS, "TypeError: dot_general requires", "in train_step"),
    "script": ("def run():\n    return {}['missing']\nrun()\n", "KeyError: 'missing'", "in run"),
    "exit": ("raise SystemExit('no data')\n", "SystemExit: no data", "in <module>"),
    "import": ("import no_such_module_here\n" + STEP + ARGS, "ModuleNotFoundError:", "in <module>"),
    "syntax": ("def (:\n", "SyntaxError:", "user_model.py"),
    "example_args": (
        STEP + "def example_args():\n    return 1 / 0\n",
        "ZeroDivisionError:",
        "in example_args",
    ),
    "model": (f"{LINEN}model = Model()\ndef example_inputs(): return {X}", "TypeError:", ""),
}


@pytest.mark.parametrize("case", FAILED)
def test_failed_model_shows_the_users_frames_only(
    case: str, write: Writer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, last, frame = FAILED[case]
    saved = tmp_path / "plan.json"
    assert inspect(write(text), "--json", "--save", str(saved)) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(last)
    assert frame in err
    files = [line for line in err.splitlines() if line.lstrip().startswith('File "')]
    assert all("user_model.py" in line for line in files)
    assert "internal frames" not in err
    assert list(tmp_path.glob("plan*")) == []


def test_failure_keeps_the_users_chain() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError as error:
        text = failure_text(error)
    assert text.index("KeyError: 'first'") < text.index("direct cause") < text.index("ValueError")
    assert text.endswith("ValueError: second")


def test_version_help_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("planner ")
    assert main(["--help"]) == 0
    assert "planner inspect model.py:train_step" in capsys.readouterr().out
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().err


def test_module_names_without_running(tmp_path: Path) -> None:
    path = tmp_path / "user_names.py"
    path.write_text(
        "import a.b as c, d.e\nx, (y, z) = 1\nif t:\n    w: int = 2\n"
        "if __name__ == '__main__':\n    hidden = 1\ndef f():\n    inner = 1\n"
    )
    assert module_names(path) == {"c", "d", "x", "y", "z", "w", "f"}


def test_target_of_a_directory(tmp_path: Path) -> None:
    from planner.errors import RequestError

    with pytest.raises(RequestError, match="is a directory, not a Python file"):
        parse_target(str(tmp_path))


@pytest.mark.long
def test_example_starts_no_backend(tmp_path: Path) -> None:
    """With a platform that does not exist, starting a backend would fail."""
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "planner.cli",
            "inspect",
            str(ROOT / "examples" / "gpt.py"),
            "--cluster",
            "h100:8x4",
            "--mode",
            "DATA_PARALLEL",
            "--json",
        ],
        env={**os.environ, "JAX_PLATFORMS": "nonesuch", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["cluster"] == "h100:8x4"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_scripts_know_the_commands(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    assert "inspect" in script and "--cluster" in script


# ---- what is checked first, and what the script gets ---------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--cluster", "nosuch:8"], "unknown device 'nosuch'"),
        (["--cluster", "h100:8", "--mesh", "data=3"], "needs 3 devices"),
        (["--mesh", "data=x"], "expected name=size"),
        (["--search", "best"], "unknown search 'best'"),
        (["--memory", "much"], "cannot read size 'much'"),
    ],
)
@pytest.mark.parametrize(
    "command", ["inspect", "explain", "compare", "verify", "debug", "placement"]
)
def test_the_command_line_is_checked_before_the_script_runs(
    command: str, flags: list[str], told: str, write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    from executor.cli.main import main

    path = write("raise SystemExit('the script ran')")
    words = {"explain": ["explain", path, "x"], "placement": ["inspect", path, "--placement=auto"]}
    words["debug"] = ["debug", path, "--stage=plan"]
    assert main([*words.get(command, [command, path]), *flags]) == 2
    said = capsys.readouterr().err
    assert told in said and "the script ran" not in said


@pytest.mark.long
@pytest.mark.parametrize("command", ["inspect", "explain", "compare", "verify", "debug"])
def test_words_after_two_dashes_are_the_scripts(
    command: str, write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    from executor.cli.main import main

    path = write(STEP + ARGS + "import sys; print('got', sys.argv[1:], len(sys.argv[0]) > 3)")
    what = {"explain": ["x"], "debug": ["--stage=groups"]}.get(command, [])
    before = list(sys.argv)
    code = main([command, path, *what, "--mesh", "data=8", "--", "--layers", "3", "--json", "--"])
    assert sys.argv == before
    captured = capsys.readouterr()
    assert "got ['--layers', '3', '--json', '--'] True" in captured.err + captured.out
    assert code == (2 if command == "explain" else 0)  # nothing in the step is called x


def test_two_dashes_stay_with_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--", "none.json"]) == 2
    assert "cannot read none.json" in capsys.readouterr().err


MESHED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(-1, 4), ("data", "model"))
center = jax.shard_map(
    lambda x: x - jax.lax.pmean(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data")
)


def train_step(w, x):
    return center(jnp.tanh(x @ w)) @ w


def example_args():
    return (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
"""


@pytest.mark.long
def test_a_model_sees_as_many_devices_as_the_cluster_has(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(MESHED)
    command = "from executor.cli.main import main; import sys; sys.exit(main())"
    words = ["inspect", f"{file}:train_step", "--cluster", "v5p:4x4x2", "--json"]
    plain = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-c", command, *words],
        env={**plain, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["mesh"] == {"data": 8, "model": 4}
