"""Start a job with a launcher, and again after a failure."""

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
"""Before the next try where hosts do not answer."""


def run_local(job: Job, show: Show) -> Outcome:
    """Run a job once, on this host.

    Args:
        job: what to start.
        show: told (process, line) as lines come.

    Raises:
        LaunchError: the program can't be started, or the folder of logs not be made.
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
    """Run a job, and again after a failure.

    Args:
        job: what to start.
        launcher: how.
        show: told (process, line) as lines come.
        max_restarts: how often it may be started again.
        stop: what the launcher was told by signals; None is nothing, ever.
        tell: told of every failed start, with the number of restarts that are left.

    Returns:
        The last start's outcome.

    Raises:
        LaunchError: the first start, or the last that was allowed, was not possible.
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
    """SIGINT and SIGTERM are written down, for a supervisor to act on, instead of ending this
    process. For the main thread."""
    stop = JobStop()

    def note(number: int, frame: FrameType | None) -> None:
        stop.ask(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
