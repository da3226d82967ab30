"""The pushes and pulls of one worker: one message to each server, and one back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from executor.parameter_server.placement.layout import Array, Flat, Layout
from executor.parameter_server.server.clock import Rule
from executor.parameter_server.transport.calls import Args, Behind, ServerCalls
from executor.parameter_server.transport.links import Links
from executor.parameter_server.worker.replica import Replica
from executor.parameter_server.worker.rows import RowCache, Rows, TableLayout, checked_tables
from planner.errors import RequestError

Read = tuple[dict[int, int], Any]
"""The versions that servers have read, by server, and the values as a pytree."""


class Exchange:
    """The pushes and pulls of one worker; one of them may be in flight while the worker computes.

    Args:
        links: links to the servers.
        calls: the worker's calls over those links.
        rule: how far workers may be apart.
        replica: runs the worker's updates, if they do not run on the servers.
        cache: rows of tables that were read; without one, every read goes to the servers.
        adds: whether servers add what is pushed to rows, and do nothing else.

    Attributes:
        version: number of updates in the last values read; the minimum over all servers.
    """

    def __init__(
        self,
        links: Links,
        calls: ServerCalls,
        *,
        rule: Rule,
        replica: Replica | None,
        cache: RowCache | None,
        adds: bool,
    ) -> None:
        self._links, self._calls, self._rule = links, calls, rule
        self._replica, self._cache, self._adds = replica, cache, adds
        self._layout: Layout | None = None
        self._tables: TableLayout | None = None
        self._seen: dict[int, int] = {}
        self._behind: Behind[Read] = Behind()
        self.version = 0

    def begin(self, layout: Layout, tables: TableLayout) -> None:
        """Set the layouts of the parameters and the tables."""
        self._layout, self._tables = layout, tables

    @property
    def layout(self) -> Layout:
        """The layout of the parameters on the servers; raises RequestError before ``begin``."""
        if self._layout is None:
            raise RequestError("call init(params) first: nothing says what the parameters are")
        return self._layout

    @property
    def shapes(self) -> Any:
        """The parameters as ShapeDtypeStructs; None before ``begin``."""
        return None if self._layout is None else self._layout.like

    @property
    def tables(self) -> TableLayout:
        """The tables; raises RequestError before ``begin``."""
        if self._tables is None:
            raise RequestError("call init(params) first, or init(params, tables=...)")
        return self._tables

    def pull(self) -> Any:
        """The parameters; see ``ParameterServer.pull``."""
        self.settle()
        return self._now(self._read(self._calls.pull()))

    def pull_rows(self, rows: Mapping[str, Any]) -> dict[str, Array]:
        """Rows of tables; see ``ParameterServer.pull_rows``."""
        tables = self.tables
        unique, back = {}, {}
        for name, ids in checked_tables(rows, "pull_rows", "ids").items():
            unique[name], back[name] = np.unique(tables.checked(name, ids), return_inverse=True)
        if self._cache is None:
            by_table = self._read_rows(unique)
        else:
            by_table = self._cache.read(unique, self._calls.number, self._read_rows, tables.empty)
        return {name: by_table[name][back[name]] for name in rows}

    def _read_rows(self, ids: Mapping[str, Array]) -> dict[str, Array]:
        self.settle()
        parts: list[dict[str, Array]] = [{} for _ in range(self._links.count)]
        for name, wanted in ids.items():
            for part, (_, local) in zip(parts, self.tables.split(wanted), strict=True):
                part[name] = local
        answers = self._calls.call("pull_rows", [(self._calls.rank, part) for part in parts])
        self.version = min(x.version for x in answers)
        return self.tables.merge(ids, [x.values for x in answers])

    def push(self, gradients: Any, rows: Mapping[str, Any] | None) -> bool:
        """Send gradients; see ``ParameterServer.push``."""
        self.settle()
        pushed, sums = self._numbered(gradients, rows)
        took = all(self._calls.push("push", pushed).values())
        self._now_cached(sums, took and self._adds)
        return took

    def push_pull(self, gradients: Any, rows: Mapping[str, Any] | None) -> Any:
        """A push and a pull; see ``ParameterServer.push_pull``."""
        self.settle()
        pushed, sums = self._numbered(gradients, rows)
        read = self._push_pulled(pushed)
        self._now_cached(sums, False)
        return self._now(read)

    def overlapped(self, gradients: Any, rows: Mapping[str, Any] | None) -> Any:
        """``push_pull`` with ``overlap``; see there."""
        self._rule.check_overlap()
        seen = self._seen
        read = self._behind.arrived() or self._read(self._calls.pull(ahead=1))
        _, sums = self._numbered(gradients, rows)
        self._behind.submit(self._push_pulled, self._calls.overlapped(seen))
        self._now_cached(sums, False)
        return self._now(read)

    def settle(self) -> None:
        """Wait for the exchange that ``overlapped`` has started."""
        self._behind.arrived()

    def end(self) -> None:
        """Wait as ``settle`` does, and send the values of the replica, if it has updates."""
        self.settle()
        if self._replica is not None and self._replica.version:
            flats = self.layout.scatter(jax.device_get(self._replica.params))
            self._calls.call("end", [(self._replica.version, flat) for flat in flats])

    def _push_pulled(self, pushed: Sequence[Args]) -> Read:
        return self._read(self._calls.push("push_pull", pushed))

    def _read(self, answers: Mapping[int, Any]) -> Read:
        """Versions and values from the answers of servers."""
        flats: list[Flat] = [{}] * self._links.count
        for server, answer in answers.items():
            flats[server] = answer.values
        return {server: x.version for server, x in answers.items()}, self.layout.gather(flats)

    def _now(self, read: Read) -> Any:
        """The values for the loop, which computes its next gradients from them."""
        self._seen, values = read
        self.version = min(self._seen.values())
        return values if self._replica is None else self._replica.take(self.version, values)

    def _numbered(self, gradients: Any, rows: Mapping[str, Any] | None) -> tuple[list[Args], Rows]:
        """Arguments of a push for every server, and its rows, summed per row. The next push reuses
        the memory of dense gradients, if servers do not keep it."""
        sums, parts = self.tables.push(rows or {})
        flats: list[Flat] = [{}] * self._links.count
        if gradients is not None:
            room = self._links.room(self.layout.sizes)
            flats = self.layout.scatter(jax.device_get(gradients), room)
        return self._calls.next_push(flats, parts), sums

    def _now_cached(self, pushed: Rows, added: bool) -> None:
        """Update the cache after a push: rows that this worker reads must include its pushes."""
        if self._cache is not None:
            self._cache.pushed(pushed, added)
