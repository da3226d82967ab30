"""What a run says of its speed, to whom, and options of ``train`` from a file."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import planner_command
from executor import parallelize, train, train_options
from executor.train import metrics as metrics_module
from executor.train import writers
from planner.errors import RequestError

pytestmark = pytest.mark.devices
BATCH = {"x": jnp.ones((64, 32)), "y": jnp.ones((64, 16))}


def fit(state: Any, batch: Any) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.1 * grads}, {"loss": value}


def fresh() -> Any:
    return {"w": jnp.zeros((32, 16))}


def run(on_metrics: Any, steps: int = 8, **more: Any) -> Any:
    step = parallelize(fit, mesh="data=8", cluster="cpu:8")
    options: dict[str, Any] = {"log_every": 2, "progress": False, "on_metrics": on_metrics, **more}
    return train(step, fresh(), [BATCH] * steps, steps=steps, **options)


def test_tensorboard_files_have_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    run(writers.tensorboard(tmp_path))
    (file,) = tmp_path.glob("events.*")
    raw = file.read_bytes()
    for name in (b"loss", b"speed/steps_per_s", b"speed/examples_per_s"):
        assert name in raw


def test_wandb_logs_every_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[int, Mapping[str, float]]] = []
    settings: list[Any] = []

    class Run:
        def log(self, data: Mapping[str, float], step: int) -> None:
            logged.append((step, data))

    def init(**given: Any) -> Run:
        settings.append(given)
        return Run()

    fake = types.SimpleNamespace(init=init)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    run(writers.wandb(project="p"), evaluate=lambda s: {"norm": 1.0}, evaluate_every=4)
    assert settings == [{"project": "p"}]
    assert [step for step, m in logged if "loss" in m] == [2, 4, 6, 8]
    assert [step for step, m in logged if "eval/norm" in m] == [4, 8]
    assert all(m["speed/examples_per_s"] > 0 for _, m in logged if "loss" in m)
    own = Run()
    writers.wandb(own)(9, {"loss": 1.0})
    assert logged[-1] == (9, {"loss": 1.0}) and len(settings) == 1
    with pytest.raises(RequestError, match="got a run and project"):
        writers.wandb(own, project="p")


def test_clu_and_several_at_once() -> None:
    class Writer:
        def __init__(self) -> None:
            self.found: dict[int, Mapping[str, float]] = {}

        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
            self.found[step] = scalars

    told: list[int] = []
    writer = Writer()
    done = run([writers.clu(writer), lambda step, m: told.append(step)])
    assert list(writer.found) == told == [2, 4, 6, 8]
    assert writer.found[8]["loss"] == pytest.approx(done.metrics["loss"])
    with pytest.raises(RequestError, match="clu: got list, expected a writer"):
        writers.clu([])


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(RequestError, match=r"tensorboardX is not installed: pip install .*board\]"):
        writers.tensorboard(tmp_path)


def test_the_other_processes_write_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    for write in (writers.tensorboard(tmp_path / "t"), writers.wandb()):
        write(1, {"loss": 1.0})
    assert not (tmp_path / "t").exists()


def test_a_run_ends_with_its_step_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first interval, in which the step is compiled, does not count."""
    times = iter([0.0, 100.0, 101.0, 103.0, 107.0])
    clock = types.SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(metrics_module, "time", clock)
    monkeypatch.setattr(metrics_module, "peak_memory", lambda: 3e9)
    done = run(None, progress=True)
    speed = done.speed
    assert (speed["step_s/median"], speed["step_s/max"]) == (1.0, 2.0)
    assert speed["step_s/p90"] == pytest.approx(1.8)
    assert speed["memory/peak_bytes"] == 3e9 and 0 < speed["memory/planned_bytes"] < 3e9
    out = capsys.readouterr().out
    assert "step time 1.00 s median, 1.80 s 90th percentile, 2.00 s at most (planned " in out
    assert "memory 3.00 GB (planned " in out
    monkeypatch.undo()
    assert run(None, steps=2).speed == {}


def test_options_of_train_from_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    own = "steps = 6\nlog-every = 3\nprogress = false\nprofile = [2, 3]\n"
    (tmp_path / "meshwright.toml").write_text(f'cluster = "h100:8"\n[train]\n{own}')
    assert train_options(inner) == {
        "steps": 6,
        "log_every": 3,
        "progress": False,
        "profile": (2, 3),
    }
    monkeypatch.setenv("MESHWRIGHT_TRAIN_STEPS", "4")
    monkeypatch.setenv("MESHWRIGHT_TRAIN_PROGRESS", "true")
    found = train_options(inner)
    assert (found["steps"], found["progress"]) == (4, True)
    found.pop("profile")
    step = parallelize(fit, mesh="data=8", cluster="cpu:8")
    assert train(step, fresh(), [BATCH] * 6, **found).step == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stpes = 3", "has no option 'stpes'; did you mean steps?"),
        ('steps = "3"', "steps: expected a whole number, got '3'"),
        ("steps = true", "steps: expected a whole number, got True"),
        ("profile = 3", "profile: expected two numbers of steps, got 3"),
    ],
)
def test_bad_options_of_train(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "meshwright.toml").write_text(f"[train]\n{text}\n")
    with pytest.raises(RequestError, match=said.replace("?", r"\?")):
        train_options(tmp_path)


def test_tables_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    (tmp_path / "meshwright.toml").write_text("[inspect]\nzero = 3\n[trian]\nsteps = 3\n")
    with pytest.raises(RequestError, match=r"\[trian\] is no subcommand; did you mean train"):
        train_options(tmp_path)


def test_the_command_shows_the_options_of_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "meshwright.toml").write_text("[train]\nlog-every = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["planner", "--show-config", "train"])
    assert planner_command.main() == 0
    rows = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert rows["log-every"] == "3" and rows["steps"] == "-"
    (tmp_path / "meshwright.toml").write_text("[train]\nlog-evry = 3\n")
    assert planner_command.main() == 2
    assert "did you mean log_every?" in capsys.readouterr().err


def test_bad_values_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_TRAIN_KEEP", "many")
    with pytest.raises(RequestError, match="MESHWRIGHT_TRAIN_KEEP: keep: expected a whole number"):
        train_options(tmp_path)
