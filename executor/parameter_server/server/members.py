"""The members of a job, as one server knows them: joins and leaves, barriers, queues of items."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from executor.parameter_server.server.answers import Counts, LostError, WaitError
from executor.parameter_server.server.clock import Clocks, Rule
from executor.parameter_server.worker.queue import ItemRequest, Queue, Taken, queue_for
from planner.errors import RequestError

LEFT = "worker {worker} has left, or was taken for lost"

Change = tuple[str, tuple[Any, ...]]
"""A call that changed a server: its method and arguments."""


class Members:
    """The workers of a job; thread-safe.

    Args:
        rule: how far apart workers may be.
        workers: initial number of workers, with ranks from 0.
        wait_s: deadline of every wait, in seconds.
        clock: returns the time, in seconds.

    Attributes:
        clocks: the workers in the job, and the number of pushes received from each.
        last: the number of each worker's last push, and whether it counts.
        left: workers that have finished or are lost.
        at_barrier: the number of the last barrier that each worker reached.
        queues: queues of items, by number.
        said: the text of worker 0 in ``meet``.
        failed: why the job must end; "" while it runs.
        counts: numbers of applied, dropped and lost pushes.
        changed: the condition that guards all of this; notified of every change.
        on_change: called after each change, in order, with the call that made it.
    """

    def __init__(self, rule: Rule, workers: int, wait_s: float, clock: Callable[[], float]) -> None:
        self.rule, self.workers, self.wait_s, self.clock = rule, workers, wait_s, clock
        self.clocks = Clocks(rule, dict.fromkeys(range(workers), 0))
        self.counts = Counts()
        self.last: dict[int, tuple[int, bool]] = {}
        self.left: set[int] = set()
        self.at_barrier: dict[int, int] = {}
        self.queues: dict[int, Queue] = {}
        self.said = self.failed = ""
        self.changed = threading.Condition()
        self.on_change: Callable[[Change], None] = lambda change: None

    def join(self, worker: int, barriers: int = 0) -> tuple[int, int]:
        """Add a worker, or add it again.

        Args:
            worker: its rank.
            barriers: number of barriers that it has passed.

        Returns:
            The number of its last push received here, and of the last barrier that it reached.
        """
        with self.changed:
            # a worker that comes back has passed the barriers that all others have
            came = 0 if worker in self._all() else self._passed()
            self.left.discard(worker)
            self.clocks.join(worker)
            self.at_barrier[worker] = max(barriers, came, self.at_barrier.get(worker, 0))
            self._told("join", worker, barriers)
            return self.last.get(worker, (0, True))[0], self.at_barrier[worker]

    def leave(self, worker: int, number: int | None = None) -> None:
        """Remove a worker that has finished or is lost; the others no longer wait for it.

        Args:
            worker: its rank.
            number: number of its last acknowledged push; pushes up to it that are not here were
                lost with an earlier process of this server.
        """
        with self.changed:
            last, _ = self.last.get(worker, (0, True))
            holds = any(worker in queue.held for queue in self.queues.values())
            if worker in self.left and not holds and (number or 0) <= last:
                return
            if number is not None and number > last:
                self.last[worker] = (number, True)
                self.counts.lost[worker] = self.counts.lost.get(worker, 0) + number - last
            self.left.add(worker)
            self.clocks.leave(worker)
            self.at_barrier.pop(worker, None)
            self.queues = {n: queue.leave(worker) for n, queue in self.queues.items()}
            self._together()
            self._told("leave", worker, number)

    def away(self, worker: int) -> None:
        """Stop waiting for a worker, except at barriers, until it joins or pushes: it waits for
        items that others hold."""
        with self.changed:
            if worker in self.clocks.at:
                self.clocks.step_aside(worker)
                self._together()
                self._told("away", worker)

    def take(self, worker: int, wanted: ItemRequest | None, finished: int | None = None) -> Taken:
        """The next item for a worker, without waiting; no item if ``wanted`` is None.

        Args:
            worker: its rank.
            wanted: the queue to take from; the first request creates it.
            finished: the place of the item that it has finished; None: it has just begun.

        Raises:
            RequestError: the queue has other items.
        """
        if wanted is None:
            return Taken(None)
        with self.changed:
            before = self.queues.get(wanted.queue)
            taken, queue = queue_for(before, wanted).take(worker, finished)
            if queue != before:
                self.queues[wanted.queue] = queue
                self._told("take", worker, wanted, finished)
            return taken

    def give_back(self, worker: int, number: int) -> None:
        """Stop a worker's use of the queue with this number: its item goes to another worker."""
        with self.changed:
            queue = self.queues.get(number)
            if queue is not None and worker in queue.held:
                self.queues[number] = queue.leave(worker)
                self._told("give_back", worker, number)

    def meet(self, worker: int, text: str | None) -> str:
        """Pass a ``text`` from worker 0 to all workers; one text per job.

        Raises:
            RequestError: worker 0 gives another text than before.
            WaitError: worker 0 gave no text in ``wait_s``.
        """
        with self.changed:
            if text is not None:
                if self.said not in ("", text):
                    raise RequestError(
                        f"meet: worker 0 says {text!r}, and has said {self.said!r}: expected one "
                        "text in a job; join_devices is one that says it"
                    )
                self.said = text
                self.changed.notify_all()
            until = self.clock() + self.wait_s
            while not self.said:
                if not self._waited(until):
                    raise WaitError(
                        f"worker {worker} waited {self.wait_s:g} s for worker 0 to say where it is"
                    )
            return self.said

    def fail(self, why: str) -> None:
        """End the job: all waits here raise LostError."""
        with self.changed:
            self.failed = why
            self.changed.notify_all()

    def members(self) -> tuple[int, ...]:
        """The ranks of the workers in the job."""
        with self.changed:
            return tuple(sorted(self._all()))

    def barrier(self, worker: int | None, number: int) -> None:
        """Wait until every worker in the job has come; return at once if ``worker`` is None.

        Args:
            worker: its rank.
            number: number of the barrier, from 1; a repeated call counts once.

        Raises:
            WaitError: some workers did not come in ``wait_s``; names them.
        """
        if worker is None:
            return
        with self.changed:
            self._present(worker)
            self.at_barrier[worker] = max(number, self.at_barrier.get(worker, 0))
            self._told("join", worker, self.at_barrier[worker])
            until = self.clock() + self.wait_s
            while self._passed() < number:
                if not self._waited(until):
                    missing = [w for w in self._all() if self.at_barrier.get(w, 0) < number]
                    raise WaitError(
                        f"worker {worker} waited {self.wait_s:g} s at a barrier for: "
                        + ", ".join(map(str, sorted(missing)))
                    )

    def _passed(self) -> int:
        """Number of barriers that all workers in the job have reached."""
        return min((self.at_barrier.get(w, 0) for w in self._all()), default=0)

    def _all(self) -> set[int]:
        """The workers that have not left."""
        return {*self.clocks.at, *self.clocks.aside}

    def _waited(self, until: float) -> bool:
        """Wait for a change; returns False after the deadline. A caller checks its condition once
        more before that, since the condition may have been met while another held the lock.

        Raises:
            LostError: the job must end.
        """
        left = until - self.clock()
        if left > 0 and not self.failed:
            self.changed.wait(left)
        if self.failed:
            raise LostError(self.failed)
        return left > 0

    def again(self, workers: int, number: int | None) -> None:
        """Resume the whole job with all its workers: each after its last push, or after push
        ``number`` if the number of workers has changed."""
        with self.changed:
            if number is not None:
                self.last = dict.fromkeys(range(workers), (number, True))
            for worker in {w for queue in self.queues.values() for w in queue.held}:
                self.queues = {n: queue.leave(worker) for n, queue in self.queues.items()}
            self.at_barrier.clear()
            self.left.clear()
            self.clocks.aside.clear()
            self.clocks.at = {w: self.last.get(w, (0, True))[0] for w in range(workers)}

    def _present(self, worker: int) -> None:
        """Add a worker if it is new; raises LostError if it has left."""
        if worker in self.left:
            raise LostError(LEFT.format(worker=worker))
        self.clocks.join(worker)

    def _together(self) -> None:
        """Do what may have waited for a worker that is no longer there; for subclasses."""

    def _told(self, method: str, *args: Any) -> None:
        """Notify ``on_change`` and waiting threads of a change by this call."""
        self.on_change((method, args))
        self.changed.notify_all()
