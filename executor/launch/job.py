"""What is to be started, what that takes on this host, and how it ended. Plain data."""

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
"""Told (process, line) as lines come; None is the launching program itself."""


class LaunchError(RequestError):
    """A launcher can't start a job: a program, a host or a file is missing; says what to do."""


@dataclass(frozen=True)
class Job:
    """What to start.

    Attributes:
        command: program and arguments, the same in every process.
        processes: how many.
        devices: virtual CPU devices of each process; None leaves it to JAX.
        environment: variables for every process.
        logs: folder for ``worker-N.out``; None keeps no logs.
        grace_s: seconds for the others to end once one has failed, and again once told to.
        stop_s: seconds for all to save and end once the launcher is told to stop.
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
    """A line of a program's output, understood.

    Attributes:
        process: whose it is; None for the program's own.
        text: without what the program put in front.
        failed: (process, exit code) where the line tells of a failure.
    """

    process: int | None
    text: str
    failed: tuple[int, int] | None = None


@dataclass(frozen=True)
class Task:
    """A program to run on this host under a guard: one process of the job, or what carries several.

    Attributes:
        command: program and arguments.
        environment: all of its variables.
        process: the process it is; None if it carries several.
        host: where that process runs, for people; "" on this host.
        read: understands a line of its output, where it carries several.
        flags: for its guard, where it is what starts other guards.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    process: int | None = None
    host: str = ""
    read: Callable[[str], OutputLine] | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """One start of a job: how many processes it has now, and the tasks that make them."""

    processes: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Outcome:
    """How a start of a job ended.

    Attributes:
        code: 0, or the exit code of the process that failed first (128 + signal if a signal did);
            one that did not merely ask to be started again goes before those that did.
        process: that process, None if none failed or nothing says which.
        tail: its last lines of output, from the last traceback on if there is one.
        codes: the exit codes of all tasks, in order.
        host: where that process ran; "" on this host.
        stopped: the signal that the launcher was told to stop by, 0 if it was not.
        lost: what the others said of a process that did not end by itself; they ended with AGAIN.
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
    """What the launcher was told by signals; changed by handlers, read by the supervisor.

    Attributes:
        asked: the first signal, 0 as long as there was none.
        now: told again: kill.
    """

    asked: int = 0
    now: bool = False

    def ask(self, number: int) -> None:
        """A signal came."""
        self.now = self.asked != 0
        self.asked = self.asked or number

    @property
    def code(self) -> int:
        """The launcher's own exit code then."""
        return 130 if self.asked == signal.SIGINT else AGAIN


class Launcher(Protocol):
    """What turns a job into tasks."""

    def start(self, job: Job, restart: int, failed: Sequence[str] = (), /) -> Start:
        """The tasks of start number ``restart`` (from 0). It may ask hosts and choose ports.

        ``failed`` are the hosts of the processes that failed first so far, in order; "" where a
        failure is no host's.

        Raises:
            LaunchError: the job can't be started.
        """
        ...


def roles(processes: int, process: int, local: int, coordinator: str) -> dict[str, str]:
    """The variables that tell one process who it is (``executor.processes.roles``)."""
    return {
        "MESHWRIGHT_PROCESSES": str(processes),
        "MESHWRIGHT_PROCESS": str(process),
        "MESHWRIGHT_LOCAL": str(local),
        "MESHWRIGHT_COORDINATOR": coordinator,
    }


def shared(job: Job, restart: int) -> dict[str, str]:
    """The variables that are the same in all processes, whoever starts them."""
    devices = (
        {}
        if job.devices is None
        else {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(job.devices)}
    )
    restarts = {"MESHWRIGHT_RESTART": str(restart), "PYTHONUNBUFFERED": "1"}
    return {**(job.environment or {}), **restarts, **devices}


def outer() -> dict[str, str]:
    """This process's variables, without those that tell a process who it is."""
    return {
        name: value
        for name, value in os.environ.items()
        if not re.fullmatch("MESHWRIGHT_(PROCESS|PROCESSES|LOCAL|COORDINATOR|SECRET_ONCE)", name)
    }


def sent(job: Job, python: str, *flags: str) -> list[str]:
    """The words that run a job's program under a guard on another host, the guard's text among
    them."""
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
        LaunchError: it is not installed; names where Debian has it.
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
