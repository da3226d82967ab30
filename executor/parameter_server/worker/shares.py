"""Which items a worker takes, one after the other: a fixed share, or items from a queue."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.parameter_server.jobs.threads import one_at_a_time
from executor.parameter_server.server.answers import WaitError
from executor.parameter_server.server.clock import is_integer
from executor.parameter_server.transport.calls import ServerCalls
from executor.parameter_server.transport.ray_links import AGAIN_S
from executor.parameter_server.worker.queue import ItemRequest, Taken
from planner.errors import RequestError

HOW = ("fixed", "queue")
POLICIES = ("leave", "pad", "drop")


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)


def index_at(place: int, count: int, seed: int | None) -> int:
    """The item at a place in the order of all epochs."""
    epoch, within = divmod(place, count)
    return within if seed is None else int(_order(count, seed, epoch)[within])


def fixed(
    count: int, rank: int, workers: int, *, policy: str, epochs: int, seed: int | None
) -> Iterator[int]:
    """The items of one worker: in each epoch those whose place % workers equals its rank."""
    each = {
        "leave": count,
        "pad": -(-count // workers) * workers,
        "drop": count // workers * workers,
    }
    for epoch in range(epochs):
        # a reference: threads may be in more epochs than the cache of _order holds
        order = None if seed is None else _order(count, seed, epoch)
        for place in range(rank, each[policy], workers):
            item = place % count
            yield item if order is None else int(order[item])


def check_shares(
    count: int, workers: int, *, how: str, policy: str, epochs: int, seed: int | None
) -> None:
    """Refuse invalid arguments.

    Raises:
        RequestError: an argument is invalid; says which.
    """
    if how not in HOW or policy not in POLICIES:
        raise RequestError(
            f"shares: how={how!r}, policy={policy!r}: expected how {' or '.join(HOW)}, policy "
            f"{', '.join(POLICIES)}"
        )
    if how == "queue" and policy != "leave":
        raise RequestError(
            f"shares: policy={policy!r} with how='queue': who takes how many is not known before; "
            "leave it out, or how='fixed'"
        )
    for name, value in (("epochs", epochs), ("seed", seed)):
        if not is_integer(value) and (value is not None or name == "epochs"):
            raise RequestError(
                f"shares: {name}={value!r}: got {type(value).__name__}, expected a whole number"
            )
    if count < 1 or epochs < 1 or (seed is not None and seed < 0):
        raise RequestError(
            f"shares: {count} items, epochs={epochs}, seed={seed}: expected at least one item and "
            "one epoch, and a seed from 0 on or None"
        )
    if policy == "drop" and count < workers:
        raise RequestError(
            f"shares: {count} items for {workers} workers with policy='drop': nobody would have "
            "any; expected 'pad' or 'leave', or more items"
        )


def queued(
    wanted: ItemRequest,
    take: Callable[[int | None], Taken],
    away: Callable[[], None],
    join: Callable[[], None],
    give_back: Callable[[], None],
    wait_s: float,
) -> Iterator[int]:
    """The items that a queue gives to a worker.

    Args:
        wanted: the request for items.
        take: takes the next place from the queue, given the finished place.
        away, join: mark this worker as away while others have the last items, so that synchronous
            training does not wait for its pushes.
        give_back: returns the current item to the queue if the loop ends within it.
        wait_s: deadline, in seconds, since the items of other workers last changed.

    Raises:
        WaitError: the deadline passed; says which worker has which item.
    """
    place = None
    while True:
        held: Mapping[int, int] = {}
        until = 0.0
        while (taken := take(place)).held:
            if taken.held != held:
                held, until = taken.held, time.monotonic() + wait_s
            elif time.monotonic() > until:
                names = (
                    f"worker {w} has item {index_at(p, wanted.count, wanted.seed)}"
                    for w, p in sorted(held.items())
                )
                raise WaitError(
                    f"waited {wait_s:g} s for the end of a queue: {', '.join(names)}; an item may "
                    "take no longer than wait_s"
                )
            away()
            time.sleep(AGAIN_S)
        if held:
            join()
        if taken.place is None:
            return
        place = taken.place
        try:
            yield index_at(place, wanted.count, wanted.seed)
        except GeneratorExit:
            give_back()
            raise


class Shares:
    """The shares of one worker.

    Args:
        calls: the worker's calls to the servers.
        workers: number of workers.
        settle: waits for the worker's pending calls; runs before each request to a queue.
        wait_s: deadline of every wait, in seconds.
        one: lock, held during a request to a queue, which may come from a thread beside the loop.
    """

    def __init__(
        self,
        calls: ServerCalls,
        workers: int,
        settle: Callable[[], None],
        wait_s: float,
        one: threading.RLock,
    ) -> None:
        self._calls, self._workers, self._settle, self._wait_s = calls, workers, settle, wait_s
        self.one = one
        self._queues = 0

    def of(
        self, count: int, *, how: str, policy: str, epochs: int, seed: int | None
    ) -> Iterator[int]:
        """The items of the next share, out of ``count``; see ``ParameterServer.shares``."""
        check_shares(count, self._workers, how=how, policy=policy, epochs=epochs, seed=seed)
        whole = None if seed is None else int(seed)
        settings: dict[str, Any] = {"epochs": int(epochs), "seed": whole}
        if how == "fixed":
            return fixed(count, self._calls.rank, self._workers, policy=policy, **settings)
        self._queues += 1
        wanted = ItemRequest(self._queues, count, **settings)
        take = partial(self._take, wanted)
        back = partial(self._calls.give_back, wanted.queue)
        return queued(wanted, take, self._away, self._join, back, self._wait_s)

    @one_at_a_time
    def _away(self) -> None:
        self._calls.away()

    @one_at_a_time
    def _join(self) -> None:
        self._calls.join()

    @one_at_a_time
    def _take(self, wanted: ItemRequest, finished: int | None) -> Taken:
        self._settle()
        return self._calls.take(wanted, finished)
