"""Rewrites lookups in every row, as ``logits[jnp.arange(n), labels]``, to batching dimensions.

Such a lookup indexes the rows by 0, 1, 2, ... With arbitrary indices it would need all rows on
every device, and its gradient would be a sum over devices. In ``lax.gather`` and ``lax.scatter``, a
dimension that is only iterated over can be a batching dimension, which is sharded like any other.
Equations are changed in place, so all others keep their number; the row indices become unused.
Values do not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planner import compat
from planner.graph.jaxpr.walk import CALLS, Body, called, in_bodies, stays_whole

SCATTERS = frozenset(
    "scatter scatter-add scatter_add scatter-mul scatter_mul scatter_min scatter_max".split()
)
"""Operations that write to rows, or update them."""


MOST = 1 << 20
"""Maximum number of elements of a constant to inspect."""


@dataclass(frozen=True)
class _Count:
    """An array of the numbers 0, 1, ... along a dimension, constant along all others."""

    dim: int


_NEVER = "never"
"""An array that is false everywhere."""
_Fact = _Count | str


def with_own_rows(jaxpr: Any) -> Any:
    """The jaxpr, closed or open, with lookups in every row rewritten to batching dimensions, also
    in the bodies of its equations; the same object if there are none."""
    inner = compat.body(jaxpr)
    contents = zip(inner.constvars, compat.consts(jaxpr), strict=False)
    facts: dict[Any, _Fact] = {v: f for v, x in contents if (f := _counted(x)) is not None}
    makers: dict[Any, Any] = {}
    eqns, changed = [], False
    for eqn in inner.eqns:
        new = _rewritten(eqn, facts, makers)
        changed |= new is not eqn
        eqns.append(new)
        fact = _fact(eqn, facts)
        if fact is not None:
            facts[eqn.outvars[0]] = fact
        if eqn.primitive.name == "concatenate":
            makers[eqn.outvars[0]] = eqn
    if not changed:
        return jaxpr
    rewritten = inner.replace(eqns=_with_fewer_columns(inner, eqns))
    return rewritten if inner is jaxpr else compat.with_consts(rewritten, compat.consts(jaxpr))


def takes_indices(jaxpr: Any) -> bool:
    """Whether the body of a call looks up by indices that are arguments of the call: their origin
    is not visible in the body. Gradients of a jitted function have such lookups."""
    return any(
        _by_argument(body)
        for eqn in compat.body(jaxpr).eqns
        if eqn.primitive.name in CALLS
        and not stays_whole(eqn)
        and (body := called(eqn)) is not None
    )


def _by_argument(body: Body) -> bool:
    inner = compat.body(body.jaxpr)
    given = set(inner.invars)
    direct = any(
        (eqn.primitive.name == "gather" or eqn.primitive.name in SCATTERS)
        and not compat.is_literal(eqn.invars[1])
        and eqn.invars[1] in given
        for eqn in inner.eqns
    )
    return direct or takes_indices(inner)


def _rewritten(eqn: Any, facts: Mapping[Any, _Fact], makers: Mapping[Any, Any]) -> Any:
    name = eqn.primitive.name
    if name == "gather" or name in SCATTERS:
        return _batched(eqn, facts, makers)
    params = {k: in_bodies(v, with_own_rows) for k, v in eqn.params.items()}
    same = all(params[k] is v for k, v in eqn.params.items())
    return eqn if same else eqn.replace(params=params)


def _fact(eqn: Any, facts: Mapping[Any, _Fact]) -> _Fact | None:
    """The fact about the result of an equation; None if nothing is known."""
    name = eqn.primitive.name
    if name == "iota":
        dim, aval = int(eqn.params["dimension"]), eqn.outvars[0].aval
        return _Count(dim) if _holds(aval.dtype, compat.aval_shape(aval)[dim]) else None
    known = [None if compat.is_literal(v) else facts.get(v) for v in eqn.invars]
    if not eqn.outvars or known == [None] * len(known):
        return None
    first, out = known[0], eqn.outvars[0].aval
    if name == "lt" and isinstance(first, _Count) and _is_zero(eqn.invars[1]):
        return _NEVER
    if name == "select_n" and first == _NEVER:
        return known[1]
    if not isinstance(first, _Count):
        return None
    before = compat.aval_shape(eqn.invars[0].aval)
    size = before[first.dim]
    if name == "convert_element_type":
        return first if _holds(out.dtype, size) else None
    if name == "broadcast_in_dim":
        dim = int(eqn.params["broadcast_dimensions"][first.dim])
        return _Count(dim) if compat.aval_shape(out)[dim] == size else None
    if name in ("reshape", "squeeze", "expand_dims"):
        return _moved(before, compat.aval_shape(out), first.dim)
    return None


def _counted(content: Any) -> _Fact | None:
    """The fact about a constant: it is an ``np.arange``, maybe with dimensions of one element, or a
    mask that is false everywhere (where indices are negative)."""
    shape, dtype = np.shape(content), getattr(content, "dtype", None)
    if dtype is None or math.prod(shape) > MOST:
        return None
    if dtype == np.bool_:
        return None if np.any(np.asarray(content)) else _NEVER
    long = [d for d, n in enumerate(shape) if n > 1]
    if not jnp.issubdtype(dtype, jnp.integer) or len(long) != 1:
        return None
    flat = np.asarray(content).reshape(-1)
    return _Count(long[0]) if np.array_equal(flat, np.arange(flat.size)) else None


def _holds(dtype: Any, size: int) -> bool:
    """Whether a dtype can hold all whole numbers below ``size``: others wrap around."""
    return bool(jnp.issubdtype(dtype, jnp.integer)) and size - 1 <= np.iinfo(dtype).max


def _moved(before: Sequence[int], after: Sequence[int], dim: int) -> _Count | None:
    """The count along a dimension after dimensions of one element are added or removed; None if
    others change."""
    old = [d for d, n in enumerate(before) if n > 1]
    new = [d for d, n in enumerate(after) if n > 1]
    if dim not in old or [before[d] for d in old] != [after[d] for d in new]:
        return None
    return _Count(new[old.index(dim)])


def _is_zero(atom: Any) -> bool:
    return compat.is_literal(atom) and not np.any(np.asarray(atom.val))


def _batched(eqn: Any, facts: Mapping[Any, _Fact], makers: Mapping[Any, Any]) -> Any:
    """A lookup with the index columns that count rows turned into batching dimensions; unchanged
    if there are none."""
    operand, indices = eqn.invars[:2]
    maker = None if compat.is_literal(indices) else makers.get(indices)
    shape = compat.aval_shape(indices.aval)
    if maker is None or maker.params["dimension"] != len(shape) - 1:
        return eqn
    dims = _Dimensions.of(eqn)
    if dims.batching or len(dims.columns) != shape[-1]:
        return eqn
    rows = compat.aval_shape(operand.aval)
    column, rest = 0, []
    pairs: list[tuple[int, int]] = []
    for part in maker.invars:
        width = compat.aval_shape(part.aval)[-1]
        fact = None if compat.is_literal(part) else facts.get(part)
        dim = dims.columns[column]
        if (
            width == 1
            and isinstance(fact, _Count)
            and fact.dim < len(shape) - 1
            and dim in dims.dropped
            and rows[dim] == shape[fact.dim]
            and fact.dim not in {p for _, p in pairs}
        ):
            pairs.append((dim, fact.dim))
        else:
            rest.append((part, column, width))
        column += width
    if not pairs or not rest or any(compat.is_literal(part) for part, _, _ in rest):
        return eqn
    pairs.sort()
    params = {**eqn.params, "dimension_numbers": dims.with_batching(pairs, rest)}
    part = rest[0][0]
    if len(rest) > 1:  # a placeholder, which ``_with_fewer_columns`` replaces
        width = sum(w for _, _, w in rest)
        part = _Columns(indices, tuple(p for p, _, _ in rest), (*shape[:-1], width))
    return eqn.replace(invars=[operand, part, *eqn.invars[2:]], params=params)


@dataclass(frozen=True)
class _Columns:
    """A placeholder for some columns of indices: the whole array, the parts, and their shape."""

    whole: Any
    parts: tuple[Any, ...]
    shape: tuple[int, ...]


def _with_fewer_columns(inner: Any, eqns: Sequence[Any]) -> list[Any]:
    """The equations, with concatenations of indices reduced to fewer columns if all readers need
    the same ones. A lookup is left unchanged if other readers need more columns of its indices."""
    wanted: dict[Any, set[Any]] = {}
    for eqn in eqns:
        for v in eqn.invars:
            key = v.whole if isinstance(v, _Columns) else v
            if not compat.is_literal(key):
                wanted.setdefault(key, set()).add(v)
    for v in inner.outvars:
        if not compat.is_literal(v):
            wanted.setdefault(v, set()).add(v)
    narrowed = {
        v: next(iter(forms))
        for v, forms in wanted.items()
        if len(forms) == 1 and isinstance(next(iter(forms)), _Columns)
    }
    new = {v: compat.variable_like(v, columns.shape) for v, columns in narrowed.items()}
    out = []
    for before, eqn in zip(inner.eqns, eqns, strict=True):
        columns = [v for v in eqn.invars if isinstance(v, _Columns)]
        if columns:
            (subset,) = columns
            less = new.get(subset.whole)
            reads = [less if v is subset else v for v in eqn.invars]
            eqn = before if less is None else eqn.replace(invars=reads)
        elif eqn.outvars and eqn.outvars[0] in narrowed:
            whole = eqn.outvars[0]
            eqn = eqn.replace(invars=list(narrowed[whole].parts), outvars=[new[whole]])
        out.append(eqn)
    return out


@dataclass(frozen=True)
class _Dimensions:
    """The dimension numbers of a lookup (a gather or a scatter).

    Attributes:
        numbers: the dimension numbers.
        columns: per column of indices, the operand's dimension.
        dropped: the operand's dimensions of which one element is taken, and which the result lacks.
        batching: the operand's batching dimensions.
    """

    numbers: Any
    columns: tuple[int, ...]
    dropped: tuple[int, ...]
    batching: tuple[int, ...]

    @staticmethod
    def of(eqn: Any) -> _Dimensions:
        """The dimension numbers of an equation."""
        n = eqn.params["dimension_numbers"]
        if eqn.primitive.name == "gather":
            parts = (n.start_index_map, n.collapsed_slice_dims, n.operand_batching_dims)
        else:
            parts = (
                n.scatter_dims_to_operand_dims,
                n.inserted_window_dims,
                n.operand_batching_dims,
            )
        return _Dimensions(n, *(tuple(map(int, p)) for p in parts))

    def with_batching(
        self, pairs: Sequence[tuple[int, int]], rest: Sequence[tuple[Any, int, int]]
    ) -> Any:
        """Dimension numbers with ``pairs`` of batching dimensions (of the operand, of the indices)
        and the columns in ``rest``: (array, first column, number of columns)."""
        batching = tuple(d for d, _ in pairs)
        columns = tuple(d for _, start, width in rest for d in self.columns[start : start + width])
        dropped = tuple(d for d in self.dropped if d not in batching)
        n, places = self.numbers, tuple(p for _, p in pairs)
        if isinstance(n, jax.lax.GatherDimensionNumbers):
            return jax.lax.GatherDimensionNumbers(n.offset_dims, dropped, columns, batching, places)
        return jax.lax.ScatterDimensionNumbers(
            n.update_window_dims, dropped, columns, batching, places
        )
