"""Stop all processes after the same step when one of them receives SIGTERM.

Steps are programs over all processes, so no process may stop before another needs it. The process
that receives SIGTERM notifies process 0, which queries all processes. Each answers at once, from a
thread, with the step that it has begun, and does not begin another until it knows the greatest of
all answers: that step is the last for all. An answer never waits for a step, so it does not matter
which processes are ahead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

import jax

from executor.processes import failure_detection

Place = tuple[int, int]
"""The number of a run in this process (the same in all processes), and the number of a step."""
_runs = 0


class Agreement:
    """The agreement of the processes on their last step."""

    def __init__(self, watch: failure_detection.Watch) -> None:
        self.watch = watch
        self.changed = threading.Condition()  # reentrant
        self.begun: Place = (0, 0)
        self.asked = False
        self.places: dict[int, Place] = {}
        self.last: Place | None = None
        watch.hear = self.hear

    def request(self) -> None:
        """Start the agreement, because this process received SIGTERM; from any thread."""
        if self.watch.me.process == 0:
            self._ask()
        else:
            self.watch.lines[0].send({"ends": self.watch.me.process})

    def hear(self, process: int, message: dict[str, Any]) -> None:
        """Handle a message of another process."""
        if "ends" in message:
            self._ask()
        elif "where" in message:
            with self.changed:
                self.asked = True
                self.watch.lines[0].send({"at": self.begun})
        elif "at" in message:
            self._note(process, tuple(message["at"]))
        elif "last" in message:
            with self.changed:
                self.last = tuple(message["last"])
                self.changed.notify_all()

    def reached(self, place: Place) -> bool:
        """Whether to stop here; if not, the next step counts as begun. Once an agreement has
        started, waits for the answers of the others."""
        with self.changed:
            if self.asked:
                self.changed.wait_for(lambda: self.last is not None)
                assert self.last is not None
                if place >= self.last:
                    return True
            self.begun = (place[0], place[1] + 1)
            return False

    def _ask(self) -> None:
        """In process 0: query all processes, once."""
        with self.changed:
            if self.asked:
                return
            self.asked = True
            for line in tuple(self.watch.lines.values()):
                line.send({"where": True})
            self._note(0, self.begun)

    def _note(self, process: int, place: Place) -> None:
        """In process 0: record an answer; once all are there, the greatest place is the last for
        all."""
        with self.changed:
            self.places[process] = place
            if len(self.places) == self.watch.role.processes:
                self.last = max(self.places.values())
                for line in tuple(self.watch.lines.values()):
                    line.send({"last": self.last})
                self.changed.notify_all()


_agreement: Agreement | None = None


def join(watch: failure_detection.Watch) -> None:
    """Take part in agreements from now on; the answer before the first step is place (0, 0)."""
    global _agreement
    _agreement = Agreement(watch)


class Stop:
    """Whether to stop after a step, because SIGTERM reached this process or another.

    Use it as a context manager around the steps. It handles the signal only in the main thread,
    where signals arrive, and in a job of several processes only if they joined by ``initialize``.

    Args:
        saves: whether the state can be saved. If not, SIGTERM ends the process as usual.
    """

    def __init__(self, saves: bool) -> None:
        self.agreement = _agreement if jax.process_count() > 1 else None
        met = jax.process_count() == 1 or self.agreement is not None
        self.handles = saves and met and threading.current_thread() is threading.main_thread()
        self.came = threading.Event()
        self.before: Any = None
        self.run = 0

    def __enter__(self) -> Stop:
        global _runs
        if not self.handles:
            return self
        _runs += 1
        self.run = _runs
        self.before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.handles:
            return
        signal.signal(signal.SIGTERM, self.before)
        stopped = kind is not None and issubclass(kind, SystemExit)
        if self.came.is_set() and not stopped:  # it came too late to stop after a step: end now
            with contextlib.suppress(ProcessLookupError):
                os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: the main thread may hold any lock, so another thread starts the
        agreement."""
        if not self.came.is_set():
            self.came.set()
            if self.agreement is not None:
                threading.Thread(target=self.agreement.request, daemon=True).start()

    def reached(self, step: int) -> bool:
        """Whether to stop after this step; call it before the first step and after every one. If
        not, the next one counts as begun."""
        if not self.handles:
            return False
        if self.agreement is None:
            return self.came.is_set()
        return self.agreement.reached((self.run, step))
