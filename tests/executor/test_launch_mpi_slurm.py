"""Launching by mpirun and by srun: what they are told, what they say, and real runs."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.cli.main import main
from executor.launch import guard
from executor.launch.hosts.hostfile import Host
from executor.launch.hosts.mpi import Mpi, command, where
from executor.launch.hosts.mpi import read as read_mpirun
from executor.launch.hosts.slurm import Slurm
from executor.launch.hosts.slurm import command as srun_command
from executor.launch.hosts.slurm import read as read_srun
from executor.launch.job import Job, LaunchError, OutputLine
from tests.executor.launch_slurm import running_slurm
from tests.executor.launching import alive, gone, launcher_process, wait_for

JOB = Job(("/py", "t.py", "x"), 4, stop_s=30)


def test_the_words_of_mpirun() -> None:
    words = command(Mpi((), "/py", ("--report-bindings",)), JOB, ["A", "B"], root=False)
    text = " ".join(words)
    assert text.startswith("mpirun -n 4 --tag-output --bind-to none --mca orte_abort")
    assert " 0 --oversubscribe -x A -x B --report-bindings /py -I -S -c " in text
    assert words[-6:] == ("--deaf", "--report", "30", "/py", "t.py", "x")
    assert "--allow-run-as-root" not in words
    hosts = (Host("a", 3), Host("b"))
    assert " --allow-run-as-root --host a:3,b:1 " in " ".join(
        command(Mpi(hosts, "/py"), JOB, [], root=True)
    )


def test_hosts_that_mpirun_can_not_be_told() -> None:
    with pytest.raises(LaunchError, match=r"b: mpirun takes no port= and user=; put them"):
        where([Host("a"), Host("b", port=22)], 2)
    assert where([Host("a"), Host("b"), Host("c")], 2) == "a:1,b:1"


def test_what_mpirun_says() -> None:
    assert read_mpirun("[1,12]<stdout>:[1,2] x") == OutputLine(12, "[1,2] x")
    assert read_mpirun("[1,3]<stdout>:\x1eexit code 75").failed == (3, 75)
    assert read_mpirun("mpirun noticed something").process is None


def test_the_words_of_srun() -> None:
    words = srun_command(Slurm("/py", ("--nodes=2",), 4), JOB)
    assert words[:7] == (
        "srun",
        "--ntasks=4",
        "--label",
        "--input=all",
        "--kill-on-bad-exit=0",
        "--gpus-per-task=4",
        "--nodes=2",
    )
    assert words[-7:] == ("--report", "--silence", "60.0", "30", "/py", "t.py", "x")


def test_what_srun_says() -> None:
    assert read_srun("3: text: more") == OutputLine(3, "text: more")
    assert read_srun(" 3: ") == OutputLine(3, "")
    assert read_srun("11: \x1eexit code 137").failed == (11, 137)
    assert read_srun("srun: job 7 queued and waiting") == OutputLine(
        None, "srun: job 7 queued and waiting"
    )


SAY = """
import os, sys
from executor.processes.roles import read_role
role = read_role(os.environ)
print(role.process, role.processes, role.source, role.coordinator, end=" ")
print(os.environ["EXTRA"], sys.argv[1:])
if len(sys.argv) > 1 and role.process == 1:
    print("no disk", file=sys.stderr)
    os.kill(os.getpid(), 9) if sys.argv[1] == "kill" else sys.exit(int(sys.argv[1]))
if len(sys.argv) > 1:
    import time
    time.sleep(600)
"""
SLEEP = """
import os, signal, sys, time
me = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["SLURM_PROCID"]

def save(*_):
    open("saved" + me, "w").close()
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
open("pid.tmp" + me, "w").write(str(os.getpid()))
os.rename("pid.tmp" + me, "pid" + me)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture(params=["mpi", "slurm"])
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "slurm":
        for name, value in request.getfixturevalue("slurm").items():
            monkeypatch.setenv(name, value)
    elif shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (Debian: openmpi-bin)")
    return str(request.param)


