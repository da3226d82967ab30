"""Training in several processes when something breaks: the end is that of the calm run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.executor.test_launchers import ADDRESSES, environment, ip
from tests.executor.test_launchers import namespaces as namespaces

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import faults  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> faults.Run:
    run = faults.launched(tmp_path_factory.mktemp("runs") / "calm", 2, None)
    assert run.code == 0, run.output
    assert run.result["seen"]["batches"] == faults.STEPS
    return run


@pytest.mark.parametrize("process", [0, 1])
def test_a_kill_in_a_save(process: int, calm: faults.Run, tmp_path: Path) -> None:
    run = faults.launched(tmp_path / "killed", 2, ("save", process, 0.0))
    assert run.unfinished, "the save had ended before the kill"
    assert run.noticed_s is not None and run.noticed_s < faults.DEADLINE_S, run.output
    assert f"process {process} (pid" in run.output
    assert run.result == calm.result, run.output
    assert run.steps == list(range(1, faults.STEPS + 1))


def test_sigterm_to_one_saves_all(calm: faults.Run, tmp_path: Path) -> None:
    run = faults.launched(tmp_path / "told", 2, ("save", 1, 0.0), signal.SIGTERM)
    assert "was lost" not in run.output
    assert (tmp_path / "told" / "pid-1-0").exists(), run.output  # it was started again
    assert run.result == calm.result, run.output
    assert run.steps == list(range(1, faults.STEPS + 1))


LOOP = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
from executor import initialize
role = initialize(timeout_s=60, deadline_s=float(sys.argv[1]))
from jax.experimental import multihost_utils
for k in range(100_000):
    multihost_utils.process_allgather(np.zeros(3))
    if k == 10:
        print("AT WORK", flush=True)
"""


def test_a_host_that_falls_silent(namespaces: tuple[str, str], tmp_path: Path) -> None:
    deadline_s = 8.0
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    logs = [tmp_path / f"{name}.txt" for name in namespaces]
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, str(script), str(deadline_s)],
            env=environment(
                MESHWRIGHT_PROCESSES="2",
                MESHWRIGHT_PROCESS=str(k),
                MESHWRIGHT_COORDINATOR=f"{ADDRESSES[0]}:8476",
            ),
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for k, (name, log) in enumerate(zip(namespaces, logs, strict=True))
    ]
    try:
        until = time.monotonic() + 120
        while not all("AT WORK" in log.read_text() for log in logs):
            assert time.monotonic() < until, [log.read_text() for log in logs]
            time.sleep(0.1)
        ip("netns", "exec", namespaces[1], "ip", "link", "set", "mwb", "down")
        for child in running:  # both end by themselves: neither reaches the other
            child.wait(timeout=10 * deadline_s)
    finally:
        for child in running:
            child.kill()
    for k, log in enumerate(logs):
        text = log.read_text()
        other = f"process {1 - k} (pid {running[1 - k].pid} on {socket.gethostname()})"
        assert other in text, text
