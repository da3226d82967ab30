"""What one worker says to the servers: every push has a number, and the last is kept to be sent
again to a server that was lost and comes back."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Generic, TypeVar

from executor.parameter_server.placement.layout import Flat
from executor.parameter_server.server.store import Pushed
from executor.parameter_server.transport.codec import Coded, Feedback
from executor.parameter_server.transport.links import Links
from executor.parameter_server.worker.queue import ItemRequest, Taken
from executor.parameter_server.worker.rows import Rows

GRACE_S = 10.0
"""What a worker waits longer than a server, whose error says more."""

Args = tuple[Any, ...]
"""Arguments of a call to one server."""

T = TypeVar("T")


class ServerCalls:
    """The calls of one worker.

    Args:
        links: to the servers.
        rank: of this worker.
        wait_s: deadline of every wait of a server, in seconds.
        sync: all workers wait for all.
        compress: how dense gradients are coded, by ``Feedback``; None: not.
        dtype: that values travel in, where theirs is wider; None: as they are.

    Attributes:
        rank: as given.
        busy: the servers that take part in pushes and pulls.
        number: of the last push, one for all servers.
        feedback: what coding has rounded away, with it.
    """

    def __init__(
        self,
        links: Links,
        rank: int,
        wait_s: float,
        *,
        sync: bool,
        compress: str | None,
        dtype: str | None,
    ) -> None:
        self.rank, self.number = rank, 0
        self.busy: tuple[int, ...] = ()
        self._links, self._late, self._sync = links, wait_s + GRACE_S, sync
        self.feedback = None if compress is None else Feedback(compress, links.count)
        self._dtype = dtype
        self._barriers = 0
        self._taken: int | None = None
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._sent: Sequence[Pushed] = ()

    def call(self, method: str, args: Sequence[Args | None]) -> list[Any]:
        """Call a method of every server; see ``Links.call``. Before it, give back what is to be."""
        while not self._dropped.empty():
            with contextlib.suppress(queue.Empty):  # another thread was quicker
                give = self._to_first(self.rank, self._dropped.get_nowait())
                self._links.call("give_back", give, self._late, self._first)
        return self._links.call(method, args, self._late, self._first)

    def all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every server with the same arguments."""
        return self.call(method, [args] * self._links.count)

    def _first(self, server: int) -> list[tuple[str, Args]]:
        """What a server that comes back is told: who is here, and the last push once more."""
        calls: list[tuple[str, Args]] = [("join", (self.rank, self._barriers))]
        if self._sent and server in self.busy:
            calls.append(("push", (self.rank, self.number, self._sent[server])))
        return calls

    def join(self) -> None:
        """Come, or come back, and learn which pushes and barriers of this rank the servers know."""
        came = self.all("join", self.rank, self._barriers)
        # the least: what some servers have and others not is pushed again, and counts once; where
        # all wait for all, no more than the last push may be missing
        numbers = [came[server][0] for server in self.busy] or [0]
        back = max(numbers) - 1 if self._sync else 0
        self.number = max(self.number, back, min(numbers))
        self._barriers = came[0][1]
        self._taken = self.number or None

    def next_push(self, flats: Sequence[Flat], rows: Sequence[Rows]) -> list[Args]:
        """What every server is told of a new push; sent again, it must be the same objects.

        Args:
            flats: dense gradients, by server.
            rows: of tables, and their gradients, by server.
        """
        coded: list[dict[str, Coded]] = [{}] * len(flats)
        if self.feedback is not None:
            encoded = [self.feedback.encode(server, flat) for server, flat in enumerate(flats)]
            flats, coded = [dense for dense, _ in encoded], [x for _, x in encoded]
        parts = zip(flats, rows, coded, strict=True)
        self.number += 1
        return self._keep([Pushed(flat, part, x, dtype=self._dtype) for flat, part, x in parts])

    def overlapped(self, seen: Mapping[int, int]) -> list[Args]:
        """The last push again, as one that is sent while the next is computed.

        Args:
            seen: updates in the values that its gradients are of, by server.
        """
        parts = enumerate(self._sent)
        return self._keep([replace(part, seen=seen.get(k), ahead=1) for k, part in parts])

    def _keep(self, parts: Sequence[Pushed]) -> list[Args]:
        self._sent = parts  # until the next: it may be asked again
        return [(self.rank, self.number, part) for part in parts]

    def push(self, method: str, args: Sequence[Args]) -> dict[int, Any]:
        """Send a push, by ``push`` or ``push_pull``; the answers of the servers that take part."""
        answers = self._ask(method, args)
        self._taken = args[0][1]
        return answers

    def pull(self, ahead: int = 0) -> dict[int, Any]:
        """The values of the servers that take part; ``ahead`` as for ``Clocks.blockers``."""
        return self._ask("pull", [(self.rank, ahead, self._dtype)] * self._links.count)

    def _ask(self, method: str, args: Sequence[Args]) -> dict[int, Any]:
        """The answers of the servers that take part."""
        answers = self.call(method, [a if k in self.busy else None for k, a in enumerate(args)])
        return {server: answers[server] for server in self.busy}

    @property
    def leaving(self) -> list[tuple[int, int | None]]:
        """What every server is told at the end: this rank, and its last push that arrived."""
        taken = [self._taken if k in self.busy else None for k in range(self._links.count)]
        return [(self.rank, number) for number in taken]

    def agree(self, about: Mapping[str, Any]) -> None:
        """Compare what the parameters are with what server 0 was told."""
        self.call("agree", self._to_first(self.rank, about))

    def barrier(self) -> None:
        """Wait for all at the next barrier, which server 0 has."""
        self._barriers += 1
        self._of_first("barrier", (self.rank, self._barriers), (None, 0))

    def take(self, wanted: ItemRequest, finished: int | None) -> Taken:
        """The next item of a queue, which server 0 has; see ``Shard.take``."""
        taken: Taken = self._of_first("take", (self.rank, wanted, finished), (None, None))
        return taken

    @property
    def host(self) -> str:
        """Where other workers reach this one's host; see ``Links``."""
        return self._links.host

    def give_back(self, number: int) -> None:
        """With the next call, let others have the item of a queue that this worker has. Whoever
        closes a generator, the garbage collector maybe, does not wait."""
        self._dropped.put(number)

    def meet(self, text: str | None) -> str:
        """What worker 0 says at server 0."""
        heard: str = self.call("meet", self._to_first(self.rank, text))[0]
        return heard

    def away(self) -> None:
        """Nobody waits for this worker until it joins or pushes."""
        self.all("away", self.rank)

    def _to_first(self, *args: Any) -> list[Args | None]:
        """Arguments for server 0; the others are not called."""
        return [args, *[None] * (self._links.count - 1)]

    def _of_first(self, method: str, args: Args, nothing: Args) -> Any:
        """The answer of server 0; the others are asked for nothing."""
        return self.call(method, [args, *[nothing] * (self._links.count - 1)])[0]


class Behind(Generic[T]):
    """One call at a time that runs while its caller goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "overlap")
        self._under_way: Future[T] | None = None
        self._lock = threading.Lock()

    def submit(self, call: Callable[..., T], *args: Any) -> None:
        """Begin it."""
        with self._lock:
            self._under_way = self._thread.submit(call, *args)

    def arrived(self) -> T | None:
        """What it has brought, once it is there; None without one. Raises what it raised."""
        under_way = self._under_way
        try:
            return None if under_way is None else under_way.result()
        finally:  # who is interrupted here must not write to what still travels
            with self._lock:  # another thread may have been here, and begun the next
                if under_way is self._under_way and under_way is not None and under_way.done():
                    self._under_way = None
