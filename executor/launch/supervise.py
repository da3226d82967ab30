"""Run the tasks of one start, watch them, report the first failure, and leave no task behind.

Every task runs under a guard (``guard``), which also ends it when this process dies. Output goes to
one log per process, and line by line to one stream. After the first failure, the other tasks have a
moment to end by themselves. Then they are signaled to end, and finally killed.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from executor.launch import guard
from executor.launch.job import (
    AGAIN,
    Job,
    JobStop,
    LaunchError,
    Outcome,
    OutputLine,
    Show,
    Start,
    Task,
)

KEPT, TAIL = 200, 20
"""Lines stored per process; lines shown again for a failure without a traceback."""
WAITING = 10_000
"""Maximum number of lines that wait to be shown; beyond it, the processes block."""
POLL_S = 0.1
HELD_S = 2.0
LATE_S = 10.0
"""Seconds that a guard has beyond those of its command before the guard itself is killed."""


LOST = re.compile(r"meshwright: process (\d+) \(pid \d+ on (\S+)\) was lost: (.*)\. process \d+ ")
"""How a process reports a lost one (``processes.failure_detection``): number, host, reason."""


class _Failure(NamedTuple):
    process: int | None
    code: int
    host: str


def supervise(
    job: Job, start: Start, show: Show, *, stop: JobStop | None = None, append: bool = False
) -> Outcome:
    """Run one start of a job to its end.

    Args:
        job: gives the log folder and the time limits.
        start: the tasks to run.
        show: called with (process, line) for each line of output.
        stop: the stop signals received; None: there are never any.
        append: append to existing logs.

    Raises:
        LaunchError: a program does not exist, or the log folder can't be created.
    """
    for task in start.tasks:
        if shutil.which(task.command[0], path=task.environment.get("PATH")) is None:
            raise LaunchError(f"cannot start {task.command[0]}: no such program")
    with _logs(job.logs, start.processes, append) as logs:
        watch = _Watch(job, start.tasks, show, stop or JobStop(), logs)
        try:
            watch.start()
            watch.run()
        finally:
            watch.end()
    return watch.outcome()


class _Watch:
    """The guards of one start, and their output and exit codes so far."""

    def __init__(
        self, job: Job, tasks: tuple[Task, ...], show: Show, stop: JobStop, logs: list[IO[str]]
    ) -> None:
        self.job, self.tasks, self.show, self.stop, self.logs = job, tasks, show, stop, logs
        self.guards: list[subprocess.Popen[str]] = []
        self.events: queue.Queue[tuple[int, OutputLine | int]] = queue.Queue(WAITING)
        self.codes: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self.failures: list[_Failure] = []
        self.first: _Failure | None = None
        self.lost: re.Match[str] | None = None
        self.tails: dict[int, list[str]] = {}
        self.recent: collections.deque[str] = collections.deque(maxlen=TAIL)

    def start(self) -> None:
        for place, task in enumerate(self.tasks):
            one = _guarded(task, self.job.stop_s)
            self.guards.append(one)
            words = (place, task, one, self.events)
            threading.Thread(target=_read, args=words, daemon=True).start()

    def run(self) -> None:
        """Watch until all tasks have ended; end them after a failure or a stop signal."""
        tell_at = kill_at = drop_at = float("inf")
        stopping = killed = False
        while len(self.codes) < len(self.tasks):
            idle = not self._next()
            now = time.monotonic()
            if idle:
                self._notice(now)
            if not stopping:
                self.first = _choose(self.failures)
                if self.first is not None and tell_at == float("inf"):
                    tell_at = now + self.job.grace_s
                if self.stop.asked or now >= tell_at:
                    stopping, kill_at = True, now + self.job.grace_s
                    if self.stop.asked:
                        self.first, kill_at = None, now + self.job.stop_s
                    self._say("T")
            if stopping and not killed and (now >= kill_at or self.stop.now):
                killed, drop_at = True, now + LATE_S
                self._say("K")
            if now >= drop_at:
                return
        if not stopping:
            self.first = _choose(self.failures)

    def end(self) -> None:
        """Leave nothing running, whatever happened."""
        for one in self.guards:
            with contextlib.suppress(OSError):
                if one.stdin is not None:
                    one.stdin.close()
        until = time.monotonic() + guard.LOST_S + LATE_S
        for one in self.guards:
            try:
                one.wait(max(0.05, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        while self._next(0.0):
            pass

    def outcome(self) -> Outcome:
        codes = tuple(self.codes.get(place, _code(one)) for place, one in enumerate(self.guards))
        if self.stop.asked and (any(codes) or self.failures):
            return Outcome(self.stop.code, None, (), codes, stopped=self.stop.asked)
        if self.first is None:
            return Outcome(0, None, (), codes)
        code, process, host = self.first.code, self.first.process, self.first.host
        if code == AGAIN and self.lost is not None:  # no failure: one is frozen or unreachable
            process, host, how = int(self.lost[1]), self.lost[2], self.lost[3]
            host = next((t.host for t in self.tasks if t.process == process), host)
            return Outcome(code, process, (self.lost.string,), codes, host, lost=how)
        tail = tuple(self.recent) if process is None else _tail(self.tails.get(process, []))
        return Outcome(code, process, tail, codes, host)

    def _notice(self, now: float) -> None:
        """Record guards that have ended while something still holds their output open."""
        for place, one in enumerate(self.guards):
            if place not in self.codes and one.poll() is not None:
                since = self.ended.setdefault(place, now)
                if now - since > HELD_S:
                    self._ended(place, _code(one))

    def _say(self, letter: str) -> None:
        for place, one in enumerate(self.guards):
            with contextlib.suppress(OSError):
                if place not in self.codes and one.stdin is not None:
                    one.stdin.write(letter + "\n")
                    one.stdin.flush()

    def _next(self, wait_s: float = POLL_S) -> bool:
        try:
            place, what = self.events.get(timeout=wait_s) if wait_s else self.events.get_nowait()
        except queue.Empty:
            return False
        if isinstance(what, int):
            self._ended(place, what)
            return True
        if what.failed is not None:
            self.failures.append(_Failure(*what.failed, self.tasks[place].host))
        self.lost = self.lost or LOST.search(what.text)
        self.recent.append(what.text)
        if what.process is not None:
            tail = self.tails.setdefault(what.process, [])
            tail[:] = [*tail[1 - KEPT :], what.text]
            if what.process < len(self.logs):
                self.logs[what.process].write(what.text + "\n")
        self.show(what.process, what.text)
        return True

    def _ended(self, place: int, code: int) -> None:
        if place in self.codes:
            return
        self.codes[place] = code
        task = self.tasks[place]
        told_by_lines = task.process is None and self.failures
        if code and not told_by_lines:
            self.failures.append(_Failure(task.process, code, task.host))


def _choose(failures: list[_Failure]) -> _Failure | None:
    """The first failure that is more than a request to restart (AGAIN), else the first."""
    return next((f for f in failures if f.code != AGAIN), failures[0] if failures else None)


def _tail(lines: list[str]) -> tuple[str, ...]:
    """The last traceback and what follows it; without one, the last lines."""
    starts = [k for k, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    return tuple(lines[starts[-1] :] if starts else lines[-TAIL:])


def _guarded(task: Task, stop_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, *task.flags, str(stop_s), *task.command],
        env=dict(task.environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _read(
    place: int,
    task: Task,
    one: subprocess.Popen[str],
    events: queue.Queue[tuple[int, OutputLine | int]],
) -> None:
    assert one.stdout is not None
    for line in one.stdout:
        text = line.rstrip("\r\n")
        events.put((place, task.read(text) if task.read else OutputLine(task.process, text)))
    events.put((place, _code(one)))


def _code(one: subprocess.Popen[str]) -> int:
    code = one.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _logs(folder: Path | None, processes: int, append: bool) -> Iterator[list[IO[str]]]:
    if folder is None:
        yield []
        return
    with contextlib.ExitStack() as stack:
        logs: list[IO[str]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for k in range(processes):
                path, mode = folder / f"worker-{k}.out", "a" if append else "w"
                logs.append(stack.enter_context(open(path, mode, encoding="utf-8", buffering=1)))
        except OSError as error:
            raise LaunchError(f"cannot write logs to {folder}: {error.strerror}") from error
        yield logs
