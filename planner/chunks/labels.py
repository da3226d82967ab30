"""Regions of large products: the operations on values that carry both dimensions of a product.

The product of n rows and m columns is much larger than its operands. Its operation, and every
operation that reads or makes a value with both dimensions (the scores, their mask, the softmax,
their gradients), form a *region*. Values that enter or leave the region have at most one of the two
dimensions. Factor rules map the dimensions of operands to those of results.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner import compat
from planner.graph.flat import Call, FlatJaxpr, nbytes
from planner.rules.factor import FactorRule
from planner.rules.key import EqnKey
from planner.rules.registry import ELEMENTWISE, rules_for

LARGE = 4.0
"""Bytes of a product's result over those of its operands from which on it counts as large."""
SUMS = frozenset({"reduce_sum", "dot_general"})
"""Operations that reduce by adding."""
REDUCTIONS = SUMS | {"reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin"}
MOVES = frozenset("broadcast_in_dim reshape squeeze expand_dims transpose iota".split())
INDEXED = frozenset({"gather", "scatter-add"})
FOLLOWED = ELEMENTWISE | REDUCTIONS | MOVES | INDEXED
"""Operations that can be computed for a subset of their rows."""

Pair = tuple[int, int]
"""The dimensions of a value that are the rows and the columns of a product."""


@dataclass(frozen=True, eq=False)
class Program:
    """A program with its factor rules, makers and readers, computed once.

    Attributes:
        flat: the program.
        rules: per call, its factor rule; None if the call can't be split.
        makers: per value, the call that makes it.
        readers: per value, the calls that read it.
        reads: per call, the values that it reads.
    """

    flat: FlatJaxpr
    rules: Sequence[FactorRule | None]
    makers: Mapping[int, int]
    readers: Sequence[Sequence[int]]
    reads: Sequence[Sequence[int]]

    @staticmethod
    def of(flat: FlatJaxpr) -> Program:
        """Look up the rules of a program."""
        at = [k for k, c in enumerate(flat.calls) if not c.made and c.kind in FOLLOWED]
        rules: list[FactorRule | None] = [None] * len(flat.calls)
        for k, rule in zip(at, rules_for([EqnKey.of(flat.calls[k].eqn) for k in at]), strict=True):
            rules[k] = None if rule.origin == "opaque" else rule
        makers = {v: k for k, c in enumerate(flat.calls) for v in c.outs}
        reads = [tuple(v for v in c.ins if isinstance(v, int)) for c in flat.calls]
        return Program(flat, rules, makers, flat.readers, reads)

    @functools.cached_property
    def _constants(self) -> dict[int, int]:
        """Per value that is computed from literals alone, the first call that it needs."""
        first_calls: dict[int, int] = {}
        for at, call in enumerate(self.flat.calls):
            if all(v in first_calls for v in self.reads[at]):
                start = min([at, *(first_calls[v] for v in self.reads[at])])
                first_calls.update(dict.fromkeys(call.outs, start))
        return first_calls

    def constant_from(self, value: int) -> int:
        """The first call that a value computed from literals alone needs; -1 for other values."""
        return self._constants.get(value, -1)

    def sides(self, at: int) -> Iterator[tuple[int, tuple[tuple[int, ...], ...]]]:
        """The operands (without literals) and results of a call, with their factors."""
        call, rule = self.flat.calls[at], self.rules[at]
        assert rule is not None
        for value, dims in zip(call.ins, rule.operands, strict=True):
            if isinstance(value, int):
                yield value, dims
        yield from zip(call.outs, rule.results, strict=True)

    def around(self, value: int) -> list[int]:
        """The calls that make and read a value."""
        makers = [self.makers[value]] if value in self.makers else []
        return [*makers, *self.readers[value]]


@dataclass(frozen=True, eq=False)
class Region:
    """A product and the operations around it that share its dimensions.

    Attributes:
        seed: the product.
        rows, columns: their numbers.
        both: the values that carry both dimensions.
        calls: the operations that touch one of these, and those between such operations.
        row: per value with a row dimension, the index of that dimension.
    """

    seed: int
    rows: int
    columns: int
    both: Mapping[int, Pair]
    calls: frozenset[int]
    row: Mapping[int, int]


def large_products(flat: FlatJaxpr) -> list[int]:
    """Products whose result is much larger than their operands, in order."""

    def large(call: Call) -> bool:
        if call.made or call.kind != "dot_general":
            return False
        return nbytes(call.eqn.outvars[0].aval) >= LARGE * sum(
            nbytes(v.aval) for v in call.eqn.invars
        )

    return [at for at, call in enumerate(flat.calls) if large(call)]


def regions_at(program: Program, seed: int) -> Iterator[Region]:
    """The regions of a product: with its left operand's dimension as rows, and with its right's."""
    call, rule = program.flat.calls[seed], program.rules[seed]
    if rule is None:
        return
    (result,) = rule.results
    alone = [(d, dim[0]) for d, dim in enumerate(result) if len(dim) == 1]

    def longest(side: int) -> int | None:
        factors = {f for dim in rule.operands[side] for f in dim}
        other = {f for dim in rule.operands[1 - side] for f in dim}
        free = [(rule.sizes[f], -d) for d, f in alone if f in factors - other]
        return -max(free)[1] if free else None

    left, right = longest(0), longest(1)
    if left is None or right is None:
        return
    shape = compat.aval_shape(call.eqn.outvars[0].aval)
    for row, column in ((left, right), (right, left)):
        spread = _spread(program, seed, (row, column))
        if spread is not None:
            both, touched = spread
            rows = _rows(program, touched, both)
            if rows is not None:
                calls, rows = _closed(program, touched, rows)
                yield Region(seed, shape[row], shape[column], both, calls, rows)


