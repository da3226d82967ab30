"""Merges two traces: the shapes of one with the numbers of the other.

The parameters of an equation are shapes or numbers, too. A shape, such as the size of a slice along
the examples, follows from the number of examples in a microbatch. A number (the iterations of a
loop, the start of a slice, an axis) may differ between the traces, but stays that of the whole
batch. A parameter that belongs to a dimension of examples is a shape.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex_core

from planner import compat
from planner.graph.jaxpr.places import user_line
from planner.graph.jaxpr.walk import loop_of
from planner.microbatch.errors import NotExactError
from planner.rules.kernels.pallas.grid import NAME as KERNEL

PLAIN = (bool, int, float, str, enum.Enum, type(None), np.generic)
"""Types of values that are numbers, or that select what an operation does."""
GROUPS = frozenset({"feature_group_count", "batch_group_count"})
"""Parameters that count groups of channels or examples, and divide a shape."""
SIZES = frozenset("k permutation_size fft_lengths sizes shape new_sizes axis_size".split())
"""Parameters that are lengths if they equal the size of a dimension of examples."""
PIECES = frozenset({"sizes", "fft_lengths"})
"""Those of ``SIZES`` with one entry per piece instead of per dimension."""
DIMENSIONS = frozenset("permutation dimensions axes axis dimension broadcast_dimensions".split())
"""Parameters that name dimensions, not sizes."""
CALLBACKS = frozenset({"pure_callback", "io_callback"})
FOREIGN = "ffi_call"
"""Calls of foreign code: their attributes may be shapes or numbers."""


def merged(whole: Any, small: Any) -> Any:
    """The equation of the small trace with the numbers of the whole one.

    Args:
        whole, small: an equation in both traces; either may be the longer one.

    Raises:
        NotExactError: they differ in a parameter that may be a shape or a number.
    """
    name = whole.primitive.name
    if name in CALLBACKS and _closed_over(whole) != _closed_over(small):
        raise _refused(whole, "its function holds the batch's size")
    lengths = _Lengths(whole, small)
    params = {k: _param(k, value, small.params[k], lengths) for k, value in whole.params.items()}
    if all(params[k] is small.params[k] for k in params):
        return small
    return small.replace(params=params)


class _Lengths:
    """The dimensions that differ between two traces of an equation."""

    def __init__(self, whole: Any, small: Any) -> None:
        self.whole, self.small = whole, small

    @functools.cached_property
    def shapes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes in both traces: of all operands, then of all results."""
        ends = ((self.whole.invars, self.small.invars), (self.whole.outvars, self.small.outvars))
        return [
            (compat.aval_shape(a.aval), compat.aval_shape(b.aval))
            for ours, others in ends
            for a, b in zip(ours, others, strict=True)
        ]

    @functools.cached_property
    def pairs(self) -> set[tuple[int, int]]:
        """Both sizes of each dimension that differs."""
        return {(m, n) for a, b in self.shapes for m, n in zip(a, b, strict=True) if m != n}

    def along(self, rank: int, d: int) -> bool:
        """Whether dimension ``d`` of the first operand, or of the first result, differs."""
        count = len(self.whole.invars)
        first = [*self.shapes[: min(count, 1)], *self.shapes[count : count + 1]]
        return any(len(a) == rank and a[d] != b[d] for a, b in first)

    def has_rank(self, rank: int) -> bool:
        """Whether the first operand, or the first result, has ``rank`` dimensions."""
        count = len(self.whole.invars)
        first = [*self.shapes[: min(count, 1)], *self.shapes[count : count + 1]]
        return any(len(a) == rank for a, _ in first)

    @property
    def over_examples(self) -> bool:
        """Whether a scan iterates over examples."""
        loop = loop_of(self.whole)
        begin = loop.consts + loop.carries
        count = len(self.whole.invars)
        rows = [*self.shapes[begin:count], *self.shapes[count + loop.carries :]]
        return any(a[:1] != b[:1] for a, b in rows)


