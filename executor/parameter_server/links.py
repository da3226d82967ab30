"""How a worker reaches the servers: in this process, or as Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

from executor.parameter_server.shard import Shard, WaitError


class Links(Protocol):
    """Calls to all servers at once."""

    @property
    def count(self) -> int:
        """How many servers there are."""

    def call(self, method: str, args: Sequence[tuple[Any, ...]], wait_s: float) -> list[Any]:
        """Call a method of every server, each with its own arguments; their answers in order.

        Raises:
            WaitError: a server did not answer in ``wait_s``; says which.
        """


class LocalLinks:
    """Servers in this process; every call in a thread."""

    def __init__(self, shards: Sequence[Shard], threads: int) -> None:
        self.shards = tuple(shards)
        self.pool = ThreadPoolExecutor(max(1, threads * len(self.shards)), "parameter-server")

    @property
    def count(self) -> int:
        """How many servers there are."""
        return len(self.shards)

    def call(self, method: str, args: Sequence[tuple[Any, ...]], wait_s: float) -> list[Any]:
        """See ``Links``."""
        calls: list[Future[Any]] = [
            self.pool.submit(getattr(shard, method), *a)
            for shard, a in zip(self.shards, args, strict=True)
        ]
        found = []
        for number, future in enumerate(calls):
            try:
                found.append(future.result(wait_s))
            except FutureTimeoutError as error:
                raise WaitError(
                    f"server {number} did not answer {method} in {wait_s:g} s"
                ) from error
        return found


class RayLinks:
    """Servers as Ray actors. Arrays travel through the shared memory of a host without a copy."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = tuple(actors)

    @property
    def count(self) -> int:
        """How many servers there are."""
        return len(self.actors)

    def call(self, method: str, args: Sequence[tuple[Any, ...]], wait_s: float) -> list[Any]:
        """See ``Links``."""
        import ray

        refs = [
            getattr(actor, method).remote(*a) for actor, a in zip(self.actors, args, strict=True)
        ]
        try:
            found: list[Any] = ray.get(refs, timeout=wait_s)
        except ray.exceptions.GetTimeoutError as error:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
            late = [k for k, ref in enumerate(refs) if ref not in ready]
            raise WaitError(
                f"server{'s' * (len(late) > 1)} {', '.join(map(str, late))} did not answer "
                f"{method} in {wait_s:g} s"
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            raise WaitError(f"a server is gone, while asked to {method}: {error}") from error
        return found
