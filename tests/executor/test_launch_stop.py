"""The launcher on this host: told to stop, killed, and which failure counts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from executor.cli.main import main
from executor.launch.job import JobStop
from executor.launch.local import Local
from executor.launch.start import Job, Outcome, launch
from tests.executor.launching import alive, gone, launcher_process, wait_for
from tests.executor.test_launch_ssh import SLEEP


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def outcomes(code: str, processes: int = 2, restarts: int = 0) -> tuple[list[Outcome], list[str]]:
    """Of every start; and what was shown."""
    found: list[Outcome] = []
    shown: list[str] = []
    last = launch(
        Job((sys.executable, "-c", code), processes, grace_s=2.0),
        Local(),
        lambda _, line: shown.append(line),
        max_restarts=restarts,
        tell=lambda outcome, left: found.append(outcome),
    )
    return found if last.code else [*found, last], shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "sleep.py").write_text(SLEEP)
    words = ["launch", "-n", "2", "--max-restarts", "3"]
    with launcher_process(words, "sleep.py") as launcher:
        pids = [int(wait_for(tmp_path / name)) for name in ("pid0", "pid1", "child0", "child1")]
        assert all(map(alive, pids))
        launcher.send_signal(number)
        _, told = launcher.communicate(timeout=60)
    expected = {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGKILL: -9}
    assert launcher.returncode == expected[number], told
    gone(*pids)
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()
    assert "starting again" not in told


DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: open("told", "w").write("x"))
open("pid", "w").write(str(os.getpid()))
while True:
    time.sleep(1)
"""


def test_what_does_not_listen_is_killed_after_the_grace(tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    with launcher_process(["launch", "-n", "1", "--grace", "1"], "deaf.py") as launcher:
        pid = int(wait_for(tmp_path / "pid"))
        launcher.terminate()
        _, told = launcher.communicate(timeout=60)
    assert launcher.returncode == 75
    assert "stopped by SIGTERM; exit codes 137" in told
    assert (tmp_path / "told").exists()
    gone(pid)


def test_a_job_that_ends_well_when_told_has_ended_well(tmp_path: Path) -> None:
    (tmp_path / "ready.py").write_text(SLEEP.replace("sys.exit(75)", "sys.exit(0)"))
    with launcher_process(["launch", "-n", "1"], "ready.py") as launcher:
        wait_for(tmp_path / "child0")
        wait_for(tmp_path / "pid0")
        launcher.terminate()
        launcher.wait(60)
    assert launcher.returncode == 0


def test_more_lines_than_wait_at_once_all_arrive(tmp_path: Path) -> None:
    code = "for k in range(30000): print(k)"
    ((outcome,), shown) = outcomes(code, 2)
    assert outcome.codes == (0, 0)
    assert sorted(map(int, shown)) == sorted([*range(30000)] * 2)


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    with launcher_process(["launch", "-n", "1", "--grace", "10000"], "deaf.py") as launcher:
        pid = int(wait_for(tmp_path / "pid"))
        launcher.send_signal(signal.SIGINT)
        wait_for(tmp_path / "told")
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
    assert launcher.returncode == 130
    gone(pid)


def test_a_process_that_only_lost_a_peer_is_not_the_first_failure() -> None:
    code = (
        "import os, sys, time\n"
        "if os.environ['MESHWRIGHT_PROCESS'] == '0': sys.exit(75)\n"
        "time.sleep(0.7); print('words'); sys.exit(9)\n"
    )
    ((outcome,), _) = outcomes(code)
    assert (outcome.code, outcome.process, outcome.tail) == (9, 1, ("words",))
    assert outcome.codes == (75, 9)


def test_a_process_that_the_others_lost_is_named() -> None:
    code = (
        "import os, sys, time\n"
        "if os.environ['MESHWRIGHT_PROCESS'] == '1': time.sleep(600)\n"
        "print('meshwright: process 1 (pid 7 on b) was lost: it has not answered for 9 s. process '"
        " '0 (pid 8 on a) ends with code 75: start the job again', file=sys.stderr)\n"
        "sys.exit(75)\n"
    )
    ((outcome,), _) = outcomes(code)
    assert (outcome.code, outcome.process) == (75, 1)
    assert outcome.lost == "it has not answered for 9 s"


def test_all_that_ask_for_it_are_started_again_with_another_port() -> None:
    code = (
        "import os, sys\n"
        "again = os.environ['MESHWRIGHT_RESTART']\n"
        "print(again, os.environ['MESHWRIGHT_COORDINATOR'])\n"
        "sys.exit(75 if again != '2' else 0)\n"
    )
    found, shown = outcomes(code, restarts=5)
    assert [outcome.code for outcome in found] == [75, 75, 0]
    said = {tuple(line.split()) for line in shown}
    assert {again for again, _ in said} == {"0", "1", "2"}
    assert len({where for _, where in said}) == 3


def test_a_traceback_is_shown_whole_and_what_came_before_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fail.py").write_text(
        "def deep(n):\n    deep(n - 1) if n else [][0]\n\n"
        "print('before')\nimport sys\nsys.stdout.flush()\n" + "deep(30) if 0 else deep(3)\n"
    )
    assert main(["launch", "-n", "1", "fail.py"]) == 1
    told = capsys.readouterr().err
    assert "Traceback (most recent call last):" in told and "IndexError" in told
    assert "before" not in told


def test_logs_of_all_starts_are_kept(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(
        "import os\nprint('start', os.environ['MESHWRIGHT_RESTART'])\nraise SystemExit(1)\n"
    )
    assert main(["launch", "-n", "1", "--max-restarts", "1", "fail.py"]) == 1
    assert (tmp_path / "logs" / "worker-0.out").read_text() == "start 0\nstart 1\n"


def test_a_stop_before_the_start_starts_nothing(tmp_path: Path) -> None:
    stop = JobStop()
    stop.ask(signal.SIGTERM)
    job = Job((sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"), 1)
    outcome = launch(job, Local(), lambda *_: None, max_restarts=3, stop=stop)
    assert (outcome.code, outcome.stopped) == (75, signal.SIGTERM)
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_killed_guard_takes_its_process_along(tmp_path: Path) -> None:
    code = (
        "import os, signal, time\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    ((outcome,), _) = outcomes(code, 1)
    assert outcome.code == 137
    gone(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_an_orphan_that_holds_the_output_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Only where the guard itself is killed: else it ends orphans."""
    code = (
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    open({str(tmp_path / 'tmp')!r}, 'w').write(str(os.getpid()))\n"
        f"    os.rename({str(tmp_path / 'tmp')!r}, {str(tmp_path / 'pid')!r})\n"
        "    time.sleep(600)\n"
        f"while not os.path.exists({str(tmp_path / 'pid')!r}): time.sleep(0.01)\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
    )
    ((outcome,), _) = outcomes(code, 1)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert outcome.code == 137


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--launcher", "sge"], "--launcher sge is not there; start the processes by OpenMPI"),
        (["--launcher", "yarn"], "--launcher yarn is not there; YARN starts no processes"),
        (["--launcher", "ssh"], "--launcher ssh needs --hosts FILE"),
        (["--hosts", "x"], "--hosts is for --launcher ssh"),
        (["--max-restarts", "-1"], "expected >= 0"),
        (["--grace", "nan"], "expected seconds"),
        (["--python", "/no/python"], "cannot start /no/python: no such program"),
        (["--logs", "train.py/x"], "cannot write logs to"),
    ],
)
def test_requests_that_can_not_be_met(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    assert main(["launch", "-n", "1", *words, "train.py"]) == 2
    assert told in capsys.readouterr().err