def _spread(program: Program, seed: int, pair: Pair) -> tuple[dict[int, Pair], set[int]] | None:
    """All values with both dimensions, and the operations that touch them; None if the two
    dimensions are ambiguous."""
    (start,) = program.flat.calls[seed].outs
    both: dict[int, Pair] = {start: pair}
    touched: set[int] = set()
    todo = [start]
    while todo:
        value = todo.pop()
        for at in program.around(value):
            factors = _factors(program, at, value, both[value])
            if factors is None:
                continue  # stays outside
            touched.add(at)
            for other, dims in program.sides(at):
                row, column = (_dimension(dims, f) for f in factors)
                if -1 in (row, column):
                    return None
                if row is None or column is None:
                    continue
                if other not in both:
                    both[other] = row, column
                    todo.append(other)
                elif both[other] != (row, column):
                    return None
    return both, touched


def _factors(program: Program, at: int, value: int, pair: Pair) -> Pair | None:
    """The factors of a call for the two dimensions of a value; None if either dimension is not a
    single factor, or the rows must stay whole."""
    rule = program.rules[at]
    if rule is None:
        return None
    for other, dims in program.sides(at):
        if other == value:
            row, column = dims[pair[0]], dims[pair[1]]
            if len(row) == 1 == len(column) and row[0] not in rule.replicated:
                return row[0], column[0]
            return None
    return None


def _dimension(dims: Sequence[tuple[int, ...]], factor: int) -> int | None:
    """The dimension that a factor stands for; None if there is none, -1 if it is a part of one."""
    for d, dim in enumerate(dims):
        if factor in dim:
            return d if len(dim) == 1 else -1
    return None


def _rows(program: Program, calls: set[int], both: Mapping[int, Pair]) -> dict[int, int] | None:
    """Per value, its row dimension; None if that is ambiguous."""
    row = {v: pair[0] for v, pair in both.items()}
    while True:
        before = len(row)
        for at in sorted(calls):
            factor = rows_factor(program, at, row)
            if factor is None:
                continue
            for value, dims in program.sides(at):
                where = _dimension(dims, factor)
                if where is None and value not in row:
                    continue
                if where is None or where < 0 or row.setdefault(value, where) != where:
                    return None  # a part of a dimension, or a value used by rows and whole
        if len(row) == before:
            return row


def _closed(
    program: Program, touched: set[int], row: Mapping[int, int]
) -> tuple[frozenset[int], dict[int, int]]:
    """Add the row-wise operations between the touched ones: those that read only results of these
    and constants, and that these read in turn (such as sums per row)."""
    flat = program.flat
    first, last = min(touched), max(touched)
    outputs = {v for at in touched for v in flat.calls[at].outs}
    whole = {v for at in touched for v, _ in program.sides(at)}.difference(row)
    rows = dict(row)
    between: dict[int, dict[int, int]] = {}
    open_ = [at for v in outputs for at in program.readers[v]]
    heapq.heapify(open_)
    before = first
    while open_:  # in program order
        at = heapq.heappop(open_)
        if not before < at < last or at in touched:
            continue
        before = at
        read = set(program.reads[at])
        known = all(v in outputs or program.constant_from(v) >= 0 for v in read)
        row_dims = _by_rows(program, at, rows) if known else None
        if row_dims is None or whole.intersection(row_dims):
            continue  # or a vector of columns, where there are equal numbers of rows and columns
        between[at] = row_dims
        rows.update(row_dims)
        whole.update(read.difference(row_dims))
        for v in flat.calls[at].outs:
            outputs.add(v)
            for k in program.readers[v]:
                heapq.heappush(open_, k)
    wanted = {v for at in touched for v in flat.calls[at].ins if isinstance(v, int)}
    inside = set(touched)
    rows = dict(row)
    for at in sorted(between, reverse=True):
        if wanted.intersection(flat.calls[at].outs):
            inside.add(at)
            rows.update(between[at])
            wanted.update(v for v in flat.calls[at].ins if isinstance(v, int))
    return frozenset(inside), rows


def _by_rows(program: Program, at: int, row: Mapping[int, int]) -> dict[int, int] | None:
    """The row dimensions of the operands and results of an operation; None if it does not treat
    each row separately."""
    rule = program.rules[at]
    factor = rows_factor(program, at, row) if rule is not None else None
    if rule is None or factor is None or factor in rule.replicated:
        return None
    out: dict[int, int] = {}
    for value, dims in program.sides(at):
        where = _dimension(dims, factor)
        if where is None and value not in row and value not in program.flat.calls[at].outs:
            continue
        if where is None or where < 0 or row.get(value, where) != where:
            return None
        out[value] = where
    return out


def rows_factor(program: Program, at: int, row: Mapping[int, int]) -> int | None:
    """The factor of a call that stands for rows."""
    for value, dims in program.sides(at):
        if value in row:
            return dims[row[value]][0] if len(dims[row[value]]) == 1 else None
    return None
