"""What a worker knows of tables: which rows lie where, what may be asked, and rows it has read."""

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
"""For each table, numbers of its rows, and their gradients."""


@dataclass(frozen=True)
class TableLayout:
    """Tables over servers: row r lies on server r % servers, as its row r // servers.

    Attributes:
        servers: how many.
        like: shape and dtype of every table, [rows, ...width].
    """

    servers: int
    like: Mapping[str, jax.ShapeDtypeStruct]

    def scatter(self, tables: Mapping[str, Any]) -> list[dict[str, Array]]:
        """What every server gets of these tables."""
        whole = {name: np.asarray(jax.device_get(table)) for name, table in tables.items()}
        return [{k: x[server :: self.servers] for k, x in whole.items()} for server in self._all]

    @property
    def about(self) -> dict[str, Any]:
        """The tables, as JSON has them."""
        return {name: [str(x.dtype), list(x.shape)] for name, x in self.like.items()}

    def checked(self, name: str, ids: Any) -> Array:
        """Ids of rows of a table, as [n] integers.

        Raises:
            RequestError: an unknown table, or something else than ids of its rows.
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
        """Room for n rows of a table."""
        return np.empty((n, *self.like[name].shape[1:]), self.like[name].dtype)

    def split(self, ids: Array) -> list[tuple[Array, Array]]:
        """For every server, which of these ids are its own (positions), and its numbers of them."""
        owners = ids % self.servers
        positions = [np.flatnonzero(owners == server) for server in self._all]
        return [(at, ids[at] // self.servers) for at in positions]

    def push(self, rows: Mapping[str, Any]) -> tuple[Rows, list[Rows]]:
        """What is pushed: every row once, and what each server gets of it.

        Every server gets every table that is named, though it may hold none of the rows.

        Raises:
            RequestError: ids or gradients that do not fit the table; names it.
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
        """The rows with these ids, from what each server gave of them."""
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
        tables: [rows, ...width] arrays or ShapeDtypeStructs, by name.
        servers: how many.
        added: what is pushed is added by NumPy; else JAX computes the updates.

    Raises:
        RequestError: a table without rows, that is no array of numbers, or that JAX would cut.
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
    """What is given for tables; raises RequestError if it is no dict."""
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{what}: got {type(given).__name__}, expected a dict of {values} by name of the table"
        )
    return given


class RowCache:
    """Rows that a worker has read, for as many of its own pushes as it allows.

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
        """Rows of tables, ids once each, in order; those that are not here are read and kept."""
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
        """Which of these ids (once each, in order) are here, [n] bool, and their rows."""
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
        """Keep rows that were read; none of them is here."""
        times = np.full(len(ids), now)
        if name in self._held:
            held = self._held[name]
            ids, rows = np.concatenate([held[0], ids]), np.concatenate([held[1], rows])
            times = np.concatenate([held[2], times])
        order = np.argsort(ids)
        self._held[name] = (ids[order], rows[order], times[order])

    def pushed(self, rows: Rows, added: bool) -> None:
        """This worker has pushed these, which its servers add to the rows, or not just that."""
        for name, (ids, changes) in rows.items():
            if added:
                self.add(name, ids, changes)
            else:
                self.drop(name, ids)

    def add(self, name: str, ids: Array, changes: Array) -> None:
        """What this worker pushed was added to the rows: add it to those that are here."""
        if name in self._held:
            held, rows, _ = self._held[name]
            here = np.isin(ids, held, assume_unique=True)
            rows[np.searchsorted(held, ids[here])] += changes[here]

    def drop(self, name: str, ids: Array) -> None:
        """These rows have changed, who knows how."""
        if name in self._held:
            self._keep(name, ~np.isin(self._held[name][0], ids))

    def _keep(self, name: str, which: Array) -> None:
        ids, rows, times = self._held[name]
        if not which.all():
            self._held[name] = (ids[which], rows[which], times[which])