def launch(launcher: str, *words: str) -> int:
    root = Path(__file__).resolve().parents[2]
    env = [f"--env=PYTHONPATH={root}", "--env=EXTRA=it's"]
    return main(["launch", "--launcher", launcher, "-n", "2", *env, *words])


def test_every_process_knows_who_it_is(
    launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "say.py").write_text(SAY)
    assert launch(launcher, "say.py") == 0
    shown = sorted(capsys.readouterr().out.splitlines())
    source = {"mpi": "OpenMPI", "slurm": "Slurm"}[launcher]
    assert [line[: 9 + len(source)] for line in shown] == [
        f"[0] 0 2 {source} ",
        f"[1] 1 2 {source} ",
    ]
    assert all(line.endswith(" it's []") for line in shown)
    assert (tmp_path / "logs" / "worker-1.out").read_text() == shown[1][4:] + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("5", 5), ("75", 75), ("kill", 137)])
def test_the_first_failure_is_told(
    launcher: str, how: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "say.py").write_text(SAY)
    assert launch(launcher, "--max-restarts", "1", "say.py", how) == code
    told = capsys.readouterr()
    assert told.err.count("process 1 failed first, ") == 2, told
    assert "  no disk\n" in told.err and "[1] no disk" in told.out
    ports = {line.split()[4] for line in told.out.splitlines() if line.startswith("[1] 1 2")}
    assert len(ports) == 2, told.out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_launcher(
    launcher: str, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "sleep.py").write_text(SLEEP)
    with launcher_process(["launch", "--launcher", launcher, "-n", "2"], "sleep.py") as child:
        pids = [int(wait_for(tmp_path / name)) for name in ("pid0", "pid1")]
        assert all(map(alive, pids))
        child.send_signal(number)
        _, told = child.communicate(timeout=120)
    expected = {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGKILL: -9}
    assert child.returncode == expected[number], told
    gone(*pids)
    if number != signal.SIGKILL:
        assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists(), told


@pytest.mark.slow
def test_a_step_of_slurm_is_not_taken_for_lost(
    slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    monkeypatch.setattr("executor.launch.hosts.slurm.SILENCE_S", guard.BEAT_S + 2)
    (tmp_path / "long.py").write_text("import time; time.sleep(14)")
    assert launch("slurm", "long.py") == 0


@pytest.mark.slow
def test_inside_an_allocation_it_is_a_step(slurm: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("salloc") is None:
        pytest.skip("no salloc here (Debian: slurm-client)")
    (tmp_path / "say.py").write_text(
        "import os, sys\n"
        "e = os.environ\n"
        "print(e['SLURM_JOB_ID'], e['SLURM_STEP_ID'], e['SLURM_PROCID'])\n"
        "sys.exit(e['MESHWRIGHT_RESTART'] == '0')\n"
    )
    words = ["launch", "--launcher", "slurm", "-n", "2", "--max-restarts", "1", "say.py"]
    inside = ["env", f"SLURM_CONF={slurm['SLURM_CONF']}", "salloc", "-n", "2"]
    with launcher_process(words, inside=inside) as child:
        out, told = child.communicate(timeout=120)
    assert child.returncode == 0, out + told
    said = sorted(tuple(line.split()[1:]) for line in out.splitlines() if line.startswith("["))
    assert len({job for job, _, _ in said}) == 1
    assert [(step, process) for _, step, process in said] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]


def test_what_is_missing_is_said(
    launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(launcher, "nowhere.py") == 2
    assert "can't open file" in capsys.readouterr().err
    assert launch(launcher, "--python", "/no/python", "nowhere.py") != 0
    assert "/no/python" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "program"), [("mpi", "mpirun"), ("slurm", "srun")])
def test_a_program_that_is_not_there(
    name: str,
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    assert main(["launch", "--launcher", name, "-n", "2", "say.py"]) == 2
    assert f"no {program} on this host; install it (Debian: " in capsys.readouterr().err
