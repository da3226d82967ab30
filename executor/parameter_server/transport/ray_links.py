"""Links from a worker to servers that are Ray actors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from executor.parameter_server.placement.layout import Flat
from executor.parameter_server.server.answers import LostError, WaitError
from executor.parameter_server.transport.links import First
from executor.parameter_server.transport.slots import Letter, Slot, aligned, new_slot
from executor.parameter_server.transport.wire import fetch

AGAIN_S = 0.2
"""Seconds before a server that is away is called again."""

SLOTTED = frozenset({"push", "push_pull", "pull", "pull_rows"})
"""Methods whose arrays are passed in slots."""
SHARE_S = 10.0
"""Seconds that a server has to attach a new slot."""


class RayLinks:
    """Servers as Ray actors; arrays are passed in slots if a server is on this host, else by Ray.

    Args:
        actors: the servers.
        rank: rank of the worker; None for a caller that is not a worker and has no slots.
    """

    def __init__(self, actors: Sequence[Any], rank: int | None = None) -> None:
        self.actors, self.rank = tuple(actors), rank
        self._slots: dict[int, Slot] = {}
        self._far: set[int] = set() if rank is not None else set(range(self.count))
        self._rooms = [0] * self.count
        self._own: dict[int, Flat] = {}

    @property
    def count(self) -> int:
        """Number of servers."""
        return len(self.actors)

    @property
    def host(self) -> str:
        """See ``Links``."""
        import ray

        return str(ray.util.get_node_ip_address())

    def room(self, sizes: Sequence[Mapping[str, int]]) -> list[Flat]:
        """See ``Links``."""
        return [self._room(server, size) for server, size in enumerate(sizes)]

    def _room(self, server: int, sizes: Mapping[str, int]) -> Flat:
        if not sizes:
            return {}
        nbytes = sum(aligned(n * np.dtype(d).itemsize) for d, n in sizes.items())
        if nbytes > self._rooms[server]:
            self._rooms[server] = nbytes
            self._slots.pop(server, None)
        slot = self._slot(server)
        if slot is not None:
            return slot.flats(sizes)
        if server not in self._own:
            self._own[server] = {d: np.empty(n, np.dtype(d)) for d, n in sizes.items()}
        return self._own[server]

    def _slot(self, server: int) -> Slot | None:
        """Memory shared with a server; None if the server is on another host, or away."""
        import ray

        if server in self._far or server in self._slots:
            return self._slots.get(server)
        room = self._rooms[server]
        node = ray.get_runtime_context().get_node_id()
        with new_slot(node, room, self._reserved) as slot_and_key:
            try:
                if slot_and_key is not None and ray.get(
                    self.actors[server].share.remote(self.rank, slot_and_key[1], room),
                    timeout=SHARE_S,
                ):
                    self._slots[server] = slot_and_key[0]
                else:
                    self._far.add(server)
            except ray.exceptions.GetTimeoutError:  # it is busy
                self._far.add(server)
            except ray.exceptions.RayActorError:
                pass  # the call that follows handles it
        return self._slots.get(server)

    @cached_property
    def _reserved(self) -> int:
        """Bytes that Ray's object store may take on this host."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        stores = [n["Resources"] for n in ray.nodes() if n["NodeID"] == here]
        return int(sum(store.get("object_store_memory", 0) for store in stores))

    def _ask(self, server: int, method: str, args: tuple[Any, ...]) -> tuple[Any, Slot | None]:
        """A reference to the answer, and the slot that may hold the answer."""
        actor = self.actors[server]
        slot = self._slot(server) if method in SLOTTED else None
        letter = None if slot is None else slot.write(args)
        if letter is None:
            return getattr(actor, method).remote(*args), None
        return actor.answer.remote(self.rank, method, letter), slot

    def call(
        self,
        method: str,
        args: Sequence[tuple[Any, ...] | None],
        wait_s: float,
        first: First = lambda server: (),
    ) -> list[Any]:
        """See ``Links``."""
        import ray

        by_server: list[Any] = [None] * self.count
        try:
            requests = {k: self._ask(k, method, a) for k, a in enumerate(args) if a is not None}
            until = time.monotonic() + wait_s
            refs = [ref for ref, _ in requests.values()]
            answers = ray.get(refs, timeout=_left(until))
            opened = [
                _opened(x, slot) for x, (_, slot) in zip(answers, requests.values(), strict=True)
            ]
            for server, answer in zip(requests, fetch(opened, _left(until)), strict=True):
                by_server[server] = answer
            return by_server
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError):
            self._slots.clear()  # a server is lost; the code below determines which
        except ray.exceptions.GetTimeoutError as error:
            self._slots.clear()  # a server may still read what is there
            raise _late(dict(zip(requests, refs, strict=True)), method, wait_s) from error
        except ray.exceptions.RayTaskError as error:
            self._slots.clear()
            raise (error.cause or error) from error
        except BaseException:
            self._slots.clear()
            raise
        for server, under_way in requests.items():
            what = args[server] or ()
            by_server[server] = self._one(server, method, what, under_way, until, first)
        return by_server

    def _one(
        self,
        server: int,
        method: str,
        args: tuple[Any, ...],
        request: tuple[Any, Slot | None] | None,
        until: float,
        first: First,
    ) -> Any:
        """The answer of one server; the call is repeated as long as the server is away."""
        import ray

        actor = self.actors[server]
        while True:
            try:
                if request is None:
                    for name, what in first(server):
                        ray.get(getattr(actor, name).remote(*what), timeout=_left(until))
                    request = getattr(actor, method).remote(*args), None
                answer = _opened(ray.get(request[0], timeout=_left(until)), request[1])
                return fetch([answer], _left(until))[0]
            except ray.exceptions.ActorDiedError as error:
                raise gone(server, method, error) from error
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
                if time.monotonic() > until:
                    raise WaitError(
                        f"server {server} was lost and did not come back in time, while asked to "
                        f"{method}"
                    ) from error
                time.sleep(AGAIN_S)
                request = None
            except ray.exceptions.GetTimeoutError as error:
                raise WaitError(f"server {server} did not answer {method} in time") from error
            except ray.exceptions.RayTaskError as error:
                raise (error.cause or error) from error


def _opened(answer: Any, slot: Slot | None) -> Any:
    """A server's answer, copied out of the slot.

    Raises:
        ActorUnavailableError: the server has restarted and does not know the slot.
    """
    if slot is None:
        return answer
    if answer is None:
        import ray

        raise ray.exceptions.ActorUnavailableError("it has come back", None)
    return slot.read(answer, copy=True) if isinstance(answer, Letter) else answer


def gone(server: int, method: str, error: Exception) -> LostError:
    """The error for a server that does not restart."""
    return LostError(
        f"server {server} is gone, while asked to {method}: nothing keeps what it held; give "
        f"train(replicas=True) or snapshots= ({_word(error)})"
    )


def _word(error: Exception) -> str:
    """The last line of a Ray error, which gives the reason."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def _left(until: float) -> float:
    return max(0.1, until - time.monotonic())


def _late(refs: Mapping[int, Any], method: str, wait_s: float) -> WaitError:
    import ray

    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=0)
    late = [server for server, ref in refs.items() if ref not in ready]
    return WaitError(
        f"server{'s' * (len(late) > 1)} {', '.join(map(str, late))} did not answer {method} in "
        f"{wait_s:g} s"
    )
