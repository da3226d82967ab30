"""Threads: the workers of a job without Ray, and one call at a time if a loop has several."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

END_S = 10.0
"""Seconds that the other workers have to end after one has failed."""

log = logging.getLogger("meshwright")
T = TypeVar("T")
P = ParamSpec("P")


class OneAtATime(Protocol):
    """An object with the lock that ``one_at_a_time`` needs."""

    one: threading.RLock


S = TypeVar("S", bound=OneAtATime)


def one_at_a_time(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate methods of an object so that only one thread at a time runs any of them."""

    @functools.wraps(method)
    def in_turn(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.one:
            return method(self, *args, **kwargs)

    return in_turn


def together(life: Callable[[int], T], count: int, fail: Callable[[str], None]) -> list[T]:
    """Run ``life(0)``, ``life(1)`` and so on in one thread each; returns their results.

    Args:
        life: called with the number of its thread.
        count: number of threads.
        fail: called with the reason why the others must end, after one has raised or this thread
            was interrupted.

    Raises:
        BaseException: what the first thread to fail raised. A note names those that had not ended
            ``END_S`` later; a thread can't be killed, so they run until the process ends.
    """
    ended: queue.SimpleQueue[tuple[int, list[T], BaseException | None]] = queue.SimpleQueue()

    def live(number: int) -> None:
        try:
            ended.put((number, [life(number)], None))
        except BaseException as error:
            ended.put((number, [], error))

    running = set(range(count))
    returned: dict[int, T] = {}
    try:
        for number in range(count):
            name = f"worker-{number}"
            threading.Thread(target=live, args=(number,), name=name, daemon=True).start()
        while running:
            number, value, failed = ended.get()
            running.remove(number)
            if failed is not None:
                raise failed
            (returned[number],) = value
    except BaseException as error:
        fail(f"the job has failed: {type(error).__name__}: {error}")
        until = time.monotonic() + END_S
        with contextlib.suppress(queue.Empty):
            while running:
                running.remove(ended.get(timeout=max(0.0, until - time.monotonic()))[0])
        if running:
            who = ", ".join(map(str, sorted(running)))
            note = f"still at work {END_S:g} s later, and until this process ends: worker {who}"
            log.error("%s: %s; %s", type(error).__name__, error, note)
            error.add_note(note)
        raise
    return [returned[number] for number in range(count)]
