"""Start the processes of a job on this host, watch them, and leave none behind.

Every process is told by ``MESHWRIGHT_*`` who it is (``roles``). Its output goes to a log of its
own, and line by line with its number in front to one stream. The first that fails ends the job: the
others get a moment to end by themselves, then are told to, then are killed, with what they started.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from planner.errors import RequestError

TAIL = 20
"""Lines of the first failure that are shown again at the end."""


@dataclass(frozen=True)
class Job:
    """What to start.

    Attributes:
        command: program and arguments, the same in every process.
        processes: how many.
        devices: virtual CPU devices of each process; None leaves it to JAX.
        environment: variables added to this process's own.
        logs: folder for ``worker-N.out``; None keeps no logs.
        grace_s: seconds for the others to end once one has failed, and again once told to.
    """

    command: tuple[str, ...]
    processes: int
    devices: int | None = None
    environment: Mapping[str, str] | None = None
    logs: Path | None = None
    grace_s: float = 5.0


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        code: 0, or the exit code of the first process that failed (128 + signal if a signal did).
        process: that process, None if none failed.
        tail: its last lines of output.
        codes: the exit codes of all, in order.
    """

    code: int
    process: int | None
    tail: tuple[str, ...]
    codes: tuple[int, ...]


def free_port() -> int:
    """A TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment_of(job: Job, process: int, coordinator: str) -> dict[str, str]:
    """The environment of one process of a job."""
    env = {**os.environ, **(job.environment or {})}
    env |= {
        "MESHWRIGHT_PROCESSES": str(job.processes),
        "MESHWRIGHT_PROCESS": str(process),
        "MESHWRIGHT_LOCAL": str(process),
        "MESHWRIGHT_COORDINATOR": coordinator,
        "PYTHONUNBUFFERED": "1",
    }
    if job.devices is not None:
        env["JAX_PLATFORMS"] = "cpu"
        env["JAX_NUM_CPU_DEVICES"] = str(job.devices)
    return env


def run_local(job: Job, show: Callable[[int, str], None]) -> Outcome:
    """Run a job on this host.

    Args:
        job: what to start.
        show: told (process, line) as lines come.

    Raises:
        RequestError: the program can't be started, or the folder of logs not be made.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
    tails: list[list[str]] = [[] for _ in range(job.processes)]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(log) for log in _logs(job)]
        started: list[subprocess.Popen[str]] = []
        stack.callback(_end, started, job.grace_s)
        for process in range(job.processes):
            try:
                child = subprocess.Popen(
                    job.command,
                    env=environment_of(job, process, coordinator),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
            except OSError as error:
                raise RequestError(f"cannot start {job.command[0]}: {error.strerror}") from error
            started.append(child)
            threading.Thread(target=_read, args=(process, child, lines), daemon=True).start()
        first = _watch(started, lines, logs, tails, show, job.grace_s)
        if first is not None:
            _end(started, job.grace_s)
            _drain(lines, logs, tails, show)
    codes = tuple(_code(child) for child in started)
    if first is None:
        return Outcome(0, None, (), codes)
    return Outcome(codes[first], first, tuple(tails[first]), codes)


def _logs(job: Job) -> Iterator[IO[str]]:
    if job.logs is None:
        return iter([open(os.devnull, "w") for _ in range(job.processes)])
    try:
        job.logs.mkdir(parents=True, exist_ok=True)
        return iter(
            [
                open(job.logs / f"worker-{k}.out", "w", encoding="utf-8", buffering=1)
                for k in range(job.processes)
            ]
        )
    except OSError as error:
        raise RequestError(f"cannot write logs to {job.logs}: {error.strerror}") from error


def _read(
    process: int, child: subprocess.Popen[str], lines: queue.Queue[tuple[int, str | None]]
) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put((process, line.rstrip("\n")))
    lines.put((process, None))


def _note(
    item: tuple[int, str | None],
    logs: Sequence[IO[str]],
    tails: Sequence[list[str]],
    show: Callable[[int, str], None],
) -> None:
    process, line = item
    if line is None:
        return
    logs[process].write(line + "\n")
    tails[process][:] = [*tails[process][1 - TAIL :], line]
    show(process, line)


def _drain(
    lines: queue.Queue[tuple[int, str | None]],
    logs: Sequence[IO[str]],
    tails: Sequence[list[str]],
    show: Callable[[int, str], None],
) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            _note(lines.get(timeout=0.2), logs, tails, show)


def _watch(
    started: Sequence[subprocess.Popen[str]],
    lines: queue.Queue[tuple[int, str | None]],
    logs: Sequence[IO[str]],
    tails: Sequence[list[str]],
    show: Callable[[int, str], None],
    grace_s: float,
) -> int | None:
    """The first process that failed, once it has and the others had a moment; None if all ended
    well."""
    first: int | None = None
    until = float("inf")
    while True:
        with contextlib.suppress(queue.Empty):
            _note(lines.get(timeout=0.05), logs, tails, show)
        states = [child.poll() for child in started]
        failed = [k for k, state in enumerate(states) if state not in (None, 0)]
        if first is None and failed:
            first, until = failed[0], time.monotonic() + grace_s
        if all(state is not None for state in states) and lines.empty():
            _drain(lines, logs, tails, show)
            return first
        if time.monotonic() >= until:
            return first


def _end(started: Sequence[subprocess.Popen[str]], grace_s: float) -> None:
    """End every process, and what it started: told first, killed if it does not listen."""
    for code in (signal.SIGTERM, signal.SIGKILL):
        for child in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, code)
        deadline = time.monotonic() + grace_s
        for child in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.05, deadline - time.monotonic()))


def _code(child: subprocess.Popen[str]) -> int:
    code = child.poll()
    return 128 - code if code is not None and code < 0 else code or 0