def _param(name: str, whole: Any, small: Any, lengths: _Lengths) -> Any:
    """The merged value of a parameter of an equation."""
    if isinstance(whole, tuple) and whole and all(hasattr(x, "jaxpr") for x in whole):
        bodies = [merged_jaxpr(a, b) for a, b in zip(whole, small, strict=True)]
        return type(small)(*bodies) if hasattr(small, "_fields") else tuple(bodies)
    if hasattr(whole, "eqns") or hasattr(getattr(whole, "jaxpr", None), "eqns"):
        return merged_jaxpr(whole, small)
    kind = lengths.whole.primitive.name
    if kind == KERNEL or not _differ(whole, small):
        return small
    if kind == FOREIGN:
        raise _refused(lengths.whole, f"{name} follows from the batch's size")
    if kind == "scan" and name == "length":
        return small if lengths.over_examples else whole
    if name in GROUPS:
        return small
    if not isinstance(whole, tuple | list):
        return small if name in SIZES and (whole, small) in lengths.pairs else whole
    if name in DIMENSIONS or len(whole) != len(small) or type(whole) not in (tuple, list):
        return whole
    entries, count = list(zip(whole, small, strict=True)), len(whole)
    if lengths.has_rank(count) and name not in PIECES:
        return type(whole)(b if lengths.along(count, d) else a for d, (a, b) in enumerate(entries))
    sized = lengths.pairs if name in SIZES else set()
    return type(whole)(b if (a, b) in sized else a for a, b in entries)


def _differ(whole: Any, small: Any) -> bool:
    """Whether two parameters differ; False if they can't be compared."""
    if whole is small:
        return False
    if isinstance(whole, PLAIN) or type(whole).__name__.endswith("DimensionNumbers"):
        return bool(whole != small)
    if isinstance(whole, tuple | list) and isinstance(small, tuple | list):
        return len(whole) != len(small) or any(map(_differ, whole, small))
    return False


def _closed_over(eqn: Any) -> list[Any]:
    """Numbers and strings that the function of a callback closes over."""

    def held(function: Any, depth: int = 0) -> Iterator[Any]:
        if depth > MOST_DEEP:
            return
        if isinstance(function, functools.partial):
            yield from (x for x in function.args if isinstance(x, PLAIN))
            yield from (x for x in function.keywords.values() if isinstance(x, PLAIN))
            yield from held(function.func, depth + 1)
            return
        inner = getattr(function, "callback_func", getattr(function, "__wrapped__", None))
        if inner is not None:
            yield from held(inner, depth + 1)
        cells = getattr(function, "__closure__", None) or ()
        values = [*(getattr(function, "__defaults__", None) or ())]
        for cell in cells:
            try:
                values.append(cell.cell_contents)
            except ValueError:  # not filled
                continue
        for x in values:
            if isinstance(x, PLAIN):
                yield x
            elif callable(x):
                yield from held(x, depth + 1)

    return list(held(eqn.params.get("callback")))


MOST_DEEP = 8
"""Maximum nesting depth of functions to inspect."""


def merged_jaxpr(whole: Any, small: Any) -> Any:
    """The small trace with the numbers of the whole one.

    Raises:
        NotExactError: they differ in more than shapes and numbers.
    """
    inner, other = compat.body(whole), compat.body(small)
    contents = compat.consts(whole)
    for x, y in zip(contents, compat.consts(small), strict=True):
        if np.shape(x) != np.shape(y):
            raise NotExactError(
                "this step can't be cut into microbatches: a constant inside a loop depends on the "
                "batch's size"
            )
    eqns = []
    for a, b in zip(inner.eqns, other.eqns, strict=True):
        if a.primitive is not b.primitive:
            raise _refused(a, "another operation in a microbatch")
        eqns.append(merged(a, b).replace(invars=_inside(a.invars, b.invars)))
    jaxpr = other.replace(eqns=eqns, outvars=_inside(inner.outvars, other.outvars))
    return jaxpr if small is other and not contents else compat.with_consts(jaxpr, contents)


def _refused(eqn: Any, why: str) -> NotExactError:
    where = f"{user_line(eqn)}: {eqn.primitive.name}"
    return NotExactError(
        f"this step can't be cut into microbatches: {where}: {why}; leave microbatches= out"
    )


def _inside(whole: Sequence[Any], small: Sequence[Any]) -> list[Any]:
    """Operands of the small trace, literals with the numbers of the whole one."""
    return [
        jex_core.Literal(x.val, y.aval) if compat.is_literal(x) else y
        for x, y in zip(whole, small, strict=True)
    ]
