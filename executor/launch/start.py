"""Start a job with a launcher, and restart it after a failure."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from executor.launch.job import AGAIN, Job, JobStop, Launcher, LaunchError, Outcome, Show, free_port
from executor.launch.local import Local
from executor.launch.supervise import supervise

__all__ = ["Job", "Outcome", "free_port", "launch", "run_local", "stopping"]

PAUSE_S = 10.0
"""Seconds before the next try when hosts do not answer."""


def run_local(job: Job, show: Show) -> Outcome:
    """Run a job once, on this host.

    Args:
        job: what to start.
        show: called with (process, line) for each line of output.

    Raises:
        LaunchError: the program can't be started, or the log folder can't be created.
    """
    return launch(job, Local(), show)


def launch(
    job: Job,
    launcher: Launcher,
    show: Show,
    *,
    max_restarts: int = 0,
    stop: JobStop | None = None,
    tell: Callable[[Outcome, int], None] = lambda outcome, left: None,
) -> Outcome:
    """Run a job, and restart it after a failure.

    Args:
        job: what to start.
        launcher: turns the job into tasks.
        show: called with (process, line) for each line of output.
        max_restarts: maximum number of restarts.
        stop: the stop signals received (see ``stopping``); None: there are never any.
        tell: called after every failed start with its outcome and the number of restarts left.

    Returns:
        The outcome of the last start.

    Raises:
        LaunchError: the first start or the last allowed restart was not possible.
    """
    stop = stop or JobStop()
    failed: list[str] = []
    for restart in range(max_restarts + 1):
        left = max_restarts - restart
        try:
            start = launcher.start(job, restart, failed)
        except LaunchError as error:
            if restart == 0 or left == 0 or stop.asked:
                raise
            show(None, f"{error}; trying again")
            _sleep(PAUSE_S, stop)
            continue
        if stop.asked:
            return Outcome(stop.code, None, (), (), stopped=stop.asked)
        outcome = supervise(job, start, show, stop=stop, append=restart > 0)
        if outcome.code == 0 or outcome.stopped:
            return outcome
        failed.append("" if outcome.code == AGAIN and not outcome.lost else outcome.host)
        tell(outcome, left)
    return outcome


def _sleep(seconds: float, stop: JobStop) -> None:
    until = time.monotonic() + seconds
    while not stop.asked and time.monotonic() < until:
        time.sleep(0.1)


@contextlib.contextmanager
def stopping() -> Iterator[JobStop]:
    """Record SIGINT and SIGTERM for a supervisor to act on, instead of ending this process. Use it
    in the main thread."""
    stop = JobStop()

    def note(number: int, frame: FrameType | None) -> None:
        stop.ask(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
