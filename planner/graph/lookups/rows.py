"""Evaluates a function of parameters on a few rows of its tables, instead of the whole tables.

The function's jaxpr is evaluated with ``Rows`` in place of the tables; every lookup reads its rows
from them. Nothing else changes, so values and gradients are those of the function: the gradient of
the rows equals the whole table's gradient in these rows, which is zero in all others.

Indices are computed once to decide which rows to fetch, and again in the function. Indices from
floating-point arithmetic may differ by rounding, which is not the same in two programs, so each
lookup reports whether its rows are present.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from planner import compat
from planner.annotate import MARKS
from planner.errors import InternalError, RequestError
from planner.graph.jaxpr.walk import REMAT, Body, Loop, Walk
from planner.graph.lookups.tables import (
    FILL,
    PROMISE,
    SAME,
    LookUps,
    LookupTable,
    bounds_of,
    looked_up,
    row_column,
)

Ids = NDArray[np.int32]
Missing = dict[str, list[Any]]
"""By path of a table, bool arrays of its lookups: True where a row is missing."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "ids"], meta_fields=["rows", "path"]
)
@dataclass(frozen=True)
class Rows:
    """Some rows of a table.

    Attributes:
        values: [n, *width].
        ids: int32 [n], their numbers, ascending; padded with ``rows`` at the end.
        rows: number of rows of the table.
        path: path of the table.
    """

    values: Any
    ids: Any
    rows: int
    path: str


def on_rows(lookups: LookUps, params_tree: Any) -> Callable[..., Any]:
    """The function that ``lookups`` was made from, on rows of its tables.

    Args:
        lookups: of the function; a call replaces those of its tables whose paths it names.
        params_tree: the tree structure of its parameters.

    Returns:
        ``small(params, ids, *batch)``: ``params`` in the form of the parameters, tables replaced by
        their rows [n, *width]; ``ids`` their numbers, int32 [n] ascending, by path. A path that is
        not in ``ids`` has its whole table. Returns the function's result and, by path of ``ids``,
        whether a lookup needed a missing row (bool []); the result is wrong then.
    """
    tables = {t.path: t for t in (*lookups.tables, *lookups.unused)}

    def small(params: Any, ids: Mapping[str, Any], *batch: Any) -> Any:
        leaves, form = jax.tree_util.tree_flatten(params)
        if form != params_tree:
            raise RequestError(f"got parameters of the form {form}, expected {params_tree}")
        for path, numbers in ids.items():
            table = tables[path]
            leaves[table.leaf] = Rows(leaves[table.leaf], jnp.asarray(numbers), table.rows, path)
        outs, missing = _run(lookups.jaxpr, [*leaves, *jax.tree_util.tree_leaves(batch)])
        flags = {path: _any(missing.get(path, [])) for path in ids}
        return jax.tree_util.tree_unflatten(lookups.out_tree, outs), flags

    return small


def unique_rows(table: LookupTable, indices: Sequence[NDArray[Any]]) -> Ids:
    """The rows that a batch needs: ascending, each once.

    Args:
        table: the table.
        indices: of its lookups, as ``LookUps.indices`` gives them.

    Raises:
        RequestError: an index is outside where the lookup promises that none is
            (``table[ids]``); JAX does not define what is read then.
    """
    for index, bounds, source in zip(indices, table.bounds, table.sources, strict=True):
        if bounds == PROMISE and index.size and (index.min() < 0 or index.max() >= table.rows):
            side = f"from {table.rows} on" if index.max() >= table.rows else "below the first row"
            raise RequestError(
                f"{table.path}: a lookup{f' at {source}' if source else ''} has an index {side}, "
                f"outside its {table.rows} rows, and promises, as JAX takes x[ids], that it has "
                "none; look up by jnp.take(table, ids, axis=0, mode='clip' or 'fill')"
            )
    none = np.zeros(0, np.int32)
    unique = np.unique(np.concatenate([none, *(np.asarray(x).reshape(-1) for x in indices)]))
    return unique[(unique >= 0) & (unique < table.rows)].astype(np.int32)


def padded(ids: Ids, rows: int, size: int = 1) -> Ids:
    """``ids`` padded with ``rows`` to a power of two, at least ``size``: few shapes, so few
    programs are compiled.

    >>> padded(np.array([2, 5, 7], np.int32), 10)
    array([ 2,  5,  7, 10], dtype=int32)
    """
    length = max(size, 1 << max(0, len(ids) - 1).bit_length())
    return np.concatenate([ids, np.full(length - len(ids), rows, np.int32)])


