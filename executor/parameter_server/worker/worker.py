"""The parameter server as a worker sees it: parameters as a pytree, pulled and pushed."""

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

    Several threads of a loop may use it: pushes and pulls run one at a time. Only one thread may
    call ``barrier``.

    Args:
        links: connections to the servers.
        rank: rank of this worker.
        num_workers: number of workers.
        rule, optimizer: what the servers run.
        update_on: where the optimizer runs: "server", or "worker", on the averages of the servers.
        wait_s: deadline of every wait, in seconds.
        pull_dtype: dtype that floating-point values are rounded to for transfer, "bfloat16"; the
            servers' values are not rounded, and pulled values have their dtype. None: no rounding.
        split_bytes, partition: as for ``layout_of``.
        compress: gradients travel as "bf16", "int8" or "2bit", with error feedback; None:
            unchanged.
        on_lost: what happens to the job when a worker is lost, as for ``train``.
        row_cache: number of this worker's pushes for which rows of tables are cached after they
            were read; the worker's own pushes are applied to them. 0: no cache.

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
        """The address at which other workers reach this worker's host.

        Raises:
            RequestError: the workers are threads of one process.
        """
        return self._calls.host

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which provides the first values, and saves and reports where
        one worker does so for all."""
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
        """Number of updates in the values that were read last; the minimum over all servers."""
        return self._exchange.version

    @property
    def cache_hits(self) -> int:
        """Number of rows that were taken from the cache."""
        return self._cache.hits if self._cache else 0

    @property
    def cache_misses(self) -> int:
        """Number of rows that were not in the cache; 0 without a cache."""
        return self._cache.misses if self._cache else 0

    @one_at_a_time
    def init(self, params: Any, tables: Mapping[str, Any] | None = None) -> Any:
        """Define the parameters; the values of the chief (worker 0) are the first.

        Args:
            params: a pytree, pulled as a whole; may be empty.
            tables: arrays [rows, ...width] by table name, pulled by row. On workers other than the
                chief, ShapeDtypeStructs suffice.

        Returns:
            The values of ``params`` on the servers: the chief's, or those of a resumed run.

        Raises:
            RequestError: the parameters differ from those of worker 0 or of the resumed run; the
                optimizer depends on names or shapes of arrays, which servers do not have; or
                ``init`` was called before.
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
        """Number of pushes of this worker's rank that count. A restarted worker or a resumed job
        begins above 0; its loop starts there."""
        return self._calls.number

    @one_at_a_time
    def pull(self) -> Any:
        """The parameters, as soon as this worker may read them: NumPy arrays, read-only.

        They may lie in memory that is shared with other processes and can't be reused while they
        exist: copy arrays that you keep for many steps.

        Raises:
            WaitError: this worker may not read them in time; names the workers that are behind.
        """
        return self._exchange.pull()

    @one_at_a_time
    def pull_rows(self, rows: Mapping[str, Any]) -> dict[str, Array]:
        """Rows of tables, as soon as this worker may read them: new NumPy arrays.

        With a cache, rows may be as old as the cache allows; if all rows are cached, it does not
        wait.

        Args:
            rows: for each table, row ids [n] in any order; they may repeat.

        Returns:
            For each table, rows [n, ...width].

        Raises:
            RequestError: an unknown table, or ids that the table does not have.
            WaitError: as for ``pull``.
        """
        return self._exchange.pull_rows(rows)

    @one_at_a_time
    def push(self, gradients: Any = None, rows: Mapping[str, Any] | None = None) -> bool:
        """Send gradients (or, without an optimizer on the servers, values to add).

        Args:
            gradients: a pytree of the structure of the parameters; None leaves the parameters
                unchanged.
            rows: for each table, ids [n] and gradients [n, ...width]; gradients of a repeated id
                are summed. Rows that are not named stay unchanged.

        Returns:
            Whether all servers accepted the push; the rule may leave out late ones.
        """
        return self._exchange.push(gradients, rows)

    @one_at_a_time
    def push_pull(
        self, gradients: Any = None, rows: Mapping[str, Any] | None = None, *, overlap: bool = False
    ) -> Any:
        """``push``, then ``pull``, in one message to each server and back.

        Args:
            gradients, rows: as for ``push``.
            overlap: do not wait: send the push and return the result of the previous call, while
                the answer is in transit. The first call returns the current values. Gradients then
                belong to values without this worker's last push, which adds one to the lag.

        Raises:
            RequestError: ``overlap`` where the rule allows no lag.
            WaitError: as for ``pull``; with ``overlap``, possibly that of the previous call.
        """
        if overlap:
            return self._exchange.overlapped(gradients, rows)
        return self._exchange.push_pull(gradients, rows)

    def settle(self) -> None:
        """Wait for the pending ``push_pull(overlap=True)``; every other call does so first.

        Raises:
            WaitError: as for ``pull``.
        """
        self._exchange.settle()

    def leave(self) -> None:
        """Announce that this worker has finished. Other workers no longer wait for it, and it does
        not wait for one of its threads that is still in a call."""
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
        """The final message to each server: this rank, and its last push that arrived."""
        return self._calls.leaving

    def barrier(self) -> None:
        """Wait until every active worker has reached the barrier.

        Raises:
            WaitError: some workers did not in time; names them.
        """
        self.settle()
        self._calls.barrier()

    def meet(self, text: str | None) -> str:
        """Return the text of worker 0, the only worker that passes one; a job has one text.

        Raises:
            RequestError: worker 0 has passed another text before.
            WaitError: worker 0 passed none in time.
        """
        return self._calls.meet(text)

    def members(self) -> tuple[int, ...]:
        """The ranks of the active workers."""
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
            items: file names, ranges of rows or anything else; the same on every worker, in the
                same order. Only their places travel.
            how: "fixed", items whose place % num_workers equals this rank; or "queue", one at a
                time from a queue on server 0, where an item is finished when its worker takes the
                next one, and the item of a lost worker goes to another.
            policy: for "fixed": "leave", some workers have one item more; "pad", all have the same
                number, and the first items come twice; "drop", all have the same number, and the
                last items are left out.
            epochs: number of epochs.
            seed: shuffles each epoch in another order; None keeps the order of the items.

        Raises:
            RequestError: the arguments are invalid, or the items differ from another worker's.
            WaitError: other workers have the last items of a queue, and nothing changed in
                ``wait_s``; says which worker has which item.
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
