"""The calls of one worker to the servers. Every push has a number, and the last push is stored to
be sent again to a server that was lost and restarts."""

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
"""Seconds that a worker waits longer than a server, since the server's error says more."""

Args = tuple[Any, ...]
"""Arguments of a call to one server."""

T = TypeVar("T")


class ServerCalls:
    """The calls of one worker.

    Args:
        links: links to the servers.
        rank: rank of this worker.
        wait_s: deadline of every wait of a server, in seconds.
        sync: whether training is synchronous: all workers wait for all.
        compress: how ``Feedback`` codes dense gradients; None: it does not.
        dtype: dtype in which values are sent, where theirs is wider; None: unchanged.

    Attributes:
        rank: as given.
        busy: the servers that take part in pushes and pulls.
        number: number of the last push, the same for all servers.
        feedback: the coder, with its rounding errors; None without compression.
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
        """Call a method of every server; see ``Links.call``. First, return dropped queue items."""
        while not self._dropped.empty():
            with contextlib.suppress(queue.Empty):  # another thread was faster
                give = self._to_first(self.rank, self._dropped.get_nowait())
                self._links.call("give_back", give, self._late, self._first)
        return self._links.call(method, args, self._late, self._first)

    def all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every server with the same arguments."""
        return self.call(method, [args] * self._links.count)

    def _first(self, server: int) -> list[tuple[str, Args]]:
        """Calls for a server that has restarted: ``join``, and the last push again."""
        calls: list[tuple[str, Args]] = [("join", (self.rank, self._barriers))]
        if self._sent and server in self.busy:
            calls.append(("push", (self.rank, self.number, self._sent[server])))
        return calls

    def join(self) -> None:
        """Join, or join again, and get the pushes and barriers of this rank that servers know."""
        came = self.all("join", self.rank, self._barriers)
        # the least: what only some servers have is pushed again, and counts once; in synchronous
        # training, no more than the last push may be missing
        numbers = [came[server][0] for server in self.busy] or [0]
        back = max(numbers) - 1 if self._sync else 0
        self.number = max(self.number, back, min(numbers))
        self._barriers = came[0][1]
        self._taken = self.number or None

    def next_push(self, flats: Sequence[Flat], rows: Sequence[Rows]) -> list[Args]:
        """Arguments of a new push for every server; to send it again, pass the same objects.

        Args:
            flats: dense gradients, by server.
            rows: rows of tables and their gradients, by server.
        """
        coded: list[dict[str, Coded]] = [{}] * len(flats)
        if self.feedback is not None:
            encoded = [self.feedback.encode(server, flat) for server, flat in enumerate(flats)]
            flats, coded = [dense for dense, _ in encoded], [x for _, x in encoded]
        parts = zip(flats, rows, coded, strict=True)
        self.number += 1
        return self._keep([Pushed(flat, part, x, dtype=self._dtype) for flat, part, x in parts])

    def overlapped(self, seen: Mapping[int, int]) -> list[Args]:
        """Arguments of the last push, to be sent while the next is computed.

        Args:
            seen: number of updates in the values that its gradients are of, by server.
        """
        parts = enumerate(self._sent)
        return self._keep([replace(part, seen=seen.get(k), ahead=1) for k, part in parts])

    def _keep(self, parts: Sequence[Pushed]) -> list[Args]:
        self._sent = parts  # until the next push: it may be sent again
        return [(self.rank, self.number, part) for part in parts]

    def push(self, method: str, args: Sequence[Args]) -> dict[int, Any]:
        """Send a push by ``push`` or ``push_pull``; returns the answers of the servers that take
        part."""
        answers = self._ask(method, args)
        self._taken = args[0][1]
        return answers

    def pull(self, ahead: int = 0) -> dict[int, Any]:
        """The values of the servers that take part; ``ahead`` as for ``Clocks.blockers``."""
        return self._ask("pull", [(self.rank, ahead, self._dtype)] * self._links.count)

    def _ask(self, method: str, args: Sequence[Args]) -> dict[int, Any]:
        """Call the servers that take part; returns their answers."""
        answers = self.call(method, [a if k in self.busy else None for k, a in enumerate(args)])
        return {server: answers[server] for server in self.busy}

    @property
    def leaving(self) -> list[tuple[int, int | None]]:
        """Arguments of ``leave`` for every server: this rank, and its last acknowledged push."""
        taken = [self._taken if k in self.busy else None for k in range(self._links.count)]
        return [(self.rank, number) for number in taken]

    def agree(self, about: Mapping[str, Any]) -> None:
        """Compare the description of the parameters with the one that server 0 has."""
        self.call("agree", self._to_first(self.rank, about))

    def barrier(self) -> None:
        """Wait for all workers at the next barrier, which is on server 0."""
        self._barriers += 1
        self._of_first("barrier", (self.rank, self._barriers), (None, 0))

    def take(self, wanted: ItemRequest, finished: int | None) -> Taken:
        """The next item of a queue, which is on server 0; see ``Shard.take``."""
        taken: Taken = self._of_first("take", (self.rank, wanted, finished), (None, None))
        return taken

    @property
    def host(self) -> str:
        """The address of this worker's host for other workers; see ``Links``."""
        return self._links.host

    def give_back(self, number: int) -> None:
        """With the next call, return this worker's item of a queue for others. This does not wait,
        since the garbage collector may be closing the generator."""
        self._dropped.put(number)

    def meet(self, text: str | None) -> str:
        """The text that worker 0 passes through server 0."""
        heard: str = self.call("meet", self._to_first(self.rank, text))[0]
        return heard

    def away(self) -> None:
        """Stop the others from waiting for this worker until it joins or pushes."""
        self.all("away", self.rank)

    def _to_first(self, *args: Any) -> list[Args | None]:
        """Arguments for server 0; the others are not called."""
        return [args, *[None] * (self._links.count - 1)]

    def _of_first(self, method: str, args: Args, nothing: Args) -> Any:
        """The answer of server 0; the others get the arguments ``nothing``."""
        return self.call(method, [args, *[nothing] * (self._links.count - 1)])[0]


class Behind(Generic[T]):
    """Runs one call at a time in the background."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "overlap")
        self._under_way: Future[T] | None = None
        self._lock = threading.Lock()

    def submit(self, call: Callable[..., T], *args: Any) -> None:
        """Start a call."""
        with self._lock:
            self._under_way = self._thread.submit(call, *args)

    def arrived(self) -> T | None:
        """Wait for the call and return its result; None without one. Raises what it raised."""
        under_way = self._under_way
        try:
            return None if under_way is None else under_way.result()
        finally:  # after an interrupt here, the arrays being sent must not be overwritten
            with self._lock:  # another thread may have been here, and started the next
                if under_way is self._under_way and under_way is not None and under_way.done():
                    self._under_way = None
