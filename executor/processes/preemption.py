"""Stop all processes after the same step, when one of them is told to end (SIGTERM).

Steps are programs over all processes, so none may stop before another needs it. Who is told asks
process 0, which asks everybody. Each says at once, from a thread, which step it has begun, and does
not begin another until it knows the greatest of all answers: that step is the last for all. Nobody
waits for a step in order to answer, so it does not matter who is ahead and who is behind.
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
"""Which run of this process (counted alike in all), and the number of a step."""
_runs = 0


class Agreement:
    """What the processes know of each other's place."""

    def __init__(self, watch: failure_detection.Watch) -> None:
        self.watch = watch
        self.changed = threading.Condition()  # reentrant
        self.begun: Place = (0, 0)
        self.asked = False
        self.places: dict[int, Place] = {}
        self.last: Place | None = None
        watch.hear = self.hear

    def request(self) -> None:
        """This process was told to end; from any thread."""
        if self.watch.me.process == 0:
            self._ask()
        else:
            self.watch.lines[0].send({"ends": self.watch.me.process})

    def hear(self, process: int, message: dict[str, Any]) -> None:
        """What another process says."""
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
        """Whether to stop here; else the next step counts as begun. Waits for the answers of the
        others once somebody asked."""
        with self.changed:
            if self.asked:
                self.changed.wait_for(lambda: self.last is not None)
                assert self.last is not None
                if place >= self.last:
                    return True
            self.begun = (place[0], place[1] + 1)
            return False

    def _ask(self) -> None:
        """In process 0: ask everybody, once."""
        with self.changed:
            if self.asked:
                return
            self.asked = True
            for line in tuple(self.watch.lines.values()):
                line.send({"where": True})
            self._note(0, self.begun)

    def _note(self, process: int, place: Place) -> None:
        """In process 0: once all have answered, the greatest place is the last for all."""
        with self.changed:
            self.places[process] = place
            if len(self.places) == self.watch.role.processes:
                self.last = max(self.places.values())
                for line in tuple(self.watch.lines.values()):
                    line.send({"last": self.last})
                self.changed.notify_all()


_agreement: Agreement | None = None


def join(watch: failure_detection.Watch) -> None:
    """Take part in agreements, from now on: who is asked before its first step answers after it."""
    global _agreement
    _agreement = Agreement(watch)


class Stop:
    """Whether to stop after a step, because SIGTERM came to this process or to another. A context
    manager around the steps; only in the main thread, where signals come, and in a job of several
    processes only if they joined by ``initialize``.

    Args:
        saves: whether there is somewhere to save to. If not, SIGTERM ends the process as ever.
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
        if self.came.is_set() and not stopped:  # too late to stop after a step: end as told
            with contextlib.suppress(ProcessLookupError):
                os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: the main thread may hold any lock, so another thread goes on."""
        if not self.came.is_set():
            self.came.set()
            if self.agreement is not None:
                threading.Thread(target=self.agreement.request, daemon=True).start()

    def reached(self, step: int) -> bool:
        """Whether to stop after this step; asked before the first and after every one. If not, the
        next one is begun."""
        if not self.handles:
            return False
        if self.agreement is None:
            return self.came.is_set()
        return self.agreement.reached((self.run, step))
