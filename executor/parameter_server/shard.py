"""One server's part of the parameters: values, optimizer state, clocks; safe for many threads.

Every push has a number that its worker counts up. A number that was applied is not applied again,
so a push that is sent twice, because an answer was lost, counts once. Every wait has a deadline and
says for whom it waited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import optax

from executor.parameter_server.clock import Clocks, Rule
from executor.parameter_server.layout import Array, Flat
from executor.parameter_server.store import Pushed, Store, mean
from planner.errors import RequestError


class WaitError(RequestError):
    """A deadline passed; says who waited, and for which workers."""


@dataclass
class Counts:
    """What a server did.

    Attributes:
        applied: pushes that are in the values.
        updates: how often the values changed.
        duplicates: pushes that came again, and were not applied again.
        discarded: pushes that were left out by the rule, by worker.
        lost: pushes that a server took before it was lost and that no copy had, by worker.
        lags: how many pushes had each lag, in updates between the read and the push.
    """

    applied: int = 0
    updates: int = 0
    duplicates: int = 0
    discarded: dict[int, int] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    lags: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Values:
    """What a read gives: the values (flat arrays, or rows of tables), and how many updates are in
    them."""

    version: int
    values: Mapping[str, Array]


class Shard:
    """What one server holds.

    Args:
        rule: how far workers may be apart.
        workers: how many there are to begin with, ranks from 0.
        optimizer: applied to what is pushed; None adds it to the values.
        wait_s: deadline of every wait, in seconds.
        clock: the time, for tests.
    """

    def __init__(
        self,
        rule: Rule,
        workers: int,
        optimizer: optax.GradientTransformation | None,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rule, self.wait_s, self.clock = rule, wait_s, clock
        self.store = Store(optimizer, exact=rule.mode == "sync")
        self.clocks = Clocks(rule, dict.fromkeys(range(workers), 0))
        self.counts = Counts()
        self.version = self.ended = 0
        self.shapes: Any = None
        self.last: dict[int, tuple[int, bool]] = {}
        self.read_at: dict[int, int] = {}
        self.has_read: set[int] = set()
        self.waiting: dict[int, Pushed] = {}
        self.at_barrier: set[int] = set()
        self.passed = 0
        self.changed = threading.Condition()

    def init(self, values: Flat, tables: Mapping[str, Array] | None = None) -> None:
        """Begin with these values and rows of tables, unless there are some."""
        with self.changed:
            if self.store.values is None:
                self.store.init(values, tables)
                self.changed.notify_all()

    def describe(self, shapes: Any) -> None:
        """What the parameters of all servers are, for who is no worker: ShapeDtypeStructs."""
        self.shapes = shapes

    def described(self) -> Any:
        """What ``describe`` was told; None before."""
        return self.shapes

    def join(self, worker: int) -> int:
        """A worker comes, or comes back. Returns the number of its last push that counted."""
        with self.changed:
            self.clocks.join(worker)
            self.changed.notify_all()
            return self.last.get(worker, (0, True))[0]

    def leave(self, worker: int) -> None:
        """A worker has finished, or is lost; nobody waits for it any more."""
        with self.changed:
            self.clocks.leave(worker)
            self._together()
            self.changed.notify_all()

    def push(self, worker: int, number: int, pushed: Pushed) -> bool:
        """Take a worker's push.

        Args:
            worker: its rank.
            number: of the push, from 1, one more each time.
            pushed: gradients, in the form of the values.

        Returns:
            Whether it counts: False for one that the rule leaves out. One that comes again gets the
            same answer again.
        """
        pushed = pushed.decoded()
        with self.changed:
            if self.store.values is None:
                raise RequestError("push before init: call init(params) first")
            last, took = self.last.get(worker, (0, True))
            if number <= last:
                self.counts.duplicates += 1
                return took
            self.clocks.join(worker)
            read_at = self.read_at.get(worker, self.version)
            lag = self.version - (read_at if pushed.seen is None else pushed.seen)
            self.has_read.discard(worker)
            counts = self._take(worker, lag, pushed)
            self.last[worker] = (number, counts)
            self.clocks.tick(worker, number - last)
            if number > last + 1:
                missed = self.counts.lost.get(worker, 0)
                self.counts.lost[worker] = missed + number - last - 1
            if counts:
                self.counts.lags[lag] = self.counts.lags.get(lag, 0) + 1
                self._together()
            else:
                self.counts.discarded[worker] = self.counts.discarded.get(worker, 0) + 1
            self.changed.notify_all()
            return counts

    def _take(self, worker: int, lag: int, pushed: Pushed) -> bool:
        """Apply a push, or lay it aside until all are there; False if it is left out."""
        if self.rule.mode == "sync":
            if lag > 0:  # a backup worker that is late: the update was made without it
                return False
            self.waiting[worker] = pushed.copy()
            return True
        if self.rule.discard_lag is not None and lag > self.rule.discard_lag:
            return False
        self._apply(pushed, self.rule.scale(lag))
        self.counts.applied += 1
        return True

    def _together(self) -> None:
        """In synchronous training, one update of the mean once all are there, in order of rank: the
        sum does not depend on who came first."""
        if self.rule.mode != "sync" or not self.waiting:
            return
        here = self.clocks.at  # who has left may have pushed before, which counts
        needed = min(self.rule.aggregate or len(here), len(here))
        if sum(worker in self.waiting for worker in here) < needed:
            return
        pushes = [self.waiting[rank] for rank in sorted(self.waiting)]
        self.waiting.clear()
        self._apply(mean(pushes))
        self.counts.applied += len(pushes)

    def _apply(self, pushed: Pushed, scale: float = 1.0) -> None:
        self.store.apply(pushed, scale)
        self.version += 1
        self.counts.updates += 1

    def pull(self, worker: int, ahead: int = 0) -> Values:
        """The values, once the rule lets this worker read.

        Args:
            worker: its rank.
            ahead: as for ``Clocks.blockers``.

        Raises:
            WaitError: it did not in ``wait_s``; names the workers that are behind.
        """
        with self.changed:
            self._until_it_may_read(worker, ahead)
            self.read_at[worker] = self.version
            values = self.store.read()
            if values:
                self.has_read.add(worker)
            return Values(self.version, values)

    def pull_rows(self, worker: int, rows: Mapping[str, Array]) -> Values:
        """Rows of tables, by their numbers on this server; waits, and raises, as ``pull``.

        The lag of the next push counts from the first read of rows since this worker's last push,
        or from its last ``pull`` since then.
        """
        with self.changed:
            self._until_it_may_read(worker)
            if worker not in self.has_read:
                self.read_at[worker] = self.version
                self.has_read.add(worker)
            return Values(self.version, self.store.tables.read(rows))

    def _until_it_may_read(self, worker: int, ahead: int = 0) -> None:
        until = self.clock() + self.wait_s
        while (behind := self._behind(worker, ahead)) != ():
            left = until - self.clock()
            if left <= 0 or not self.changed.wait(left):
                raise WaitError(
                    f"worker {worker} waited {self.wait_s:g} s to read: "
                    + (
                        "nobody has called init"
                        if behind is None
                        else f"worker{'s' * (len(behind) > 1)} "
                        f"{', '.join(map(str, behind))} did not push"
                    )
                )

    def push_pull(self, worker: int, number: int, pushed: Pushed) -> Values:
        """``push``, then ``pull``."""
        self.push(worker, number, pushed)
        return self.pull(worker, pushed.ahead)

    def now(self) -> tuple[Values, Counts]:
        """The values as they are, for who is no worker, and what was done."""
        with self.changed:
            return Values(self.version, self.store.last()), self.counts

    def end(self, version: int, values: Flat) -> None:
        """What a worker that made the updates itself came to, at the end; of several the last."""
        with self.changed:
            if version >= self.ended:
                self.ended = version
                self.store.end(values)

    def tables(self) -> dict[str, Array]:
        """All rows of tables that are here, as they are, copied."""
        with self.changed:
            return self.store.tables.whole()

    def members(self) -> tuple[int, ...]:
        """The workers that are there."""
        with self.changed:
            return tuple(sorted(self.clocks.at))

    def barrier(self, worker: int | None) -> None:
        """Wait until every worker that is there has come; None asks for nothing.

        Raises:
            WaitError: some did not come in ``wait_s``; names them.
        """
        if worker is None:
            return
        with self.changed:
            self.at_barrier.add(worker)
            mine = self.passed
            until = self.clock() + self.wait_s
            while self.passed == mine:
                if self.at_barrier >= set(self.clocks.at):
                    self.passed += 1
                    self.at_barrier.clear()
                    self.changed.notify_all()
                    return
                left = until - self.clock()
                if left <= 0 or not self.changed.wait(left):
                    missing = ", ".join(map(str, sorted(set(self.clocks.at) - self.at_barrier)))
                    self.at_barrier.discard(worker)
                    raise WaitError(
                        f"worker {worker} waited {self.wait_s:g} s at a barrier for: {missing}"
                    )

    def _behind(self, worker: int, ahead: int = 0) -> tuple[int, ...] | None:
        """Whom a worker waits for; None: for the first values."""
        if self.store.values is None:
            return None
        self.clocks.join(worker)
        if self.rule.mode == "sync":
            if worker not in self.waiting:
                return ()
            return tuple(sorted(set(self.clocks.at) - set(self.waiting)))
        return self.clocks.blockers(worker, ahead)
