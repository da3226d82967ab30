"""How a worker reaches the servers: in this process, or as Ray actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

from executor.parameter_server.shard import LostError, Shard, WaitError
from executor.parameter_server.wire import fetch

AGAIN_S = 0.2
"""How long it is waited before a server that is away is asked again."""

First = Callable[[int], Sequence[tuple[str, tuple[Any, ...]]]]
"""What a server is asked first, by its number, after it was lost and has come back."""


class Links(Protocol):
    """Calls to all servers at once."""

    keeps: bool
    """Whether servers go on using the arrays of a call after it; else the caller may reuse them."""

    @property
    def count(self) -> int:
        """How many servers there are."""

    def call(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        wait_s: float,
        first: First = lambda server: (),
    ) -> list[Any]:
        """Call a method of every server, each with its own arguments; their answers in order.

        A server that is lost meanwhile and comes back is asked what ``first`` says, and then again.

        Raises:
            WaitError: a server did not answer in ``wait_s``; says which.
            LostError: a server is gone for good.
        """


class LocalLinks:
    """Servers in this process; every call in a thread."""

    keeps = True

    def __init__(self, shards: Sequence[Shard], threads: int) -> None:
        self.shards = tuple(shards)
        self.pool = ThreadPoolExecutor(max(1, threads * len(self.shards)), "parameter-server")

    @property
    def count(self) -> int:
        """How many servers there are."""
        return len(self.shards)

    def call(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        wait_s: float,
        first: First = lambda server: (),
    ) -> list[Any]:
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

    keeps = False

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = tuple(actors)

    @property
    def count(self) -> int:
        """How many servers there are."""
        return len(self.actors)

    def call(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        wait_s: float,
        first: First = lambda server: (),
    ) -> list[Any]:
        """See ``Links``."""
        import ray

        until = time.monotonic() + wait_s
        refs = [
            getattr(actor, method).remote(*a) for actor, a in zip(self.actors, args, strict=True)
        ]
        try:
            return fetch(ray.get(refs, timeout=wait_s), wait_s)
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError):
            pass  # one of them; below it is seen which
        except ray.exceptions.GetTimeoutError as error:
            raise _late(refs, method, wait_s) from error
        except ray.exceptions.RayTaskError as error:
            raise (error.cause or error) from error
        return [
            self._one(k, method, a, ref, until, first)
            for k, (a, ref) in enumerate(zip(args, refs, strict=True))
        ]

    def _one(
        self, server: int, method: str, args: tuple[Any, ...], ref: Any, until: float, first: First
    ) -> Any:
        """The answer of one server, asked again as long as it is away."""
        import ray

        actor = self.actors[server]
        while True:
            try:
                if ref is None:
                    for name, what in first(server):
                        ray.get(getattr(actor, name).remote(*what), timeout=_left(until))
                    ref = getattr(actor, method).remote(*args)
                return fetch([ray.get(ref, timeout=_left(until))], _left(until))[0]
            except ray.exceptions.ActorDiedError as error:
                raise LostError(
                    f"server {server} is gone, while asked to {method}: nothing keeps what it "
                    f"held; give train(replicas=True) or snapshots= ({_word(error)})"
                ) from error
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
                if time.monotonic() > until:
                    raise WaitError(
                        f"server {server} was lost and did not come back in time, while asked to "
                        f"{method}"
                    ) from error
                time.sleep(AGAIN_S)
                ref = None
            except ray.exceptions.GetTimeoutError as error:
                raise WaitError(f"server {server} did not answer {method} in time") from error
            except ray.exceptions.RayTaskError as error:
                raise (error.cause or error) from error


def _word(error: Exception) -> str:
    """The last line of an error of Ray's, where it says why."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def _left(until: float) -> float:
    return max(0.1, until - time.monotonic())


def _late(refs: Sequence[Any], method: str, wait_s: float) -> WaitError:
    import ray

    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    late = [k for k, ref in enumerate(refs) if ref not in ready]
    return WaitError(
        f"server{'s' * (len(late) > 1)} {', '.join(map(str, late))} did not answer {method} in "
        f"{wait_s:g} s"
    )
