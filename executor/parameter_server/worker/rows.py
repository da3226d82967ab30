"""A worker's view of tables: placement of rows, checks of row ids, and a cache of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from executor.parameter_server.placement.layout import Array, check_width
from executor.parameter_server.server.tables import summed
from planner.errors import RequestError

Rows = dict[str, tuple[Array, Array]]
"""For each table, row numbers and the gradients of these rows."""


@dataclass(frozen=True)
class TableLayout:
    """Tables over servers: row r lies on server r % servers, as its row r // servers.

    Attributes:
        servers: number of servers.
        like: shape and dtype of every table, [rows, ...width].
    """

    servers: int
    like: Mapping[str, jax.ShapeDtypeStruct]

    def scatter(self, tables: Mapping[str, Any]) -> list[dict[str, Array]]:
        """The part of these tables for each server."""
        whole = {name: np.asarray(jax.device_get(table)) for name, table in tables.items()}
        return [{k: x[server :: self.servers] for k, x in whole.items()} for server in self._all]

    @property
    def about(self) -> dict[str, Any]:
        """Dtype and shape of each table, as JSON-compatible values."""
        return {name: [str(x.dtype), list(x.shape)] for name, x in self.like.items()}

    def checked(self, name: str, ids: Any) -> Array:
        """Row ids of a table, as [n] integers.

        Raises:
            RequestError: the table is unknown, or the ids are not ids of its rows.
        """
        if name not in self.like:
            raise RequestError(
                f"table {name!r}: expected one of {sorted(self.like)}, as given to init(tables=)"
            )
        array, rows = np.asarray(ids), self.like[name].shape[0]
        if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
            raise RequestError(
                f"table {name!r}: got ids {array.dtype}{list(array.shape)}, expected integers [n]"
            )
        wrong = np.flatnonzero((array < 0) | (array >= rows))
        if wrong.size:
            raise RequestError(
                f"table {name!r}: got id {array[wrong[0]]} (number {wrong[0]} of {array.size}), "
                f"expected 0 to {rows - 1}: the table has {rows} rows"
            )
        return array.astype(np.int64)

    def empty(self, name: str, n: int) -> Array:
        """An uninitialized array for n rows of a table."""
        return np.empty((n, *self.like[name].shape[1:]), self.like[name].dtype)

    def split(self, ids: Array) -> list[tuple[Array, Array]]:
        """For every server, the positions of its ids among these, and its row numbers for them."""
        owners = ids % self.servers
        positions = [np.flatnonzero(owners == server) for server in self._all]
        return [(at, ids[at] // self.servers) for at in positions]

    def push(self, rows: Mapping[str, Any]) -> tuple[Rows, list[Rows]]:
        """The gradients to push, summed per row, and each server's part of them.

        Every server gets every table that is named, even if it holds none of the rows.

        Raises:
            RequestError: ids or gradients do not fit the table; names the table.
        """
        sums: Rows = {}
        parts: list[Rows] = [{} for _ in self._all]
        for name, pair in sorted(
            checked_tables(rows, "rows", "(ids [n], gradients [n, ...])").items()
        ):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise RequestError(
                    f"table {name!r}: got {type(pair).__name__}, expected (ids [n], gradients [n, "
                    "...])"
                )
            ids, gradients = pair
            numbers = self.checked(name, ids)
            got = np.asarray(jax.device_get(gradients))
            expected = ((len(numbers), *self.like[name].shape[1:]), self.like[name].dtype)
            if (got.shape, got.dtype) != expected:
                raise RequestError(
                    f"table {name!r}: got gradients {got.dtype}{list(got.shape)}, "
                    f"expected {expected[1]}{list(expected[0])}"
                )
            numbers, got = summed(numbers, got)
            sums[name] = (numbers, got)
            for part, (at, local) in zip(parts, self.split(numbers), strict=True):
                part[name] = (local, got[at])
        return sums, parts

    def merge(
        self, ids: Mapping[str, Array], parts: Sequence[Mapping[str, Array]]
    ) -> dict[str, Array]:
        """The rows with these ids, from each server's part of them."""
        rows = {}
        for name, wanted in ids.items():
            rows[name] = self.empty(name, len(wanted))
            for (at, _), part in zip(self.split(wanted), parts, strict=True):
                rows[name][at] = part[name]
        return rows

    @property
    def _all(self) -> range:
        return range(self.servers)


