"""One training by every launcher, with the losses of one process; and on two hosts: network
namespaces joined by a cable."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor.cli.main import main
from tests.executor.launch_slurm import running_slurm
from tests.executor.launch_sshd import running_sshd
from tests.executor.test_hosts import TRAIN, launched, results

pytestmark = pytest.mark.slow
ADDRESSES = ("10.77.31.1", "10.77.31.2")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", **more}


@pytest.fixture(scope="module")
def alone() -> list[float]:
    outcome, lines = launched(1, 8, "data=4,model=2")
    assert outcome.code == 0, lines
    losses: list[float] = results(lines)[0][2]
    return losses


def check(text: str, alone: list[float]) -> None:
    lines = [line for line in text.splitlines() if line.startswith("[") and "Gloo" not in line]
    found: list[Any] = sorted(json.loads(line) for line in lines)
    assert [(process, devices) for process, devices, _ in found] == [(0, 8), (1, 8)], text
    for _, _, losses in found:
        assert losses == pytest.approx(alone, rel=1e-5)


def test_mpirun(alone: list[float], tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (Debian: openmpi-bin)")
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = subprocess.run(
        [*command, sys.executable, str(script), "data=4,model=2"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check(done.stdout, alone)


def train(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run ``planner launch`` on two processes of four devices; what they printed, unnumbered."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    logs = ["--logs", str(tmp_path / "logs")]
    count = ["-n", "2", "--devices-per-process", "4"]
    code = main(["launch", *words, *count, *logs, str(script), "data=4,model=2"])
    told = capsys.readouterr()
    assert code == 0, told.out[-2000:] + told.err[-2000:]
    return "\n".join(line.partition("] ")[2] for line in told.out.splitlines())


def test_launched_here(
    alone: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(train(tmp_path, capsys), alone)


def test_launched_by_ssh(
    alone: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_sshd(tmp_path) as sshd:
        hosts = sshd.hosts(tmp_path, "127.0.0.1", "127.0.0.2")
        options = f"--launcher-options={sshd.options}"
        text = train(tmp_path, capsys, "--launcher", "ssh", "--hosts", hosts, options)
    check(text, alone)


def test_launched_by_mpirun(
    alone: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (Debian: openmpi-bin)")
    check(train(tmp_path, capsys, "--launcher", "mpi"), alone)


def test_launched_by_slurm(
    alone: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_slurm(tmp_path) as variables:
        monkeypatch.setenv("SLURM_CONF", variables["SLURM_CONF"])
        text = train(tmp_path, capsys, "--launcher", "slurm")
    check(text, alone)


def test_launched_by_ray(
    alone: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'meshwright[ray]'")
    check(train(tmp_path, capsys, "--launcher", "ray"), alone)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two hosts with an address each, whose name resolves to it."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and ip (Debian: iproute2)")
    names = (f"mw{os.getpid()}a", f"mw{os.getpid()}b")
    folders = [Path("/etc/netns") / name for name in names]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip(
                "link",
                "add",
                "mwa",
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "mwb",
                "netns",
                names[1],
            )
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"network namespaces can't be made here: {error}")
        for name, link, address, folder in zip(
            names, ("mwa", "mwb"), ADDRESSES, folders, strict=True
        ):
            inside = ("netns", "exec", name, "ip")
            ip(*inside, "addr", "add", f"{address}/24", "dev", link)
            ip(*inside, "link", "set", link, "up")
            ip(*inside, "link", "set", "lo", "up")
            folder.mkdir(parents=True)
            hosts = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            (folder / "hosts").write_text(hosts)
        yield names
    finally:
        for name, folder in zip(names, folders, strict=True):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


def test_two_hosts(namespaces: tuple[str, str], alone: list[float], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, str(script), "data=4,model=2"],
            env=environment(
                MESHWRIGHT_PROCESSES="2",
                MESHWRIGHT_PROCESS=str(k),
                MESHWRIGHT_COORDINATOR=f"{ADDRESSES[0]}:8476",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k, name in enumerate(namespaces)
    ]
    try:
        text = "".join(child.communicate(timeout=240)[0] for child in running)
    finally:
        for child in running:
            child.kill()
    assert [child.returncode for child in running] == [0, 0], text[-3000:]
    check(text, alone)
