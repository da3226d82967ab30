"""Tables of rows on one server, updated only where a push touches them.

Row r of a table lies on server r % servers, as its row r // servers. If ids follow Zipf's law, as
words sorted by frequency do, contiguous blocks would give the first server nearly all the work.

The optimizer is lazy, like TensorFlow's LazyAdam, MXNet's lazy_update and PyTorch's SparseAdam. Its
state per row (Adam's moments) is read, updated and written back only for the rows of an update; the
moments of other rows do not decay. Its state per table (Adam's count) advances once for every
update that names the table, on every server, even if a server holds none of the rows. So it is the
same on all servers, and results do not depend on the number of servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.sparse import csr_array

from executor.parameter_server.placement.layout import Array
from planner.errors import RequestError

LEAST = 16
"""Updates are padded to this many rows, or a power of two above it, so few shapes are compiled."""

Update = Callable[[Any, Any, Any, float], Any]
"""(values, state, gradients, scale) to (values, state), as compiled by the ``Store``."""


def summed(ids: Array, gradients: Array) -> tuple[Array, Array]:
    """The distinct ids in order, with the sums of their gradients, added in order of occurrence.

    Args:
        ids: [n] integers.
        gradients: [n, ...width]; half precision is summed in float32.
    """
    if ids.size < 2 or bool(np.all(ids[1:] > ids[:-1])):
        return ids, gradients
    dtype, (n, *width) = gradients.dtype, gradients.shape
    half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    flat = gradients.reshape(n, math.prod(width)).astype(np.float32 if half else dtype)
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    which = csr_array((np.ones(n, flat.dtype), order, [*starts, n]), shape=(len(starts), n))
    sums: Array = (which @ flat).astype(dtype)
    return ids[starts], sums.reshape(len(starts), *width)


def scaled_update(update: Any, scale: Any, xnp: Any) -> Any:
    """An update multiplied by ``scale``, in the dtype of the update; integers are rounded.

    Args:
        update: an array of ``xnp``, which is NumPy or jax.numpy.
        scale: at most 1.
    """
    if jnp.issubdtype(update.dtype, jnp.integer):
        return xnp.where(scale == 1, update, xnp.rint(update * scale).astype(update.dtype))
    return update * xnp.asarray(scale, update.dtype)


@dataclass
class Table:
    """The rows of a table that one server holds.

    Attributes:
        values: [rows, ...width], written in place.
        leaves: leaves of the optimizer's state; those per row are [rows, ...], written in place.
        by_row: which leaves are per row.
        form: tree structure of the state.
    """

    values: Array
    leaves: list[Array]
    by_row: tuple[bool, ...]
    form: Any


class Tables:
    """All tables of one server. The caller must ensure that only one thread at a time uses them.

    Args:
        optimizer: applied lazily to pushed gradients; None adds what is pushed to the rows.
        update: the optimizer's update, compiled.
        extra: arrays that every update has beside the rows (see ``SECOND`` in the store).
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation | None,
        update: Update,
        extra: Mapping[str, Array],
    ) -> None:
        self.optimizer, self._update, self._extra = optimizer, update, dict(extra)
        self.held: dict[str, Table] = {}

    def init(self, tables: Mapping[str, Array]) -> None:
        """Set the initial rows, [rows, ...width] for each table.

        Raises:
            RequestError: the optimizer has a state that cannot be updated row by row.
        """
        for name, values in sorted(tables.items()):
            leaves, by_row, form = self._state(name, values)
            self.held[name] = Table(np.array(values), leaves, by_row, form)

    def apply(self, rows: Mapping[str, tuple[Array, Array]], scale: float = 1.0) -> None:
        """Update each named table once; gradients of repeated rows are summed.

        Args:
            rows: for each table, numbers of its rows on this server, and their gradients.
            scale: factor for the update that the optimizer computes.
        """
        for name, (numbers, gradients) in sorted(rows.items()):
            table = self._table(name, numbers)
            expected = (len(numbers), *table.values.shape[1:])
            if (gradients.shape, gradients.dtype) != (expected, table.values.dtype):
                raise RequestError(
                    f"table {name!r}: got gradients {gradients.dtype}{list(gradients.shape)}, "
                    f"expected {table.values.dtype}{list(expected)}; all workers must give init "
                    "the same tables"
                )
            numbers, gradients = summed(numbers, gradients)
            if self.optimizer is None:
                table.values[numbers] += scaled_update(gradients, scale, np)
            else:
                self._lazily(table, numbers, gradients, scale)

    def read(self, rows: Mapping[str, Array]) -> dict[str, Array]:
        """Copies of the rows with these numbers."""
        return {name: self._table(name, ids).values[ids] for name, ids in rows.items()}

    def whole(self) -> dict[str, Array]:
        """Copies of all rows that this server holds."""
        return {name: np.array(table.values) for name, table in self.held.items()}

    def dump(self) -> dict[str, Array]:
        """Copies of all arrays: ``kind/number/table`` names the values (kind "values", number 0)
        and each leaf of the optimizer's state, per row ("rows") or per table ("shared")."""
        arrays = {f"values/0/{name}": np.array(t.values) for name, t in self.held.items()}
        for name, table in self.held.items():
            for k, (leaf, by_row) in enumerate(zip(table.leaves, table.by_row, strict=True)):
                arrays[f"{'rows' if by_row else 'shared'}/{k}/{name}"] = np.array(leaf)
        return arrays

    def load(self, dumped: Mapping[str, Array]) -> None:
        """Restore the arrays of a ``dump``.

        Raises:
            RequestError: the dump is of another optimizer.
        """
        self.init({k.split("/", 2)[2]: x for k, x in dumped.items() if k.startswith("values/")})
        now = {key: (x.shape, x.dtype) for key, x in self.dump().items()}
        then = {key: (x.shape, x.dtype) for key, x in dumped.items()}
        if now != then:
            key = sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k))[0]
            raise RequestError(
                f"{key}: the optimizer has {now.get(key)}, what was kept has {then.get(key)}: "
                "resume with the optimizer of that run"
            )
        for key, x in dumped.items():
            kind, number, name = key.split("/", 2)
            if kind != "values":
                self.held[name].leaves[int(number)] = np.array(x)

    def _table(self, name: str, numbers: Array) -> Table:
        if name not in self.held:
            raise RequestError(f"table {name!r}: the servers have {sorted(self.held)}")
        table = self.held[name]
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(table.values):
            raise RequestError(
                f"table {name!r}: a server has {len(table.values)} of its rows, the request is for "
                f"{numbers.max()}; all workers must give init the same tables"
            )
        return table

    def _lazily(self, table: Table, numbers: Array, gradients: Array, scale: float) -> None:
        n = len(numbers)
        padded = max(LEAST, 1 << (n - 1).bit_length())

        def gathered(x: Array) -> Array:
            out = np.zeros((padded, *x.shape[1:]), x.dtype)
            out[:n] = x[numbers]
            return out

        pushed = np.zeros((padded, *gradients.shape[1:]), gradients.dtype)
        pushed[:n] = gradients
        leaves = [
            gathered(x) if by_row else x
            for x, by_row in zip(table.leaves, table.by_row, strict=True)
        ]
        values, state = self._update(
            {"rows": gathered(table.values), **self._extra},
            jax.tree_util.tree_unflatten(table.form, leaves),
            {"rows": pushed, **self._extra},
            scale,
        )
        table.values[numbers] = np.asarray(values["rows"])[:n]
        for k, (x, by_row) in enumerate(zip(jax.tree.leaves(state), table.by_row, strict=True)):
            if by_row:
                table.leaves[k][numbers] = np.asarray(x)[:n]
            else:
                table.leaves[k] = np.array(x)

    def _state(self, name: str, values: Array) -> tuple[list[Array], tuple[bool, ...], Any]:
        """The optimizer's state of a table: its leaves, which of them are per row, its structure.

        A leaf is per row if its shape changes with the number of rows.
        """
        optimizer = self.optimizer
        if optimizer is None:
            return [], (), None

        def shapes(rows: int) -> list[tuple[int, ...]]:
            like = jax.ShapeDtypeStruct((rows, *values.shape[1:]), values.dtype)
            state = jax.eval_shape(optimizer.init, {"rows": like, **self._extra})
            return [x.shape for x in jax.tree.leaves(state)]

        by_row = []
        for few, more in zip(shapes(17), shapes(19), strict=True):
            if few != more and (few[:1], more[:1], few[1:]) != ((17,), (19,), more[1:]):
                raise RequestError(
                    f"table {name!r}: the optimizer keeps an array of {list(few)} for 17 rows and "
                    f"of {list(more)} for 19: it cannot be updated row by row"
                )
            by_row.append(few != more)
        state = optimizer.init({"rows": jnp.asarray(values), **self._extra})
        leaves, form = jax.tree_util.tree_flatten(state)
        return [np.array(x) for x in leaves], tuple(by_row), form


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Whole tables from the rows of each server, in order of the servers."""
    tables = {}
    for name in sorted(parts[0]):
        held = [part[name] for part in parts]
        whole = np.empty((sum(map(len, held)), *held[0].shape[1:]), held[0].dtype)
        for server, rows in enumerate(held):
            whole[server :: len(held)] = rows
        tables[name] = whole
    return tables


def reshard_tables(dumps: Sequence[Mapping[str, Array]], servers: int) -> list[dict[str, Array]]:
    """The dumps (``Tables.dump``) of all servers, in order, as dumps for another number of servers.

    State per table comes from the first server. It is the same on all servers, unless a push had
    reached only some of them.
    """
    whole = joined([{k: x for k, x in d.items() if not k.startswith("shared/")} for d in dumps])
    shared = {k: x for k, x in dumps[0].items() if k.startswith("shared/")}
    return [
        {k: np.array(x[server::servers]) for k, x in whole.items()}
        | {k: np.array(x) for k, x in shared.items()}
        for server in range(servers)
    ]