def table_layout(tables: Mapping[str, Any], servers: int, *, added: bool) -> TableLayout:
    """Spread tables over servers.

    Args:
        tables: arrays or ShapeDtypeStructs [rows, ...width], by table name.
        servers: number of servers.
        added: whether NumPy adds what is pushed; else JAX computes the updates.

    Raises:
        RequestError: a table has no rows, is not an array of numbers, or has a dtype that JAX would
            truncate.
    """
    like = {}
    for name, table in checked_tables(tables, "tables", "[rows, ...] arrays").items():
        shape, dtype = getattr(table, "shape", ()), getattr(table, "dtype", None)
        if dtype is None or jax.numpy.issubdtype(dtype, jax.dtypes.extended) or 0 in (shape or [0]):
            raise RequestError(
                f"table {name!r}: got {type(table).__name__} of shape {list(shape)}, expected an "
                "array of numbers [rows, ...]"
            )
        if not added:
            check_width(f"table {name!r}", dtype)
        like[name] = jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))
    return TableLayout(servers, like)


def checked_tables(given: Any, what: str, values: str) -> Mapping[str, Any]:
    """Return the argument for tables; raises RequestError if it is not a mapping."""
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{what}: got {type(given).__name__}, expected a dict of {values} by name of the table"
        )
    return given


class RowCache:
    """Caches rows that a worker has read, for a limited number of its pushes.

    Args:
        clocks: a row that was read at clock c may be used until clock c + clocks.
    """

    def __init__(self, clocks: int) -> None:
        self.clocks, self.hits, self.misses = clocks, 0, 0
        self._held: dict[str, tuple[Array, Array, Array]] = {}

    def read(
        self,
        ids: Mapping[str, Array],
        now: int,
        read: Callable[[Mapping[str, Array]], Mapping[str, Array]],
        empty: Callable[[str, int], Array],
    ) -> dict[str, Array]:
        """Rows of tables by unique, sorted ids; rows that are not cached are read and cached."""
        here = {name: self.take(name, wanted, now) for name, wanted in ids.items()}
        missing = {name: wanted[~here[name][0]] for name, wanted in ids.items()}
        got = read(missing) if any(map(len, missing.values())) else {}
        rows = {}
        for name, wanted in ids.items():
            which, held = here[name]
            rows[name] = empty(name, len(wanted))
            rows[name][which] = held
            if name in got:
                rows[name][~which] = got[name]
                self.put(name, missing[name], got[name], now)
        return rows

    def take(self, name: str, ids: Array, now: int) -> tuple[Array, Any]:
        """Which of these unique, sorted ids are cached, [n] bool, and their rows."""
        if name not in self._held:
            self.misses += len(ids)
            return np.zeros(len(ids), bool), 0
        self._keep(name, self._held[name][2] >= now - self.clocks)
        held, rows, _ = self._held[name]
        at = np.searchsorted(held, ids)
        here = np.isin(ids, held, assume_unique=True)
        self.hits += int(here.sum())
        self.misses += len(ids) - int(here.sum())
        return here, rows[at[here]]

    def put(self, name: str, ids: Array, rows: Array, now: int) -> None:
        """Cache rows that were read; none of them is cached yet."""
        times = np.full(len(ids), now)
        if name in self._held:
            held = self._held[name]
            ids, rows = np.concatenate([held[0], ids]), np.concatenate([held[1], rows])
            times = np.concatenate([held[2], times])
        order = np.argsort(ids)
        self._held[name] = (ids[order], rows[order], times[order])

    def pushed(self, rows: Rows, added: bool) -> None:
        """Update the cache after a push of this worker; ``added``: the servers add it and do
        nothing else."""
        for name, (ids, changes) in rows.items():
            if added:
                self.add(name, ids, changes)
            else:
                self.drop(name, ids)

    def add(self, name: str, ids: Array, changes: Array) -> None:
        """Add a push of this worker to the cached rows, as the servers do."""
        if name in self._held:
            held, rows, _ = self._held[name]
            here = np.isin(ids, held, assume_unique=True)
            rows[np.searchsorted(held, ids[here])] += changes[here]

    def drop(self, name: str, ids: Array) -> None:
        """Drop rows from the cache: the servers changed them in an unknown way."""
        if name in self._held:
            self._keep(name, ~np.isin(self._held[name][0], ids))

    def _keep(self, name: str, which: Array) -> None:
        ids, rows, times = self._held[name]
        if not which.all():
            self._held[name] = (ids[which], rows[which], times[which])
