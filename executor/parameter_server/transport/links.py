"""Links from a worker to the servers; here, to servers in its process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

from executor.parameter_server.placement.layout import Flat
from executor.parameter_server.server.answers import LostError, WaitError
from executor.parameter_server.server.shard import Shard
from planner.errors import RequestError

First = Callable[[int], Sequence[tuple[str, tuple[Any, ...]]]]
"""The first calls to a server, by its number, after it was lost and has restarted."""


class Links(Protocol):
    """Calls to all servers at once."""

    @property
    def count(self) -> int:
        """Number of servers."""

    @property
    def host(self) -> str:
        """The address of this worker's host for other workers.

        Raises:
            RequestError: the workers are threads of one process.
        """

    def room(self, sizes: Sequence[Mapping[str, int]]) -> list[Flat] | None:
        """Flat arrays for the push to every server, to be overwritten for each call; None if
        servers use the arrays of a call after it.

        Args:
            sizes: number of elements by dtype, for each server.
        """

    def call(
        self,
        method: str,
        args: Sequence[tuple[Any, ...] | None],
        wait_s: float,
        first: First = lambda server: (),
    ) -> list[Any]:
        """Call a method of every server, each with separate arguments; returns the answers in
        order. A server whose arguments are None is not called, and its answer is None.

        If a server is lost meanwhile and restarts, it gets the calls of ``first``, and then this
        call again.

        Raises:
            WaitError: a server did not answer in ``wait_s``; names it.
            LostError: a server is gone for good.
        """


class LocalLinks:
    """Servers in this process; every call runs in a thread."""

    def __init__(self, shards: Sequence[Shard], threads: int) -> None:
        self.shards = tuple(shards)
        self._failed = ""
        self.pool = ThreadPoolExecutor(max(1, threads * len(self.shards)), "parameter-server")

    @property
    def count(self) -> int:
        """Number of servers."""
        return len(self.shards)

    @property
    def host(self) -> str:
        """See ``Links``."""
        raise RequestError(
            "join_devices: the workers are threads of one process, which have its devices already; "
            "expected backend='ray'"
        )

    def room(self, sizes: Sequence[Mapping[str, int]]) -> None:
        """See ``Links``."""

    def fail(self, why: str) -> None:
        """End the job: all calls except "leave" raise LostError, also those that wait now."""
        self._failed = why
        for shard in self.shards:
            shard.fail(why)

    def call(
        self,
        method: str,
        args: Sequence[tuple[Any, ...] | None],
        wait_s: float,
        first: First = lambda server: (),
    ) -> list[Any]:
        """See ``Links``; raises LostError after ``fail``."""
        if self._failed and method != "leave":
            raise LostError(self._failed)
        calls: list[Future[Any] | None] = [
            None if a is None else self.pool.submit(getattr(shard, method), *a)
            for shard, a in zip(self.shards, args, strict=True)
        ]
        answers = []
        for number, future in enumerate(calls):
            try:
                answers.append(None if future is None else future.result(wait_s))
            except FutureTimeoutError as error:
                raise WaitError(
                    f"server {number} did not answer {method} in {wait_s:g} s"
                ) from error
        return answers
