"""The launcher: who each process is told to be, logs, failures, and that nothing is left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from executor.cli.main import main
from executor.launch.start import Job, Outcome, run_local
from tests.executor.launching import gone

SAY = "import os; print('I am', os.environ['MESHWRIGHT_PROCESS'])"


def run(code: str, processes: int = 3, **options: object) -> tuple[Outcome, list[tuple[int, str]]]:
    shown: list[tuple[int, str]] = []
    job = Job((sys.executable, "-c", code), processes, **{"grace_s": 1.0, **options})  # type: ignore[arg-type]
    return run_local(job, lambda k, line: shown.append((k, line))), shown


def test_every_process_knows_who_it_is(tmp_path: Path) -> None:
    outcome, shown = run(SAY, logs=tmp_path / "logs")
    assert outcome == Outcome(0, None, (), (0, 0, 0))
    assert sorted(shown) == [(k, f"I am {k}") for k in range(3)]
    for k in range(3):
        assert (tmp_path / "logs" / f"worker-{k}.out").read_text() == f"I am {k}\n"


def test_all_are_told_one_coordinator_and_their_devices() -> None:
    names = "MESHWRIGHT_COORDINATOR MESHWRIGHT_PROCESSES JAX_NUM_CPU_DEVICES JAX_PLATFORMS EXTRA"
    code = f"import os; print(*[os.environ[n] for n in {names.split()!r}])"
    _, shown = run(code, devices=2, environment={"EXTRA": "yes"})
    assert len({line for _, line in shown}) == 1
    coordinator, *rest = shown[0][1].split()
    assert coordinator.startswith("127.0.0.1:")
    assert rest == ["3", "2", "cpu", "yes"]


def test_the_first_failure_is_told_and_ends_the_others() -> None:
    code = (
        "import os, sys, time\n"
        "k = os.environ['MESHWRIGHT_PROCESS']\n"
        "if k == '1':\n    print('no disk'); sys.exit(5)\n"
        "time.sleep(600)"
    )
    outcome, shown = run(code)
    assert (outcome.code, outcome.process, outcome.tail) == (5, 1, ("no disk",))
    assert (1, "no disk") in shown
    assert outcome.codes[0] != 0 and outcome.codes[2] != 0


def test_a_signal_counts_as_a_failure() -> None:
    code = (
        "import os, signal\nif os.environ['MESHWRIGHT_PROCESS'] == '2':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    outcome, _ = run(code)
    assert (outcome.code, outcome.process) == (137, 2)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_nothing_is_left_behind_not_even_what_ignores_the_signal(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open(os.path.join({str(tmp_path)!r}, str(child.pid)), 'w').close()\n"
        f"open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w').close()\n"
        "if os.environ['MESHWRIGHT_PROCESS'] == '0':\n"
        f"    while len(os.listdir({str(tmp_path)!r})) < 6: time.sleep(0.05)\n"
        "    sys.exit(3)\n"
        "time.sleep(600)"
    )
    outcome, _ = run(code)
    assert outcome.code == 3
    pids = [int(name) for name in os.listdir(tmp_path)]
    assert len(pids) == 6
    gone(*pids)


def test_the_command_restarts_and_says_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "flaky.py"
    script.write_text(
        "import os, pathlib, sys\n"
        f"mark = pathlib.Path({str(tmp_path)!r}) / ('ran' + os.environ['MESHWRIGHT_PROCESS'])\n"
        "if sys.argv[1] == 'never' or not mark.exists():\n"
        "    mark.touch(); print('first time'); sys.exit(4)\n"
        "print('second time', *sys.argv[1:])\n"
    )
    logs = ["--logs", str(tmp_path / "logs")]
    assert main(["launch", "-n", "1", *logs, "--max-restarts", "2", str(script), "a", "-b"]) == 0
    told = capsys.readouterr()
    assert "[0] second time a -b" in told.out
    assert "process 0 failed first, exited with 4" in told.err
    assert "1 restarts left" in told.err
    assert main(["launch", "-n", "2", *logs, str(script), "never"]) == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "0", __file__], "expected at least one process"),
        (["-n", "1", "nowhere.py"], "no script at nowhere.py"),
        (["-n", "1", "--env", "X", __file__], "expected NAME=VALUE"),
        (["-n", "1", "--devices-per-process", "0", __file__], "expected >= 1"),
    ],
)
def test_broken_requests(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *arguments]) == 2
    assert text in capsys.readouterr().err
