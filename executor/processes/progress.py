"""Counts the steps that each process has begun, to detect processes that wait in vain.

A step over several processes would hang if one of them never called it. A process that ends, or
waits for all others outside of a step, reports how many steps it has begun. A process that has
begun more than that waits for it in vain, and ends the job with an error that names both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from executor.processes.sockets import Peer

SURE_S = 5.0
"""How long a process must have begun a step that another has not before that is an error: a step
that is called with new shapes counts as begun until it is refused."""


class StepProgress:
    """The steps of this process, and the last step of each process that takes part in no further
    one.

    Args:
        me: this process.
        halt: ends the job, for a given reason.
    """

    def __init__(self, me: Peer, halt: Callable[[str], None]) -> None:
        self.me, self.halt = me, halt
        self.begun = 0
        self.ended = False
        self.idle: dict[int, tuple[Peer, int, str]] = {}
        self.looking = threading.Lock()

    def begin(self) -> None:
        """Count a step over several processes that is called."""
        self.begun += 1
        if self.idle:
            self._look()

    def refuse(self) -> None:
        """Uncount the last step, which was called but not run."""
        self.begun -= 1

    def end(self) -> None:
        """Note that this process takes part in no further step."""
        self.ended = True
        self._look()

    def hear(self, peer: Peer, after: int, why: str) -> None:
        """Note that another process has begun ``after`` steps and takes part in no other for
        now."""
        self.idle[peer.process] = (peer, after, why)
        self._look()

    def clear(self) -> None:
        """All processes have met: those that waited for that go on."""
        for process, (_, _, why) in tuple(self.idle.items()):
            if why != ENDED:
                self.idle.pop(process, None)

    def waits_in_vain(self) -> str | None:
        """Why this process waits for another in vain; None if it does not."""
        for peer, after, why in tuple(self.idle.values()):
            if self.begun > after:
                return (
                    f"{peer} {why} after {after} steps, {self.me} has begun step {self.begun}: "
                    "every process must call the steps equally often, with batches of the same "
                    "shapes; check that all have equally many rows"
                )
        return None

    def _look(self) -> None:
        text = self.waits_in_vain()
        if text is not None and self.ended:
            self.halt(text)
        elif text is not None and self.looking.acquire(blocking=False):
            timer = threading.Timer(SURE_S, self._look_again)
            timer.daemon = True
            timer.start()

    def _look_again(self) -> None:
        self.looking.release()
        text = self.waits_in_vain()
        if text is not None:
            self.halt(text)


ENDED = "has ended"

_progress: StepProgress | None = None


def count_steps(progress: StepProgress) -> None:
    """Count the steps of this process in ``progress`` from now on."""
    global _progress
    _progress = progress


def begin_step() -> None:
    """Count a step over several processes that is called."""
    if _progress is not None:
        _progress.begin()


_doing: Callable[[], str] | None = None


def tell(doing: Callable[[], str] | None) -> None:
    """Set the function that describes what this process does inside a step, for the report of a
    lost process."""
    global _doing
    _doing = doing


def doing() -> str:
    """What this process is doing, as text; empty if no function is set."""
    return "" if _doing is None else _doing()


def refuse_step() -> None:
    """Uncount the last step, which was called but not run."""
    if _progress is not None:
        _progress.refuse()
