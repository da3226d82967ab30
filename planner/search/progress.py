"""Progress reports of a search, and early stopping.

A search reports regularly to the monitor of its context. It returns its best choice soon after
``should_stop()`` turns true, just as when its time is up::

    while better and not time_is_up(deadline):
        ...
        progress = SearchProgress(elapsed_s, cost_s, lower_bound_s, feasible, "block 3 of 40")
        current().report(progress)

To receive reports, install a monitor around the call::

    monitor = Monitor(print)
    with monitored(monitor):  # elsewhere: monitor.stop(), from any thread or a signal handler
        solution = dynamic_programming(problem)

Without a monitor, reports are dropped and the search is not stopped early.  A thread that a search
starts does not inherit the context: pass it the monitor.  A search that calls another one on a
different problem (a block, a relaxation) does so under ``silenced()``: only costs and bounds of the
original problem are reported, and stopping still works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class SearchProgress:
    """The progress of a search.

    Attributes:
        elapsed_s: seconds since the search began.
        cost_s: cost of the best choice so far; infinite while there is none.
        lower_bound_s: proved lower bound of every feasible cost; minus infinity while there is
            none.
        feasible: whether the best choice respects the memory limit and all forbidden entries.
        note: the current activity, in a few words.
    """

    elapsed_s: float
    cost_s: float
    lower_bound_s: float
    feasible: bool
    note: str


class Monitor:
    """Receives reports and holds a stop flag; thread-safe.

    Args:
        on_report: called with every report, one at a time, in the thread that reports; it should
            return at once.  None: reports are dropped.
    """

    def __init__(self, on_report: Callable[[SearchProgress], None] | None = None) -> None:
        self._on_report = on_report
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def report(self, progress: SearchProgress) -> None:
        """Report progress; cheap enough for a few hundred calls per second."""
        if self._on_report is not None:
            with self._lock:
                self._on_report(progress)

    def stop(self) -> None:
        """Make the search return its best choice so far."""
        self._stop.set()

    def should_stop(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stop.is_set()


class _Silenced(Monitor):
    """Drops reports; stops with another monitor."""

    def __init__(self, outer: Monitor) -> None:
        super().__init__()
        self._stop = outer._stop


_CURRENT: ContextVar[Monitor | None] = ContextVar("monitor", default=None)


def current() -> Monitor:
    """The monitor of this context, or one that drops reports and never stops."""
    return _CURRENT.get() or Monitor()


def time_is_up(deadline: float) -> bool:
    """Whether ``time.monotonic()`` has reached a deadline or the current monitor is stopped."""
    return time.monotonic() >= deadline or current().should_stop()


@contextmanager
def monitored(monitor: Monitor) -> Iterator[Monitor]:
    """Make ``monitor`` the current one inside a ``with`` block."""
    token = _CURRENT.set(monitor)
    try:
        yield monitor
    finally:
        _CURRENT.reset(token)


@contextmanager
def silenced() -> Iterator[Monitor]:
    """Drop reports inside the block; stopping the outer monitor still works."""
    with monitored(_Silenced(current())) as monitor:
        yield monitor
