"""Launching by ssh, to an sshd of the tests' own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from executor.cli.main import main
from executor.launch import guard
from executor.launch.hosts import ssh
from executor.launch.hosts.hostfile import Host
from executor.launch.hosts.ssh import Ssh
from executor.launch.start import Job, free_port
from tests.executor.launch_sshd import Sshd, running_sshd
from tests.executor.launching import alive, gone, launcher_process, wait_for


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def words(sshd: Sshd, hosts: str, *more: str, n: int = 2) -> list[str]:
    options = f"--launcher-options={sshd.options}"
    return ["launch", "--launcher", "ssh", "--hosts", hosts, "-n", str(n), options, *more]


def test_every_process_knows_who_and_where_it_is(
    sshd: Sshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "say.py").write_text(
        "import os, sys\n"
        "e = os.environ\n"
        "print(e['MESHWRIGHT_PROCESS'], e['MESHWRIGHT_LOCAL'], e['MESHWRIGHT_PROCESSES'],\n"
        "      e['MESHWRIGHT_COORDINATOR'].split(':')[0], e['SSH_CONNECTION'].split()[2],\n"
        "      e['TEXT'], os.getcwd(), sys.stdout.isatty(), sys.argv[1:])\n"
    )
    hosts = sshd.hosts(tmp_path, "127.0.0.1 slots=2", "127.0.0.2 slots=1")
    text = 'it\'s $HOME; a "b"'
    assert main([*words(sshd, hosts, "--env", f"TEXT={text}", n=3), "say.py", "a b", "--c"]) == 0
    shown = sorted(capsys.readouterr().out.splitlines())
    rest = f"{text} {tmp_path} False ['a b', '--c']"
    assert shown == [
        f"[0] 0 0 3 127.0.0.1 127.0.0.1 {rest}",
        f"[1] 1 1 3 127.0.0.1 127.0.0.1 {rest}",
        f"[2] 2 0 3 127.0.0.1 127.0.0.2 {rest}",
    ]
    assert (tmp_path / "logs" / "worker-2.out").read_text().startswith("2 0 3 ")


@pytest.mark.slow
def test_the_exit_code_comes_back_and_the_others_are_ended(
    sshd: Sshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fail.py").write_text(
        "import os, time\n"
        "open('pid' + os.environ['MESHWRIGHT_PROCESS'], 'w').write(str(os.getpid()))\n"
        "if os.environ['MESHWRIGHT_PROCESS'] == '1':\n"
        "    raise SystemExit('no disk' if os.environ['MESHWRIGHT_RESTART'] == '0' else 7)\n"
        "time.sleep(600)\n"
    )
    hosts = sshd.hosts(tmp_path, "127.0.0.1", "127.0.0.2")
    assert main([*words(sshd, hosts, "--max-restarts", "1"), "fail.py"]) == 7
    told = capsys.readouterr()
    assert "process 1 on 127.0.0.2 failed first, exited with 1:\n  no disk" in told.err
    assert "exited with 7" in told.err
    assert "[1] no disk" in told.out
    gone(int((tmp_path / "pid0").read_text()))


@pytest.mark.slow
def test_another_folder_is_copied_first(
    sshd: Sshd, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code" / "part").mkdir(parents=True)
    (tmp_path / "code" / "part" / "say.py").write_text("import os; print(os.getcwd())")
    monkeypatch.chdir(tmp_path / "code" / "part")
    hosts = sshd.hosts(tmp_path, "127.0.0.1")
    sync = f"--sync-dir={tmp_path / 'code'}:{tmp_path / 'there'}"
    assert main([*words(sshd, hosts, sync, n=1), "say.py"]) == 0
    assert capsys.readouterr().out == f"[0] {tmp_path / 'there' / 'part'}\n"
    # without rsync
    (tmp_path / "code" / "part" / "say.py").write_text("print('new')")
    monkeypatch.setattr(ssh.shutil, "which", lambda name, **_: name if name != "rsync" else None)
    assert main([*words(sshd, hosts, sync, n=1), "say.py"]) == 0
    assert capsys.readouterr().out == "[0] new\n"


def test_what_is_missing_there_is_said(
    sshd: Sshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = sshd.hosts(tmp_path, "127.0.0.1")
    assert main([*words(sshd, hosts, n=1), "nowhere.py"]) == 2
    told = capsys.readouterr()
    assert "failed first, exited with 2" in told.err
    assert "can't open file" in told.err and "nowhere.py" in told.err
    assert main([*words(sshd, hosts, "--python", "/no/python", n=1), "nowhere.py"]) == 2
    told = capsys.readouterr()
    assert "no Python at /no/python on 127.0.0.1" in told.err and "--python" in told.err


def test_hosts_that_do_not_answer_are_named(
    sshd: Sshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"no.such.host.invalid\n127.0.0.1 port={free_port()}\n")
    (tmp_path / "say.py").write_text("print('hello')")
    assert main([*words(sshd, str(hosts)), "say.py"]) == 2
    told = capsys.readouterr().err
    assert "no ssh to no.such.host.invalid (" in told and "Could not resolve" in told
    assert "127.0.0.1 (" in told and "Connection refused" in told


def test_hosts_are_left_out_as_long_as_enough_remain(
    sshd: Sshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"127.0.0.1 port={free_port()}\n127.0.0.2 port={sshd.port}\n")
    (tmp_path / "say.py").write_text(
        "import os; print(os.environ['MESHWRIGHT_PROCESSES'], os.environ['MESHWRIGHT_PROCESS'])"
    )
    assert main([*words(sshd, str(hosts), "--min-processes", "2", n=4), "say.py"]) == 0
    told = capsys.readouterr()
    assert sorted(told.out.splitlines()) == ["[0] 2 0", "[1] 2 1"]
    assert "left out: 127.0.0.1 (" in told.err and "2 of 4 processes" in told.err
    assert main([*words(sshd, str(hosts), "--min-processes", "3", n=4), "say.py"]) == 2
    assert "2 processes are left, at least 3 are needed" in capsys.readouterr().err


SLEEP = """
import os, signal, sys, time
me = os.environ["MESHWRIGHT_PROCESS"]

