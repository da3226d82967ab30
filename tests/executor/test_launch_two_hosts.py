"""Launching by ssh on two hosts with a cable between them: network namespaces, an sshd in each."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.launch_sshd import Sshd, running_sshd
from tests.executor.launching import alive, gone, launcher_process, wait_for
from tests.executor.test_hosts import TRAIN
from tests.executor.test_launchers import ADDRESSES, alone, ip, namespaces

__all__ = ["alone", "namespaces"]
pytestmark = pytest.mark.slow


@pytest.fixture
def words(
    namespaces: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """The launcher's words for two processes, one on each host."""
    monkeypatch.chdir(tmp_path)
    servers: list[Sshd] = []
    with contextlib.ExitStack() as stack:
        for name, address in zip(namespaces, ADDRESSES, strict=True):
            inside = ["ip", "netns", "exec", name]
            servers.append(
                stack.enter_context(running_sshd(tmp_path, 2222, (address,), inside=inside))
            )
        hosts = servers[0].hosts(tmp_path, *ADDRESSES)
        options = f"--launcher-options={servers[0].options}"
        yield ["launch", "--launcher", "ssh", "--hosts", hosts, "-n", "2", options]


def test_a_training_on_two_hosts(
    words: list[str], namespaces: tuple[str, str], tmp_path: Path, alone: list[float]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    inside = ["ip", "netns", "exec", namespaces[0]]
    more = ["--devices-per-process", "4", "train.py", "data=4,model=2"]
    with launcher_process(words, *more, inside=inside) as launcher:
        out, told = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, out[-2000:] + told[-2000:]
    texts = [line.partition("] ")[2] for line in out.splitlines()]
    found = sorted(
        json.loads(text) for text in texts if text.startswith("[") and "Gloo" not in text
    )
    assert [(process, devices) for process, devices, _ in found] == [(0, 8), (1, 8)]
    for _, _, losses in found:
        assert losses == pytest.approx(alone, rel=1e-5)


HOLD = """
import os, sys, time
me, again = os.environ["MESHWRIGHT_PROCESS"], os.environ["MESHWRIGHT_RESTART"]
print("start", again, "of", os.environ["MESHWRIGHT_PROCESSES"])
with open(f"tmp{again}.{me}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"tmp{again}.{me}", f"pid{again}.{me}")
if again == "0":
    time.sleep(600)
while again == "1" and not os.path.exists("mended"):
    time.sleep(0.1)
sys.exit(1 if again == "1" else 0)
"""


@pytest.mark.timeout(400)
def test_a_cut_cable(words: list[str], namespaces: tuple[str, str], tmp_path: Path) -> None:
    """The other host is left out at the next start, its process ends there all the same, and it is
    taken back once the cable is mended."""
    (tmp_path / "hold.py").write_text(HOLD)
    cable = ("netns", "exec", namespaces[1], "ip", "link", "set", "mwb")
    more = ["--min-processes", "1", "--max-restarts", "3", "hold.py"]
    inside = ["ip", "netns", "exec", namespaces[0]]
    with launcher_process(words, *more, inside=inside) as launcher:
        here, there = (int(wait_for(tmp_path / f"pid0.{k}")) for k in (0, 1))
        assert alive(here) and alive(there)
        ip(*cable, "down")
        wait_for(tmp_path / "pid1.0", 120)
        gone(here)
        gone(there, within_s=90)
        ip(*cable, "up")
        os.close(os.open(tmp_path / "mended", os.O_CREAT))
        out, told = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, out + told
    assert f"process 1 on {ADDRESSES[1]} failed first, exited with 255" in told
    assert f"left out: {ADDRESSES[1]} (" in told and "1 of 2 processes" in told
    starts = sorted(line for line in out.splitlines() if "] start" in line)
    assert starts == [
        "[0] start 0 of 2",
        "[0] start 1 of 1",
        "[0] start 2 of 2",
        "[1] start 0 of 2",
        "[1] start 2 of 2",
    ]
