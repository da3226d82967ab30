"""Jobs to start, the tasks that they need on this host, and their outcomes, as plain data."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from executor.launch import guard
from planner.errors import RequestError

AGAIN = 75
"""Exit code (EX_TEMPFAIL) of a process that saved and stopped, or lost a peer: start it again."""

Show = Callable[[int | None, str], None]
"""Called with (process, line) for each line of output; process None is the launching program."""


class LaunchError(RequestError):
    """A launcher can't start a job: a program, a host or a file is missing. The message says what
    to do."""


@dataclass(frozen=True)
class Job:
    """A job to start.

    Attributes:
        command: program and arguments, the same in every process.
        processes: number of processes.
        devices: virtual CPU devices of each process; None leaves it to JAX.
        environment: variables for every process.
        logs: folder for ``worker-N.out``; None writes no logs.
        grace_s: seconds for the other processes to end after one has failed, and again after they
            are signaled to end.
        stop_s: seconds for all processes to save and end after the launcher is signaled to stop.
    """

    command: tuple[str, ...]
    processes: int
    devices: int | None = None
    environment: Mapping[str, str] | None = None
    logs: Path | None = None
    grace_s: float = 5.0
    stop_s: float = 30.0


@dataclass(frozen=True)
class OutputLine:
    """A parsed line of a program's output.

    Attributes:
        process: the process that wrote it; None for the program itself.
        text: the line without the program's prefix.
        failed: (process, exit code) if the line reports a failure.
    """

    process: int | None
    text: str
    failed: tuple[int, int] | None = None


@dataclass(frozen=True)
class Task:
    """A program to run on this host under a guard: one process of the job, or a program that starts
    several.

    Attributes:
        command: program and arguments.
        environment: all of its variables.
        process: the number of the process; None if the program starts several.
        host: where that process runs, for messages; "" on this host.
        read: parses a line of its output, if the program starts several.
        flags: flags of its guard, if the program starts other guards.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    process: int | None = None
    host: str = ""
    read: Callable[[str], OutputLine] | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """One start of a job: its current number of processes, and the tasks that run them."""

    processes: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Outcome:
    """How a start of a job ended.

    Attributes:
        code: 0, or the exit code of the process that failed first (128 + signal if a signal ended
            it). A process that exited with another code than AGAIN takes precedence.
        process: that process, None if none failed or it is unknown.
        tail: its last lines of output, from the last traceback on if there is one.
        codes: the exit codes of all tasks, in order.
        host: where that process ran; "" on this host.
        stopped: the signal that stopped the launcher, 0 if there was none.
        lost: what the others reported of a process that did not end by itself; they exited with
            AGAIN.
    """

    code: int
    process: int | None
    tail: tuple[str, ...]
    codes: tuple[int, ...]
    host: str = ""
    stopped: int = 0
    lost: str = ""


@dataclass
class JobStop:
    """Signals that the launcher has received; set by handlers, read by the supervisor.

    Attributes:
        asked: the first signal, 0 if there is none yet.
        now: whether there was a second signal, which means kill.
    """

    asked: int = 0
    now: bool = False

    def ask(self, number: int) -> None:
        """Record a signal."""
        self.now = self.asked != 0
        self.asked = self.asked or number

    @property
    def code(self) -> int:
        """The launcher's exit code after the signal."""
        return 130 if self.asked == signal.SIGINT else AGAIN


class Launcher(Protocol):
    """Turns a job into tasks."""

    def start(self, job: Job, restart: int, failed: Sequence[str] = (), /) -> Start:
        """The tasks of start number ``restart`` (from 0). It may contact hosts and choose ports.

        ``failed`` are the hosts of the processes that failed first in earlier starts, in order; ""
        if a failure belongs to no host.

        Raises:
            LaunchError: the job can't be started.
        """
        ...


def roles(processes: int, process: int, local: int, coordinator: str) -> dict[str, str]:
    """The variables that give one process its role (``executor.processes.roles``)."""
    return {
        "MESHWRIGHT_PROCESSES": str(processes),
        "MESHWRIGHT_PROCESS": str(process),
        "MESHWRIGHT_LOCAL": str(local),
        "MESHWRIGHT_COORDINATOR": coordinator,
    }


def shared(job: Job, restart: int) -> dict[str, str]:
    """The variables that are the same in all processes, whichever launcher starts them."""
    devices = (
        {}
        if job.devices is None
        else {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(job.devices)}
    )
    restarts = {"MESHWRIGHT_RESTART": str(restart), "PYTHONUNBUFFERED": "1"}
    return {**(job.environment or {}), **restarts, **devices}


def outer() -> dict[str, str]:
    """This process's variables, without those that give a process its role or secret."""
    return {
        name: value
        for name, value in os.environ.items()
        if not re.fullmatch("MESHWRIGHT_(PROCESS|PROCESSES|LOCAL|COORDINATOR|SECRET_ONCE)", name)
    }


def sent(job: Job, python: str, *flags: str) -> list[str]:
    """The command line that runs a job's program under a guard on another host. It includes the
    guard's text."""
    source = Path(guard.__file__).read_text(encoding="utf-8")
    words = [python, "-I", "-S", "-c", source, *flags, str(job.stop_s)]
    return [*words, python, *job.command[1:]]


def reported(process: int, text: str) -> OutputLine:
    """A line of a process, or its guard's report of the exit code."""
    code = text.startswith(guard.REPORT) and text[len(guard.REPORT) :]
    if code and code.isdecimal():
        return OutputLine(None, f"process {process} exited with {code}", (process, int(code)))
    return OutputLine(process, text)


def need(program: str, package: str) -> str:
    """The path of a program that a launcher runs.

    Raises:
        LaunchError: it is not installed; names the Debian package.
    """
    path = shutil.which(program)
    if path is None:
        raise LaunchError(f"no {program} on this host; install it (Debian: {package})")
    return path


def free_port() -> int:
    """A TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