def save(*_):
    open("saved" + me, "w").close()
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    open("child" + me, "w").write(str(os.getpid()))
    time.sleep(600)
open("pid.tmp" + me, "w").write(str(os.getpid()))
os.rename("pid.tmp" + me, "pid" + me)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_processes_there_end_with_the_launcher(
    sshd: Sshd, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "sleep.py").write_text(SLEEP)
    hosts = sshd.hosts(tmp_path, "127.0.0.1", "127.0.0.2")
    with launcher_process(words(sshd, hosts), "sleep.py") as launcher:
        names = ["pid0", "pid1", "child0", "child1"]
        pids = [int(wait_for(tmp_path / name)) for name in names]
        assert all(map(alive, pids))
        launcher.send_signal(number)
        _, told = launcher.communicate(timeout=120)
    expected = {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGKILL: -9}
    assert launcher.returncode == expected[number], told
    gone(*pids)
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()
    if number == signal.SIGTERM:
        assert "stopped by SIGTERM; exit codes 75, 75" in told


def test_a_host_that_comes_back_is_taken_back(
    sshd: Sshd, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    told: list[str] = []
    hosts = (Host("127.0.0.1", port=sshd.port), Host("127.0.0.2", port=free_port()))
    launcher = Ssh(hosts, str(tmp_path), options=tuple(shlex.split(sshd.options)), tell=told.append)
    launcher = replace(launcher, least=1)
    job = Job((sys.executable, "train.py"), 2)
    start = launcher.start(job, 1)
    assert (start.processes, [task.host for task in start.tasks]) == (1, ["127.0.0.1"])
    assert len(told) == 1 and told[0].startswith("left out: 127.0.0.2 (")
    with running_sshd(tmp_path_factory.mktemp("second"), hosts[1].port) as second:
        key = Path(second.log).parent / "user"
        both = replace(launcher, options=("-i", str(key), *launcher.options))
        start = both.start(job, 2)
    assert (start.processes, [task.host for task in start.tasks]) == (2, ["127.0.0.1", "127.0.0.2"])
    assert len(told) == 1


@pytest.mark.slow
def test_a_host_that_fails_again_and_again_is_left_out(
    sshd: Sshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text(
        "import os, sys, time\n"
        "print('start', os.environ['MESHWRIGHT_RESTART'], os.environ['MESHWRIGHT_PROCESSES'])\n"
        "if os.environ['SSH_CONNECTION'].split()[2] == '127.0.0.2': sys.exit('bad memory')\n"
        "time.sleep(600 if os.environ['MESHWRIGHT_PROCESSES'] == '2' else 0)\n"
    )
    hosts = sshd.hosts(tmp_path, "127.0.0.1", "127.0.0.2")
    more = ["--min-processes", "1", "--max-restarts", "5"]
    assert main([*words(sshd, hosts, *more), "bad.py"]) == 0
    told = capsys.readouterr()
    assert "[0] start 2 1" in told.out and "start 3" not in told.out
    assert "left out: 127.0.0.2 (failed first twice); 1 of 2 processes" in told.err


def test_hosts_that_do_not_answer_at_a_restart_are_asked_again(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host that is away for one restart: its name in the file leads nowhere meanwhile."""
    from executor.launch import start as launch

    real, answers = ssh.ask, iter([None, "it is off", "it is off", None])
    monkeypatch.setattr(ssh, "ask", lambda host, options: next(answers) or real(host, options))
    monkeypatch.setattr(launch, "PAUSE_S", 0.2)
    (tmp_path / "once.py").write_text(
        "import os, sys\nprint('start', os.environ['MESHWRIGHT_RESTART'])\n"
        "sys.exit(0 if os.environ['MESHWRIGHT_RESTART'] == '3' else 1)\n"
    )
    hosts = sshd.hosts(tmp_path, "127.0.0.1")
    assert main([*words(sshd, hosts, "--max-restarts", "3", n=1), "once.py"]) == 0
    told = capsys.readouterr()
    assert [line for line in told.out.splitlines() if line.startswith("[0]")] == [
        "[0] start 0",
        "[0] start 3",
    ]
    assert told.out.count("no ssh to 127.0.0.1 (it is off); trying again") == 2


def test_a_lost_connection_is_told_as_one(
    sshd: Sshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.py").write_text(
        "import os, signal, time\n"
        "def parent(pid):\n"
        "    return int(open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[1])\n"
        "print('cutting', flush=True)\n"
        "os.kill(parent(os.getppid()), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    hosts = sshd.hosts(tmp_path, "127.0.0.1")
    assert main([*words(sshd, hosts, n=1), "cut.py"]) == 255
    told = capsys.readouterr().err
    assert "process 0 on 127.0.0.1 failed first, exited with 255 (that is ssh's own code" in told


@pytest.mark.slow
def test_a_launcher_that_beats_is_not_silent(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "SILENCE_S", guard.BEAT_S + 2)
    (tmp_path / "long.py").write_text("import time; time.sleep(14)")
    assert main([*words(sshd, sshd.hosts(tmp_path, "127.0.0.1"), n=1), "long.py"]) == 0


def test_a_silent_launcher_is_a_lost_one(sshd: Sshd, tmp_path: Path) -> None:
    """The connection stands, but nothing comes: what a cut cable looks like from there."""
    (tmp_path / "sleep.py").write_text(SLEEP)
    command = [sys.executable, "-I", "-S", guard.__file__, "--silence", "1", "30"]
    env = {**os.environ, "MESHWRIGHT_PROCESS": "0"}
    with subprocess.Popen([*command, sys.executable, "sleep.py"], stdin=-1, env=env) as there:
        assert there.stdin is not None
        pid = int(wait_for(tmp_path / "pid0"))
        for _ in range(8):
            there.stdin.write(b"\n")
            there.stdin.flush()
            time.sleep(0.25)
        assert alive(pid)
        there.wait(60)
    gone(pid)
