"""How many steps each process has begun: one that waits or has ended takes part in no more.

A step over several processes that one of them never calls would wait for ever. Who ends, or waits
for all others outside of a step, says how many steps it has begun. A process that has begun more
than that waits for it in vain, and ends the job with both their names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from executor.processes.sockets import Peer

SURE_S = 5.0
"""How long a process must have begun a step that another has not: a step that is called with new
shapes counts as begun until it is refused."""


class StepProgress:
    """The steps of this process, and where others are that take part in none.

    Args:
        me: this process.
        halt: ends the job, for a reason.
    """

    def __init__(self, me: Peer, halt: Callable[[str], None]) -> None:
        self.me, self.halt = me, halt
        self.begun = 0
        self.ended = False
        self.idle: dict[int, tuple[Peer, int, str]] = {}
        self.looking = threading.Lock()

    def begin(self) -> None:
        """A step over several processes is called."""
        self.begun += 1
        if self.idle:
            self._look()

    def refuse(self) -> None:
        """The step that was called has not been run."""
        self.begun -= 1

    def end(self) -> None:
        """This process takes part in no other step."""
        self.ended = True
        self._look()

    def hear(self, peer: Peer, after: int, why: str) -> None:
        """Another process has begun so many steps, and takes part in no other for now."""
        self.idle[peer.process] = (peer, after, why)
        self._look()

    def clear(self) -> None:
        """All have met: those that waited go on."""
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
    """Count the steps of this process there, from now on."""
    global _progress
    _progress = progress


def begin_step() -> None:
    """A step over several processes is called."""
    if _progress is not None:
        _progress.begin()


_doing: Callable[[], str] | None = None


def tell(doing: Callable[[], str] | None) -> None:
    """Who says what this process is doing inside of a step, for the word about a lost process."""
    global _doing
    _doing = doing


def doing() -> str:
    """What this process is doing, in words; empty if nobody says."""
    return "" if _doing is None else _doing()


def refuse_step() -> None:
    """The step that was called has not been run."""
    if _progress is not None:
        _progress.refuse()
