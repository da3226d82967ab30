"""Running a long call: shows its progress on stderr, and stops it at Ctrl-C.

The work runs in a thread, so that signals and the display are handled while it computes. The first
Ctrl-C stops the search through its monitor, and the best result so far is returned; the second one
raises KeyboardInterrupt.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, TypeVar

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from planner.search.progress import Monitor, SearchProgress, monitored

T = TypeVar("T")
Line = Callable[[SearchProgress | None, float], str]
"""The line to show, from the last report and the seconds since the start."""

SHOW_AFTER_S = 1.5
LINE_EVERY_S = 10.0
AGAIN_AFTER_S = 0.3
"""Seconds after which another Ctrl-C counts as a second one: a parent process may forward its
signal, so that one Ctrl-C arrives twice."""
_TICK_S = 0.1


class _Work(Generic[T]):
    """A call in a separate thread, under a monitor."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.last: SearchProgress | None = None
        self.results: list[T] = []
        self.errors: list[BaseException] = []
        self.monitor = Monitor(self._note)
        self.thread = threading.Thread(target=self._run, name="search", daemon=True)

    def _note(self, progress: SearchProgress) -> None:
        self.last = progress

    def _run(self) -> None:
        try:
            with monitored(self.monitor):
                self.results.append(self.call())
        except BaseException as error:
            self.errors.append(error)


def run_watched(call: Callable[[], T], line: Line, limit_s: float) -> tuple[T, bool]:
    """Call something under a monitor.

    Args:
        call: takes no arguments; reports to the monitor of its context and obeys its stop request.
        line: makes the line to show, on stderr: in place on a terminal, else every ten seconds.
        limit_s: seconds after which the monitor stops the call, in case it exceeds its limit.

    Returns:
        The result of the call, and whether Ctrl-C stopped it.

    Raises:
        KeyboardInterrupt: at the second Ctrl-C; the thread keeps running.
    """
    work = _Work(call)
    begun = time.monotonic()
    show = _Terminal() if Console(stderr=True).is_terminal else _Lines()
    with _interrupts(work.monitor) as interrupted:
        work.thread.start()
        try:
            while work.thread.is_alive():
                work.thread.join(_TICK_S)
                elapsed = time.monotonic() - begun
                if elapsed >= limit_s:
                    work.monitor.stop()
                text = line(work.last, elapsed)
                show.update(f"{text}, stopping" if interrupted else text, elapsed)
        finally:
            show.close()
    if work.errors:
        raise work.errors[0]
    return work.results[0], bool(interrupted)


@contextmanager
def _interrupts(monitor: Monitor) -> Iterator[list[float]]:
    """Stop the monitor at Ctrl-C and raise at a second one; yields a list for the first one's
    time."""
    came: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield came  # only the main thread handles signals
        return

    def handle(number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if came and now - came[0] >= AGAIN_AFTER_S:
            raise KeyboardInterrupt
        if not came:
            came.append(now)
            monitor.stop()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


class _Terminal:
    """A spinner and the line, drawn in place once the work takes longer than a moment."""

    def __init__(self) -> None:
        self.spinner = Spinner("line")
        self.live: Live | None = None

    def update(self, text: str, elapsed_s: float) -> None:
        self.spinner.update(text=text)
        if self.live is None and elapsed_s >= SHOW_AFTER_S:
            self.live = Live(
                self.spinner,
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self.live.start()

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()


class _Lines:
    """A plain line every ``LINE_EVERY_S`` seconds."""

    def __init__(self) -> None:
        self.due_s = LINE_EVERY_S

    def update(self, text: str, elapsed_s: float) -> None:
        if elapsed_s >= self.due_s:
            self.due_s += LINE_EVERY_S
            print(f"planner: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is left open."""
