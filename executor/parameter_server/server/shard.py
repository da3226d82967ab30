"""One server's part of the parameters: values, optimizer state, clocks; thread-safe.

Every push has a number that its worker increments. A number that was applied is not applied again,
so a push that is sent twice, because an answer was lost, counts once. Every wait has a deadline,
and its error names the workers that it waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import optax

from executor.parameter_server.placement.layout import Array, Flat
from executor.parameter_server.server.answers import Counts, Values, WaitError
from executor.parameter_server.server.clock import Rule
from executor.parameter_server.server.members import Members
from executor.parameter_server.server.state import differ, laid_aside, shard_facts, take_up
from executor.parameter_server.server.store import Pushed, Store
from executor.parameter_server.transport.wire import publish
from planner.errors import RequestError

NOBODY = "nobody has called init"


class Shard(Members):
    """The state of one server.

    Args:
        rule: how far apart workers may be.
        workers: initial number of workers, with ranks from 0.
        optimizer: applied to the pushed gradients; None adds what is pushed to the values.
        wait_s: deadline of every wait, in seconds.
        clock: returns the time, in seconds; for tests.

    Attributes:
        on_change: as for ``Members``; a copy that repeats the calls has the same state.
        on_update: called after each change that updated the values.
        on_begun: called when the first values are set, before any read.
    """

    def __init__(
        self,
        rule: Rule,
        workers: int,
        optimizer: optax.GradientTransformation | None,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(rule, workers, wait_s, clock)
        self.store = Store(optimizer, exact=rule.mode == "sync")
        self.version = self.seen = self.ended = 0
        self.shapes: Any = None
        self.read_at: dict[int, int] = {}
        self.has_read: set[int] = set()
        self.waiting: dict[int, Pushed] = {}
        self.published: tuple[Any, Any] = (None, None)
        self.about: dict[str, Any] = {}
        self.on_update: Callable[[], None] = lambda: None
        self.on_begun: Callable[[], None] = lambda: None

    def init(
        self,
        values: Flat,
        tables: Mapping[str, Array] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Set the first values and rows of tables, unless there are values already; ``about``
        describes the parameters that they are parts of."""
        with self.changed:
            if self.store.values is None:
                self.store.init(values, tables)
                self.about = dict(about or {})
                self._told("init", values, tables, about)
                self.on_begun()
            elif about is not None and about != self.about:
                raise RequestError(
                    "init: the servers hold other parameters, of an earlier init or of the "
                    f"snapshots that the job goes on from: {differ(about, self.about)}"
                )

    def agree(self, worker: int, about: Mapping[str, Any]) -> None:
        """Wait for the first values, and check that they are of the parameters ``about`` describes.

        Raises:
            RequestError: they are of other parameters.
            WaitError: there were no values in ``wait_s``.
        """
        with self.changed:
            until = self.clock() + self.wait_s
            while self.store.values is None:
                if not self._waited(until):
                    raise WaitError(f"worker {worker} waited {self.wait_s:g} s to read: {NOBODY}")
            if about != self.about:
                raise RequestError(
                    f"init: worker {worker} has other parameters than worker 0: "
                    f"{differ(about, self.about)}"
                )

    def describe(self, shapes: Any) -> None:
        """Store the ShapeDtypeStructs of the parameters of all servers, for callers other than
        workers."""
        self.shapes = shapes

    def described(self) -> Any:
        """The argument of ``describe``; None before."""
        return self.shapes

    def push(self, worker: int, number: int, pushed: Pushed) -> bool:
        """Receive a worker's push.

        Args:
            worker: its rank.
            number: number of the push, from 1, one more each time.
            pushed: gradients, in the form of the values; they must not change afterwards.

        Returns:
            Whether it counts: False if the rule drops it. A repeated push gets the same answer.

        Raises:
            WaitError: in mode "sync", the worker's previous push waits for those of others, which
                did not arrive.
        """
        pushed = pushed.decoded()
        with self.changed:
            if self.store.values is None:
                raise RequestError("push before init: call init(params) first")
            self.store.check(pushed)
            if worker in self.waiting and number > self.last[worker][0]:
                self._until_it_may_read(worker)  # two pushes without a read: one by one
            last, took = self.last.get(worker, (0, True))
            if number <= last:
                self.counts.duplicates += 1
                return took
            self._present(worker)
            read_at = self.read_at.get(worker, self.version)
            seen = read_at if pushed.seen is None else pushed.seen
            lag = max(0, self.version - seen)  # updates that it saw may be lost
            self.has_read.discard(worker)
            return self.put(worker, number, pushed, lag)

    def put(self, worker: int, number: int, pushed: Pushed, lag: int) -> bool:
        """Take a new push; its worker had not seen ``lag`` updates. See ``push``."""
        with self.changed:
            last = self.last.get(worker, (0, True))[0]
            # with backup workers, any lag means that an update was made without it
            most = self.rule.discard_lag if self.rule.aggregate is None else 0
            counts = most is None or lag <= most
            self.last[worker] = (number, counts)
            self.clocks.join(worker)
            self.clocks.tick(worker, number - last)
            if number > last + 1:
                self.counts.lost[worker] = self.counts.lost.get(worker, 0) + number - last - 1
            if not counts:
                self.counts.discarded[worker] = self.counts.discarded.get(worker, 0) + 1
            else:
                self.counts.lags[lag] = self.counts.lags.get(lag, 0) + 1
                if self.rule.mode == "sync":
                    self.waiting[worker] = pushed
                    self._together()
                else:
                    self._apply([pushed], self.rule.scale(lag))
            self._told("put", worker, number, pushed, lag)
            return counts

    def _together(self) -> None:
        """In synchronous training, make one update of the mean once all pushes have arrived. The
        sum is in order of rank, so it does not depend on the order of arrival."""
        if self.rule.mode != "sync" or not self.waiting:
            return
        here = self.clocks.at  # pushes of workers that have left count, too
        needed = min(self.rule.aggregate or len(here), len(here))
        if sum(worker in self.waiting for worker in here) < needed:
            return
        pushes = [self.waiting[rank] for rank in sorted(self.waiting)]
        self.waiting.clear()
        self._apply(pushes)

    def _apply(self, pushes: list[Pushed], scale: float = 1.0) -> None:
        self.published = (None, None)  # a reference would prevent an update in place
        self.store.apply(*pushes, scale=scale)
        self.version += 1
        self.counts.updates += 1
        self.counts.applied += len(pushes)

    def _told(self, method: str, *args: Any) -> None:
        super()._told(method, *args)
        if self.version > self.seen:
            self.seen = self.version
            self.on_update()

    def pull(self, worker: int, ahead: int = 0, dtype: str | None = None) -> Values:
        """The values, once the rule lets this worker read.

        Args:
            worker: its rank.
            ahead: as for ``Clocks.blockers``.
            dtype: dtype in which the values are sent, where theirs is wider.

        Raises:
            WaitError: the rule did not in ``wait_s``; names the workers that are behind.
        """
        with self.changed:
            self._until_it_may_read(worker, ahead)
            self.read_at[worker] = self.version
            if self.version == 0 and self.store.averages:
                dtype = None  # the first values, which exist only here
            key = (self.version, dtype)
            if self.published[0] != key:  # once for all reads of this version
                self.published = (key, publish(self.store.read(dtype)))
            if self.published[1]:
                self.has_read.add(worker)
            return Values(self.version, self.published[1])

    def pull_rows(self, worker: int, rows: Mapping[str, Array]) -> Values:
        """Rows of tables, by their numbers on this server; waits and raises like ``pull``.

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
            if not self._waited(until):
                raise WaitError(
                    f"worker {worker} waited {self.wait_s:g} s to read: "
                    + (
                        NOBODY
                        if behind is None
                        else f"worker{'s' * (len(behind) > 1)} "
                        f"{', '.join(map(str, behind))} did not push"
                    )
                )

    def push_pull(self, worker: int, number: int, pushed: Pushed) -> Values:
        """``push``, then ``pull``."""
        self.push(worker, number, pushed)
        return self.pull(worker, pushed.ahead, pushed.dtype)

    def now(self) -> tuple[Values, Counts]:
        """The current values, for callers other than workers, and the counts."""
        with self.changed:
            return Values(self.version, self.store.last()), self.counts

    def end(self, version: int, values: Flat) -> None:
        """Set the final values, from a worker that ran the updates itself; of several, the last."""
        with self.changed:
            if version >= self.ended:
                self.ended = version
                self.published = (None, None)
                self.store.end(values)

    def tables(self) -> dict[str, Array]:
        """Copies of all rows of tables on this server."""
        with self.changed:
            return self.store.tables.whole()

    def dump(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """What another server needs to resume from here: facts (JSON data) and arrays."""
        with self.changed:
            arrays = self.store.dump()
            arrays |= laid_aside(self.waiting)
            return shard_facts(self), arrays

    def load(self, facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Resume from the result of ``dump``."""
        with self.changed:
            take_up(self, facts, arrays)
            self.changed.notify_all()

    def again(self, workers: int, number: int | None) -> None:
        """See ``Members``; pushes that are in no update are pushed again."""
        with self.changed:
            for worker in self.waiting:
                self.last[worker] = (self.last[worker][0] - 1, True)
            self.waiting.clear()
            super().again(workers, number)

    def _behind(self, worker: int, ahead: int = 0) -> tuple[int, ...] | None:
        """The workers that a worker waits for; None: it waits for the first values."""
        if self.store.values is None:
            return None
        self._present(worker)
        if self.rule.mode == "sync":
            if worker not in self.waiting:
                return ()
            return tuple(sorted(set(self.clocks.at) - set(self.waiting)))
        return self.clocks.blockers(worker, ahead)
