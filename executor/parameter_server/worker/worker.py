"""What a worker sees: the parameters as a pytree, pulled and pushed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from executor.parameter_server.jobs.threads import one_at_a_time
from executor.parameter_server.placement.elementwise import EXACT, check_form
from executor.parameter_server.placement.layout import SPLIT_BYTES, Array, Layout, layout_of
from executor.parameter_server.placement.partition import Partitioner
from executor.parameter_server.server.clock import Rule
from executor.parameter_server.transport.calls import ServerCalls
from executor.parameter_server.transport.links import Links
from executor.parameter_server.transport.wire import check_pull_dtype
from executor.parameter_server.worker.exchange import Exchange
from executor.parameter_server.worker.replica import Replica
from executor.parameter_server.worker.rows import RowCache, TableLayout, table_layout
from executor.parameter_server.worker.shares import Shares
from planner.errors import RequestError


class ParameterServer:
    """The parameters of a job, as one of its workers sees them.

    A loop may use it from several threads: of the calls that push or pull, one is under way at a
    time, and ``barrier`` is for one of them.

    Args:
        links: to the servers.
        rank: of this worker.
        num_workers: how many there are.
        rule, optimizer: what the servers do.
        update_on: where the optimizer runs: "server", or "worker", on what the servers average.
        wait_s: deadline of every wait, in seconds.
        pull_dtype: floating-point values travel rounded to it, "bfloat16"; the servers' are not
            rounded, and what is pulled has their dtype. None sends them as they are.
        split_bytes, partition: as for ``layout_of``.
        compress: gradients travel as "bf16", "int8" or "2bit", with error feedback; None: as they
            are.
        on_lost: what becomes of the job when a worker is lost, as for ``train``.
        row_cache: rows of tables are taken from memory for this many of this worker's pushes after
            they were read, with what it pushed itself in them; 0 reads always.

    Raises:
        RequestError: an unknown ``pull_dtype``.
    """

    def __init__(
        self,
        links: Links,
        rank: int,
        num_workers: int,
        *,
        rule: Rule = Rule(),  # noqa: B008  it is frozen
        optimizer: optax.GradientTransformation | None = None,
        update_on: str = "server",
        wait_s: float = 300.0,
        pull_dtype: str | None = None,
        split_bytes: int = SPLIT_BYTES,
        partition: Partitioner | None = None,
        compress: str | None = None,
        row_cache: int = 0,
        on_lost: str = "leave",
    ) -> None:
        self.rank, self.num_workers, self.on_lost = rank, num_workers, on_lost
        self._links = links
        check_pull_dtype(pull_dtype)
        sync = rule.mode == "sync"
        self._calls = ServerCalls(
            links, rank, wait_s, sync=sync, compress=compress, dtype=pull_dtype
        )
        self._cut: dict[str, Any] = {"split_bytes": split_bytes, "partition": partition}
        self.rule, self.optimizer = rule, optimizer
        self._replica = None
        if update_on == "worker" and optimizer is not None:
            self._replica = Replica(optimizer, EXACT)
        self._cache = RowCache(row_cache) if row_cache else None
        self._exchange = Exchange(
            links,
            self._calls,
            rule=rule,
            replica=self._replica,
            cache=self._cache,
            adds=optimizer is None and not rule.lag_scaled,
        )
        self.one = threading.RLock()
        self._shares = Shares(self._calls, num_workers, self.settle, wait_s, self.one)
        self._begun = False

    @property
    def host(self) -> str:
        """Where other workers reach this one's host.

        Raises:
            RequestError: the workers are threads of one process.
        """
        return self._calls.host

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, who gives the first values; and saves and shows, where one
        worker is to do it for all."""
        return self.rank == 0

    @property
    def layout(self) -> Layout:
        """Which server holds what; raises RequestError before ``init``."""
        return self._exchange.layout

    @property
    def shapes(self) -> Any:
        """The parameters as ShapeDtypeStructs; None before ``init``."""
        return self._exchange.shapes

    @property
    def tables(self) -> TableLayout:
        """The tables; raises RequestError before ``init``."""
        return self._exchange.tables

    @property
    def version(self) -> int:
        """Updates that were in what was read last; the least of all servers."""
        return self._exchange.version

    @property
    def cache_hits(self) -> int:
        """Rows that were taken from the cache."""
        return self._cache.hits if self._cache else 0

    @property
    def cache_misses(self) -> int:
        """Rows that were not in the cache, with one."""
        return self._cache.misses if self._cache else 0

    @one_at_a_time
    def init(self, params: Any, tables: Mapping[str, Any] | None = None) -> Any:
        """Say what the parameters are; the chief's (worker 0's) values are the first.

        Args:
            params: a pytree, pulled as a whole; may be empty.
            tables: arrays [rows, ...width] by name, pulled by row. Of workers that are not the
                chief, shapes and dtypes (ShapeDtypeStructs) will do.

        Returns:
            The values of ``params`` that the servers have: the chief's, or those of a run that goes
            on.

        Raises:
            RequestError: the parameters are not those of worker 0, or of what the job goes on from;
                the optimizer looks at names or shapes of arrays, which servers do not have; or it
                was called before.
            WaitError: the chief did not call it in time.
        """
        if self._begun:
            raise RequestError(
                "init was called before in this loop: expected one call, with one tree for all "
                "parameters, such as init({'generator': ..., 'critic': ...})"
            )
        if self._replica is not None and tables:
            raise RequestError("tables with update_on='worker': servers update their rows")
        layout = layout_of(params, self._links.count, **self._cut)
        row_layout = table_layout(tables or {}, self._links.count, added=self.optimizer is None)
        if self.is_chief and self.optimizer is not None and self._replica is None:
            check_form(self.optimizer, params, tables or {})
        self._exchange.begin(layout, row_layout)
        self._calls.busy = layout.busy(tables=bool(tables))
        about = layout.about | {"tables": row_layout.about}
        if self.is_chief:
            flats = layout.scatter(jax.device_get(params))
            parts = row_layout.scatter(tables or {})
            self._calls.call("init", [(*both, about) for both in zip(flats, parts, strict=True)])
            self._calls.all("describe", self.shapes)
        self._calls.join()
        if not self.is_chief:
            self._calls.agree(about)
        values = self.pull()
        self._begun = True
        return values

    @property
    def clock(self) -> int:
        """How many pushes of this worker's rank count; more than 0 at first where a worker is
        started again or a job goes on: a loop begins there."""
        return self._calls.number

    @one_at_a_time
    def pull(self) -> Any:
        """The parameters, as soon as this worker may read them: NumPy arrays, read-only.

        They may lie in memory that is shared with other processes, and keep it from being used
        again: copy what is kept for many steps.

        Raises:
            WaitError: it might not in time; names the workers that are behind.
        """
        return self._exchange.pull()

    @one_at_a_time
    def pull_rows(self, rows: Mapping[str, Any]) -> dict[str, Array]:
        """Rows of tables, as soon as this worker may read them: NumPy arrays of its own.

        With a cache, rows may be as old as it allows; when all are there, nobody is waited for.

        Args:
            rows: for each table, ids [n] in any order; they may repeat.

        Returns:
            For each table, [n, ...width].

        Raises:
            RequestError: an unknown table, or ids that it has not.
            WaitError: as for ``pull``.
        """
        return self._exchange.pull_rows(rows)

    @one_at_a_time
    def push(self, gradients: Any = None, rows: Mapping[str, Any] | None = None) -> bool:
        """Send gradients (or, without an optimizer on the servers, what is to be added).

        Args:
            gradients: a pytree of the form of the parameters; None leaves those as they are.
            rows: for each table, ids [n] and gradients [n, ...width]; those of an id that repeats
                are summed. Rows that are not named stay as they are.

        Returns:
            Whether all servers took it; the rule may leave out what comes late.
        """
        return self._exchange.push(gradients, rows)

    @one_at_a_time
    def push_pull(
        self, gradients: Any = None, rows: Mapping[str, Any] | None = None, *, overlap: bool = False
    ) -> Any:
        """``push``, then ``pull``, in one message to each server and back.

        Args:
            gradients, rows: as for ``push``.
            overlap: do not wait: send, and return what the call before this one asked for, while
                the answer travels. The first returns the values as they are. Gradients are then of
                values that miss this worker's last push, a lag of one more.

        Raises:
            RequestError: ``overlap`` where the rule allows no lag.
            WaitError: as for ``pull``; with ``overlap``, maybe of the call before.
        """
        if overlap:
            return self._exchange.overlapped(gradients, rows)
        return self._exchange.push_pull(gradients, rows)

    def settle(self) -> None:
        """Wait for what ``push_pull(overlap=True)`` has sent; every other call does so first.

        Raises:
            WaitError: as for ``pull``.
        """
        self._exchange.settle()

    def leave(self) -> None:
        """Say that this worker has finished; the others no longer wait for it, nor it for a thread
        of its own that is still in a call."""
        try:
            if self.one.acquire(blocking=False):
                try:
                    self._exchange.end()
                finally:
                    self.one.release()
        finally:
            self._calls.call("leave", self.leaving)

    @property
    def leaving(self) -> list[tuple[int, int | None]]:
        """What every server is told at the end: this rank, and its last push that arrived."""
        return self._calls.leaving

    def barrier(self) -> None:
        """Wait until every worker that is there has come here.

        Raises:
            WaitError: some did not in time; names them.
        """
        self.settle()
        self._calls.barrier()

    def meet(self, text: str | None) -> str:
        """Hear what worker 0 says, which alone has a ``text``; one in a job.

        Raises:
            RequestError: worker 0 has said something else.
            WaitError: it said nothing in time.
        """
        return self._calls.meet(text)

    def members(self) -> tuple[int, ...]:
        """The ranks of the workers that are there."""
        ranks: Sequence[int] = self._calls.all("members")[0]
        return tuple(ranks)

    def shares(
        self,
        items: Sequence[Any],
        *,
        how: str = "fixed",
        policy: str = "leave",
        epochs: int = 1,
        seed: int | None = None,
    ) -> Iterator[Any]:
        """This worker's items, one after the other.

        Args:
            items: file names, ranges of rows, what you like; the same on every worker, in the same
                order. Only their places travel.
            how: "fixed", those whose place % num_workers is this rank; or "queue", one at a time
                from a queue on server 0, where an item is finished when its worker asks for the
                next, and what a lost worker had goes to another.
            policy: of "fixed": "leave", some workers have one more; "pad", all have as many, and
                the first items come twice; "drop", all have as many, and the last are left out.
            epochs: how often.
            seed: shuffles each epoch in another order; None keeps that of the items.

        Raises:
            RequestError: arguments that make no sense, or other items than another worker's.
            WaitError: the last items of a queue are held by others, and nothing changed in
                ``wait_s``; says who holds which.
        """
        if not hasattr(items, "__getitem__") or not hasattr(items, "__len__"):
            raise RequestError(
                f"shares: got {type(items).__name__}, expected a list, the same on every worker"
            )
        if how == "queue" and self._replica is not None:
            raise RequestError(
                "shares: how='queue' with update_on='worker': who waits for the last items would "
                "miss means; expected how='fixed', or update_on='server'"
            )
        places = self._shares.of(len(items), how=how, policy=policy, epochs=epochs, seed=seed)
        return (items[k] for k in places)
