"""What the launchers' tests share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(*pids: int, within_s: float = 30) -> None:
    """Asserts that processes end soon."""
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if alive(pid)]


def wait_for(path: Path, within_s: float = 60) -> str:
    """A file's text, once it is there and not empty."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"no {path.name} in {sorted(os.listdir(path.parent))}")


@contextmanager
def launcher_process(
    words: Sequence[str], *script: str, inside: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """``planner launch`` as a process of its own; ``inside`` are words in front of it."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    child = subprocess.Popen(
        [*inside, sys.executable, "-m", "executor.cli", *words, *script],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
