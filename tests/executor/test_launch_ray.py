"""Launching in actors of Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from executor.cli.main import main
from executor.launch.job import Job, LaunchError
from executor.launch.ray import driver as ray_driver
from executor.launch.ray.actors import Ray
from tests.executor.launching import alive, gone, launcher_process, wait_for
from tests.executor.test_launch_ssh import SLEEP

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'meshwright[ray]'"
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@needs_ray
def test_the_driver_is_told_the_job(tmp_path: Path) -> None:
    job = Job((sys.executable, "t.py", "x"), 3, 2, {"A": "b"}, stop_s=9)
    start = Ray("auto", "/py", 4).start(job, 2)
    (task,) = start.tasks
    assert task.command == (sys.executable, "-P", ray_driver.__file__)
    told = json.loads(task.environment[ray_driver.JOB])
    assert (told["address"], told["processes"], told["gpus"]) == ("auto", 3, 4)
    assert told["words"][-5:] == ["--report", "9", "/py", "t.py", "x"]
    assert told["environment"]["MESHWRIGHT_RESTART"] == "2" and told["folder"] == str(tmp_path)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"pip install 'meshwright\[ray\]'"):
        Ray(None, "python").start(Job(("python", "t.py"), 1), 0)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_first_failure_is_told_and_starts_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fail.py").write_text(
        "import os, sys, time\n"
        "e = os.environ\n"
        "print('role', e['MESHWRIGHT_PROCESS'], e['MESHWRIGHT_PROCESSES'], e['MESHWRIGHT_LOCAL'],\n"
        "      e['MESHWRIGHT_COORDINATOR'], os.getcwd(), e['A'], e.get('OMP_NUM_THREADS'))\n"
        "open('pid' + e['MESHWRIGHT_PROCESS'], 'w').write(str(os.getpid()))\n"
        "if e['MESHWRIGHT_PROCESS'] == '1': sys.exit('no disk')\n"
        "time.sleep(600 if e['MESHWRIGHT_RESTART'] == '0' else 0)\n"
    )
    words = ["launch", "--launcher", "ray", "-n", "2", "--env", "A=b c", "--max-restarts", "1"]
    assert main([*words, "fail.py"]) == 1
    told = capsys.readouterr()
    roles = [line.split(maxsplit=6) for line in told.out.splitlines() if "] role " in line]
    assert sorted(role[2:5] + role[6:] for role in roles) == [
        ["0", "2", "0", f"{tmp_path} b c None"],
        ["0", "2", "0", f"{tmp_path} b c None"],
        ["1", "2", "1", f"{tmp_path} b c None"],
        ["1", "2", "1", f"{tmp_path} b c None"],
    ]
    assert len({role[5] for role in roles}) == 2  # another port
    assert told.err.count("process 1 failed first, exited with 1:") == 2
    assert "  no disk\n" in told.err
    gone(int((tmp_path / "pid0").read_text()))


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "sleep.py").write_text(SLEEP)
    with launcher_process(["launch", "--launcher", "ray", "-n", "2"], "sleep.py") as launcher:
        names = ["pid0", "pid1", "child0", "child1"]
        pids = [int(wait_for(tmp_path / name)) for name in names]
        rays = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and ours(int(pid), pids)]
        assert all(map(alive, pids)) and len(rays) > 4
        launcher.send_signal(number)
        _, told = launcher.communicate(timeout=120)
    assert launcher.returncode == {signal.SIGTERM: 75, signal.SIGKILL: -9}[number], told
    gone(*pids, *rays)
    if number == signal.SIGTERM:
        assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


def ours(pid: int, found: list[int]) -> bool:
    """Whether a process belongs to this test, as those found do: their variables name it."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        mine = Path(f"/proc/{found[0]}/environ").read_bytes()
    except OSError:
        return False
    here = [v for v in mine.split(b"\0") if v.startswith(b"PYTEST_CURRENT_TEST=")]
    return any(v in environment.split(b"\0") for v in here) and pid != os.getpid()


@needs_ray
def test_a_cluster_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--launcher", "ray", "-n", "1", "--ray-address", "127.0.0.1:1", "t.py"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "cannot reach Ray at 127.0.0.1:1 (" in told and "refused" in told


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that this test starts: a job joins it, ends, and it is still there."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (tmp_path / "hold.py").write_text(
        "import ray, time\n"
        "context = ray.init(address='local', num_cpus=2, include_dashboard=False)\n"
        "open('tmp', 'w').write(context.address_info['gcs_address'])\n"
        "import os; os.rename('tmp', 'address')\n"
        "while not os.path.exists('end'): time.sleep(0.1)\n"
        "print('nodes', len(ray.nodes()), 'free', ray.available_resources().get('CPU'))\n"
    )
    (tmp_path / "say.py").write_text("import os; print(os.environ['MESHWRIGHT_PROCESS'])")
    with subprocess.Popen(
        [sys.executable, "hold.py"], stdout=subprocess.PIPE, text=True
    ) as cluster:
        try:
            address = wait_for(tmp_path / "address")
            words = ["launch", "--launcher", "ray", "-n", "2", "--ray-address", address, "say.py"]
            assert main(words) == 0, capsys.readouterr()
            assert sorted(capsys.readouterr().out.splitlines()) == ["[0] 0", "[1] 1"]
            (tmp_path / "end").touch()
            assert "nodes 1 free 2.0" in cluster.communicate(timeout=60)[0]
        finally:
            (tmp_path / "end").touch()
