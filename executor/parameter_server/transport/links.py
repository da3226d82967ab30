"""How a worker reaches the servers; here those of its own process."""

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
"""What a server is asked first, by its number, after it was lost and has come back."""


class Links(Protocol):
    """Calls to all servers at once."""

    @property
    def count(self) -> int:
        """How many servers there are."""

    @property
    def host(self) -> str:
        """Where other workers reach this one's host.

        Raises:
            RequestError: the workers are threads of one process.
        """

    def room(self, sizes: Sequence[Mapping[str, int]]) -> list[Flat] | None:
        """Flat arrays for what every server is pushed, to be written anew for each call; None where
        servers go on using those of a call after it.

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
        """Call a method of every server, each with its own arguments; their answers in order. One
        whose arguments are None is not called, and its answer is None.

        A server that is lost meanwhile and comes back is asked what ``first`` says, and then again.

        Raises:
            WaitError: a server did not answer in ``wait_s``; says which.
            LostError: a server is gone for good.
        """


class LocalLinks:
    """Servers in this process; every call in a thread."""

    def __init__(self, shards: Sequence[Shard], threads: int) -> None:
        self.shards = tuple(shards)
        self._failed = ""
        self.pool = ThreadPoolExecutor(max(1, threads * len(self.shards)), "parameter-server")

    @property
    def count(self) -> int:
        """How many servers there are."""
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
        """The job is to end: no call but "leave" is answered any more, and who waits is told."""
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
        """See ``Links``; raises LostError once ``fail`` was called."""
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
