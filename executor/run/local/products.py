"""Products on shards whose partial sums are scattered by explicit reduce-scatters. Gradients of
tables, which add up rows, are handled alike, and so are lookups in tables that are split by rows,
where XLA:TPU all-reduces the rows from each shard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from executor.run.local.specs import Spec, partition_spec
from planner import compat


@dataclass(frozen=True)
class Scatter:
    """A product with explicit reduce-scatters, and the transpose that reads it.

    Attributes:
        transpose: that operation, -1 for none; ``order`` is its permutation.
        ins: the shardings of the operands on shards; sizes of groups are whole. A table is not
            among them: the scattered sum is added to it with the sharding of the result.
        out: the sharding of the transposed result.
        sums: per dimension of that result, the axes along which partial sums are scattered.
        summed: the axes along which partial sums are all-reduced.
        front: the axes whose shards become a leading dimension before they are scattered.
    """

    transpose: int
    order: tuple[int, ...]
    ins: tuple[Spec, ...]
    out: Spec
    sums: Spec
    summed: tuple[str, ...]
    front: frozenset[str] = frozenset()


Local = tuple[Spec | None, frozenset[str]]
"""The sharding of a product of shards, and the axes along which it is a partial sum. The sharding
is None if those of the operands are incompatible."""


def _product(params: Mapping[str, Any], a: Spec, b: Spec) -> Local:
    """The rule for a ``dot_general``."""
    ((a_sum, b_sum), (a_batch, b_batch)) = params["dimension_numbers"]
    pairs = (*zip(a_sum, b_sum, strict=True), *zip(a_batch, b_batch, strict=True))
    free_a = [e for d, e in enumerate(a) if d not in (*a_sum, *a_batch)]
    free_b = [e for d, e in enumerate(b) if d not in (*b_sum, *b_batch)]
    spec = (*(a[d] for d in a_batch), *free_a, *free_b)
    sums = frozenset(x for d in a_sum for x in a[d])
    used = [x for entry in spec for x in entry]
    fits = all(a[i] == b[j] for i, j in pairs)
    fits = fits and len(set(used)) == len(used) and not sums & set(used)
    return (spec if fits else None), sums


def _ragged(params: Mapping[str, Any], a: Spec, b: Spec) -> Local:
    """The rule for a ragged product whose rows and groups are whole."""
    numbers = params["ragged_dot_dimension_numbers"]
    ((a_sum, b_sum), (a_batch, b_batch)) = numbers.dot_dimension_numbers
    (ragged,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    pairs = (*zip(a_sum, b_sum, strict=True), *zip(a_batch, b_batch, strict=True))
    free_a = [e for d, e in enumerate(a) if d not in (*a_sum, *a_batch)]
    free_b = [e for d, e in enumerate(b) if d not in (*b_sum, *b_batch, *groups)]
    first = [()] if ragged in a_sum else []
    spec: Spec = (*first, *(a[d] for d in a_batch), *free_a, *free_b)
    sums = frozenset(x for d in a_sum for x in a[d])
    used = [x for entry in spec for x in entry]
    whole = not (a[ragged] or any(b[d] for d in groups))
    fits = whole and all(a[i] == b[j] for i, j in pairs)
    fits = fits and len(set(used)) == len(used) and not sums & set(used)
    return (spec if fits else None), sums


def _convolution(params: Mapping[str, Any], a: Spec, b: Spec) -> Local:
    """The rule for a convolution without groups; batch and features may be split, not windows."""
    numbers = params["dimension_numbers"]
    (a_batch, a_sum, *space), (b_out, b_sum, *window) = numbers.lhs_spec, numbers.rhs_spec
    batch, features, *_ = numbers.out_spec
    sums = frozenset(a[a_sum])
    out: list[tuple[str, ...]] = [()] * len(a)
    out[batch], out[features] = a[a_batch], b[b_out]
    used = [x for entry in out for x in entry]
    plain = params["feature_group_count"] == params["batch_group_count"] == 1
    fits = (
        plain
        and a[a_sum] == b[b_sum]
        and not any((*(a[d] for d in space), *(b[d] for d in window)))
    )
    fits = fits and len(set(used)) == len(used) and not sums & set(used)
    return (tuple(out) if fits else None), sums


def _table(params: Mapping[str, Any], rows: Spec, updates: Spec) -> Local:
    """The rule for a ``scatter-add`` of updates to whole rows, with one row number for each."""
    numbers = params["dimension_numbers"]
    window, inserted = numbers.update_window_dims, numbers.inserted_window_dims
    plain = not numbers.operand_batching_dims and len(inserted) == 1
    plain = plain and tuple(numbers.scatter_dims_to_operand_dims) == tuple(inserted)
    counted = [e for d, e in enumerate(updates) if d not in window]
    sums = frozenset(x for e in counted for x in e)
    if not plain:
        return None, sums
    entries = iter([updates[d] for d in window])
    spec = tuple(() if d in inserted else next(entries) for d in range(len(window) + len(inserted)))
    used = [x for entry in spec for x in entry]
    fits = tuple(rows) == (*counted, ()) and not sums & set(used)
    return (spec if fits else None), sums


def _lookup(params: Mapping[str, Any], table: Spec, indices: Spec) -> Local:
    """The rule for a ``gather`` of whole rows from a table that is split by rows."""
    numbers, window = params["dimension_numbers"], params["dimension_numbers"].offset_dims
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None, frozenset()
    (row,) = numbers.start_index_map
    plain = params["slice_sizes"][row] == 1 and tuple(numbers.collapsed_slice_dims) == (row,)
    sums = frozenset(table[row])
    counted = iter(indices[:-1])
    columns = iter([e for d, e in enumerate(table) if d != row])
    rank = len(window) + len(indices) - 1
    spec = tuple(next(columns) if d in window else next(counted) for d in range(rank))
    used = [x for entry in spec for x in entry]
    fits = plain and not indices[-1] and len(set(used)) == len(used) and not sums & set(used)
    return (spec if fits else None), sums


def _sum(params: Mapping[str, Any], a: Spec) -> Local:
    """The rule for a ``reduce_sum``."""
    sums = frozenset(x for d in params["axes"] for x in a[d])
    return tuple(e for d, e in enumerate(a) if d not in params["axes"]), sums


LOCAL: Mapping[str, Callable[..., Local]] = {
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged,
    "scatter-add": _table,
    "gather": _lookup,
    "reduce_sum": _sum,
}
"""The rules for operations whose partial sums are scattered, by kind."""
SUM = "reduce_sum"
"""The kind with one operand: it adds up gradients of examples or tasks."""
TABLE = "scatter-add"
"""The kind whose first operand is a table."""


def scattered(eqn: Any, ins: Sequence[Any], how: Scatter, mesh: Any) -> Any:
    """Multiply on shards, transpose by ``how.order`` and reduce-scatter along one axis at a time,
    major axis first.

    All mesh axes are manual. With automatic axes, the compiler loses the operands' shardings along
    them at the boundary of the ``shard_map`` and gathers the operands."""

    table, lookup = eqn.primitive.name == TABLE, eqn.primitive.name == "gather"

    def local(*shards: Any) -> Any:
        if lookup:
            (row,) = eqn.params["dimension_numbers"].start_index_map
            x = _own_rows(eqn, row, shards, how.ins[0][row])
        else:
            first = [_no_table(eqn, shards[1])] if table else []
            (x,) = compat.evaluate_equation(eqn, [*first, *shards])
        x = compat.row_major(jax.lax.transpose(x, how.order))
        for d, entry in enumerate(how.sums):
            for front, axes in itertools.groupby(entry, how.front.__contains__):
                x = _scattered(x, d, tuple(axes), front=front)
        return jax.lax.psum(x, how.summed) if how.summed else x

    specs = tuple(partition_spec(s) for s in how.ins)
    out = partition_spec(how.out)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return run(*ins[1:]) + ins[0] if table else run(*ins)


def _scattered(x: Any, d: int, axes: Sequence[str], *, front: bool) -> Any:
    """Scatter a sum along axes, without its dimensions of one element: with them, XLA:TPU
    all-reduces the rows of [1, rows, columns]."""
    dims = [k for k, n in enumerate(x.shape) if n > 1 or k == d]
    whole, at = x.shape, dims.index(d)
    x = (_in_front if front else _in_place)(x.reshape([whole[k] for k in dims]), at, axes)
    return x.reshape([x.shape[at] if k == d else n for k, n in enumerate(whole)])


def _in_place(x: Any, d: int, axes: Sequence[str]) -> Any:
    """Scatter a dimension along axes, major first."""
    for axis in axes:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=d, tiled=True)
    return x


def _in_front(x: Any, d: int, axes: Sequence[str]) -> Any:
    """Scatter a dimension along axes, each as a leading dimension, major first."""
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    parts, count = (*sizes, x.shape[d] // math.prod(sizes)), len(sizes)
    x = x.reshape(*x.shape[:d], *parts, *x.shape[d + 1 :])
    x = jnp.moveaxis(x, range(d, d + count), range(count))
    for axis in axes:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=0, tiled=False)
    return x


def _no_table(eqn: Any, updates: Any) -> Any:
    """Zeros to which a shard adds its updates of a table."""
    numbers = eqn.params["dimension_numbers"]
    widths = iter([updates.shape[d] for d in numbers.update_window_dims])
    (out,) = eqn.outvars
    sizes = enumerate(compat.aval_shape(out.aval))
    inserted = numbers.inserted_window_dims
    return jnp.zeros([n if d in inserted else next(widths) for d, n in sizes], out.aval.dtype)


def _own_rows(eqn: Any, row: int, shards: Sequence[Any], axes: Sequence[str]) -> Any:
    """Look up rows in a shard of a table; rows of other shards are zeros.

    Args:
        eqn: the lookup, a ``gather``.
        row: the dimension of rows.
        shards: a shard of the table and the indices, [..., 1].
        axes: the axes that split the rows, major first.
    """
    table, indices = shards
    shard_rows = table.shape[row]
    rows = shard_rows * math.prod(map(jax.lax.axis_size, axes))
    index = jnp.clip(indices, *_within(indices.dtype, rows)).astype(jnp.int32)
    fills = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    if not fills:  # out of bounds reads the nearest row, as in one XLA gather
        index = jnp.clip(index, 0, rows - 1)
    place = index - shard_rows * jax.lax.axis_index(tuple(axes))
    held = (place >= 0) & (place < shard_rows)
    widths = [1 if d == row else n for d, n in enumerate(table.shape)]
    gathered = jax.lax.gather(
        table,
        jnp.where(held, place, 0),
        eqn.params["dimension_numbers"],
        tuple(widths),
        mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    window = eqn.params["dimension_numbers"].offset_dims
    along = [d for d in range(gathered.ndim) if d not in window]
    gathered = jnp.where(
        _along(held, along, gathered.ndim), gathered, jnp.zeros((), gathered.dtype)
    )
    if not fills:
        return gathered
    outside = ((index < 0) | (index >= rows)) & (jax.lax.axis_index(tuple(axes)) == 0)
    return jnp.where(_along(outside, along, gathered.ndim), _fill(eqn, gathered.dtype), gathered)


def _along(flags: Any, dims: Sequence[int], rank: int) -> Any:
    """Flags of rows, [..., 1], reshaped to broadcast over the result of a lookup."""
    sizes = dict(zip(dims, flags.shape[:-1], strict=True))
    return flags.reshape([sizes.get(d, 1) for d in range(rank)])


def _within(dtype: Any, rows: int) -> tuple[Any, Any]:
    """Bounds of the rows of a table, plus one more on each side if the integers allow it."""
    kind = jnp.iinfo(dtype)
    return dtype.type(max(int(kind.min), -1)), dtype.type(min(int(kind.max), rows))


def _fill(eqn: Any, dtype: Any) -> Any:
    """The value of a lookup outside the table.

    Source: the documentation of ``jax.lax.gather``, ``fill_value``.
    """
    given = eqn.params["fill_value"]
    if given is not None:
        return jnp.asarray(given, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    kind = jnp.iinfo(dtype)
    return jnp.asarray(kind.min if jnp.issubdtype(dtype, jnp.signedinteger) else kind.max, dtype)