def _any(flags: Sequence[Any]) -> jax.Array:
    return functools.reduce(jnp.logical_or, map(jnp.any, flags), jnp.zeros((), bool))


def _run(jaxpr: Any, args: Sequence[Any]) -> tuple[list[Any], Missing]:
    walk = _OnRows()
    return walk.run(jaxpr, args), walk.missing


class _OnRows(Walk[Any]):
    """Evaluates equations that read ``Rows`` on these rows, and all others unchanged."""

    def __init__(self) -> None:
        self.missing: Missing = {}

    def noted(self, results: tuple[Sequence[Any], Missing]) -> Sequence[Any]:
        """Record what is missing; returns the results."""
        outs, missing = results
        for path, flags in missing.items():
            self.missing.setdefault(path, []).extend(flags)
        return outs

    def equation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        if any(isinstance(x, Rows) for x in ins):
            return super().equation(eqn, ins)
        return compat.evaluate_equation(eqn, ins)

    def operation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in MARKS:
            return [ins[0]]
        if name in SAME:
            (values,) = compat.evaluate_equation(eqn, [ins[0].values])
            return [dataclasses.replace(ins[0], values=values)]
        return self.noted(_look_up(eqn, ins))

    def call(self, eqn: Any, ins: list[Any], body: Body) -> Sequence[Any]:
        if eqn.primitive.name not in REMAT:
            return super().call(eqn, ins, body)
        again = jax.checkpoint(
            lambda *args: _run(body.jaxpr, args),
            policy=eqn.params["policy"],
            prevent_cse=eqn.params["prevent_cse"],
        )
        return self.noted(again(*ins))

    def loop(self, eqn: Any, ins: list[Any], loop: Loop) -> Sequence[Any]:
        consts, first, over = loop.split(ins)
        (body,) = loop.bodies

        def once(carry: list[Any], xs: list[Any]) -> Any:
            outs, missing = _run(body.jaxpr, [*consts, *carry, *xs])
            return outs[: loop.carries], (outs[loop.carries :], missing)

        p = eqn.params
        carry, (ys, missing) = jax.lax.scan(
            once, first, over, length=loop.trips, reverse=p["reverse"], unroll=p["unroll"]
        )
        return self.noted(([*carry, *ys], missing))

    def cond(self, eqn: Any, ins: list[Any], branches: tuple[Body, ...]) -> Sequence[Any]:
        paths = sorted({x.path for x in ins if isinstance(x, Rows)})
        chosen = [functools.partial(_branch, paths, body.jaxpr) for body in branches]
        return self.noted(jax.lax.switch(ins[0], chosen, *ins[1:]))


def _look_up(eqn: Any, ins: list[Any]) -> tuple[list[Any], Missing]:
    """A lookup in the rows that are present."""
    rows: Rows = ins[0]
    column = row_column(eqn, (rows.rows, *rows.values.shape[1:]))
    if column is None:
        raise InternalError(f"{eqn.primitive.name} reads no rows of a table")
    index = looked_up(eqn, column, ins[1:], rows.rows)
    place = jnp.searchsorted(rows.ids, index).astype(jnp.int32)
    inside = (index >= 0) & (index < rows.rows)
    missing = rows.ids.at[place].get(mode="clip") != index
    if bounds_of(eqn) == FILL:  # what was outside the table is outside the rows
        place = jnp.where(inside, place, len(rows.ids))
        missing = inside & missing
    else:
        missing = ~inside | missing
    by_path = {rows.path: [missing]}
    if eqn.primitive.name == "dynamic_slice":
        others = [jnp.asarray(x).astype(jnp.int32) for x in ins[1:]]
        starts = [*others[:column], place, *others[column + 1 :]]
        return [jax.lax.dynamic_slice(rows.values, starts, eqn.params["slice_sizes"])], by_path
    p, given = eqn.params, ins[1].astype(jnp.int32)
    parts = [given[..., :column], place[..., None], given[..., column + 1 :]]
    out = jax.lax.gather(
        rows.values,
        jnp.concatenate(parts, axis=-1) if given.shape[-1] > 1 else parts[1],
        p["dimension_numbers"],
        p["slice_sizes"],
        unique_indices=p["unique_indices"],
        mode=p["mode"],
        fill_value=p["fill_value"],
    )
    return [out], by_path


def _branch(paths: Sequence[str], jaxpr: Any, *operands: Any) -> tuple[list[Any], Missing]:
    """All branches must return the same structure: one flag for each table."""
    outs, missing = _run(jaxpr, operands)
    return outs, {path: [_any(missing.get(path, []))] for path in paths}
