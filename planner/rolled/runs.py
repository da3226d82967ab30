"""Finds runs of equal blocks, and classifies the operands of a block.

A block reads values that it makes itself, values of the previous block (carries of a loop), values
that all blocks read (constants of the loop), and values that differ from block to block (rows of a
stack, such as parameters and residuals). A run that does not follow this pattern is left unrolled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner import compat
from planner.graph.flat import FlatJaxpr, nbytes, runs_once
from planner.graph.labels.blocks import blocks_of
from planner.rolled.batches import kind_of, literal_of

LEAST_COUNT = 4
"""Fewest blocks that are worth a loop."""
PHASES = 4
"""Most places to try to cut blocks at, starting with those that the fewest bytes cross."""
DROPPED = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2))
"""Numbers of blocks to leave out at each end: the first and last layers may read other values."""

Maker = Mapping[int, tuple[int, int]]
"""Per value, the call that makes it and its position among the results."""


@dataclass(frozen=True)
class Literal:
    """A literal operand; that of the first block stands for all."""


@dataclass(frozen=True)
class Own:
    """Result ``out`` of call ``call`` of the same block."""

    call: int
    out: int


@dataclass(frozen=True)
class Carry:
    """Carry ``number``: a result of the previous block."""

    number: int


@dataclass(frozen=True)
class Const:
    """A value that all blocks read."""

    value: int


@dataclass(frozen=True)
class Row:
    """A row of stack ``number``."""

    number: int


Operand = Literal | Own | Carry | Const | Row


@dataclass(frozen=True)
class Run:
    """``count`` equal blocks of ``length`` calls each, from call ``start`` on.

    Attributes:
        operands: per call of a block, what its operands are.
        carries: per carry, the call and the result of a block, and the value that the first block
            reads.
        stacks: per stack, the value that each block reads.
    """

    start: int
    length: int
    count: int
    operands: tuple[tuple[Operand, ...], ...]
    carries: tuple[tuple[int, int, Any], ...]
    stacks: tuple[tuple[int, ...], ...]

    @property
    def end(self) -> int:
        """The call after the last block."""
        return self.start + self.length * self.count


def makers_of(flat: FlatJaxpr) -> Maker:
    """The maker of each value."""
    return {v: (at, o) for at, call in enumerate(flat.calls) for o, v in enumerate(call.outs)}


def runs_of(flat: FlatJaxpr, makers: Maker) -> Iterator[Run]:
    """The runs of a program, in order; near-linear in operations."""
    codes = _codes(flat)
    spans: list[tuple[int, int, int]] = []
    for b in blocks_of(codes):
        if b.count >= LEAST_COUNT:
            start = max(b.start, spans[-1][1] if spans else 0)
            end = b.start + b.length * b.count
            while start > (spans[-1][1] if spans else 0) and same(codes, start - 1, b.length):
                start -= 1
            while end < len(codes) and codes[end] == codes[end - b.length]:
                end += 1
            spans.append((start, end, b.length))
    twins = _twins(flat)
    for span in spans:
        run = _best(flat, makers, twins, *span)
        if run is not None:
            if run.carries:  # values made by its blocks have a row per block
                twins = _outside(twins, makers, range(run.start, run.end))
            yield run


def same(codes: np.ndarray[Any, Any], at: int, length: int) -> bool:
    """Whether a call is equal to the one a block later."""
    return bool(codes[at] == codes[at + length])


def _codes(flat: FlatJaxpr) -> np.ndarray[Any, Any]:
    """Per call, a number that is equal for calls of the same kind, types and dimensions."""
    known: dict[Any, int] = {}
    out = []
    for call in flat.calls:
        params = call.eqn.params
        dims = [str(params[n]) for n in ("dimension_numbers", "permutation", "axes") if n in params]
        types = tuple(
            (compat.aval_shape(v.aval), compat.dtype_name(v.aval))
            for v in (*call.eqn.invars, *call.eqn.outvars)
        )
        key = (call.kind, call.backward, types, *dims)
        out.append(known.setdefault(key, len(known)))
    return np.asarray(out, np.int64)


def _twins(flat: FlatJaxpr) -> Mapping[int, int]:
    """Per value made only from literals, such as zeros, the first value made the same way."""
    first: dict[Any, tuple[int, ...]] = {}
    twins: dict[int, int] = {}
    for call in flat.calls:
        if all(v in twins for v in call.ins if isinstance(v, int)) and not runs_once(call.eqn):
            ins = (twins[v] if isinstance(v, int) else literal_of(v) for v in call.ins)
            outs = first.setdefault((kind_of(call), tuple(ins)), tuple(call.outs))
            twins.update(zip(call.outs, outs, strict=True))
    return twins


def _outside(twins: Mapping[int, int], makers: Maker, run_calls: range) -> Mapping[int, int]:
    """The twins not made by some calls; the first remaining one represents each set of twins."""
    first: dict[int, int] = {}
    left = (v for v in twins if makers[v][0] not in run_calls)
    return {v: first.setdefault(twins[v], v) for v in left}


def _best(
    flat: FlatJaxpr, makers: Maker, twins: Mapping[int, int], start: int, end: int, length: int
) -> Run | None:
    """The run with the most blocks of a span, cut where the fewest bytes cross, or None."""
    crossing = _crossing(flat, start, end)
    places = []
    for phase in range(min(length, end - start - LEAST_COUNT * length + 1)):
        count = (end - start - phase) // length
        inner = crossing[phase + length : phase + length * count : length]
        places.append((float(inner.max(initial=0.0)), -count, phase))
    for _, least, phase in sorted(places)[:PHASES]:
        for first, last in DROPPED:
            count = -least - first - last
            if count >= LEAST_COUNT:
                at = start + phase + first * length
                run = _run(flat, makers, twins, at, length, count)
                if run is not None:
                    return run
    return None


def _crossing(flat: FlatJaxpr, start: int, end: int) -> np.ndarray[Any, Any]:
    """Per call of a span, bytes that are made before it and read from it on, within the span."""
    rises = np.zeros(end - start + 1)
    for at in range(start, end):
        call = flat.calls[at]
        for value, var in zip(call.outs, call.eqn.outvars, strict=True):
            last = max((r for r in flat.readers[value] if r < end), default=at)
            rises[at + 1 - start] += nbytes(var.aval)
            rises[last + 1 - start] -= nbytes(var.aval)
    return np.cumsum(rises)[:-1]


def _run(
    flat: FlatJaxpr, makers: Maker, twins: Mapping[int, int], start: int, length: int, count: int
) -> Run | None:
    """The run of some blocks; None if their operands do not follow one pattern."""
    operands: list[tuple[Operand, ...]] = []
    carries: dict[Any, tuple[int, Any]] = {}
    stacks: dict[tuple[int, ...], int] = {}
    end = start + length * count
    for k in range(length):
        row: list[Operand] = []
        blocks = [flat.calls[start + b * length + k].ins for b in range(count)]
        for atoms in zip(*blocks, strict=True):
            pattern = _pattern(atoms, makers, start, length, end)
            if pattern is None:
                return None
            back, call, out = pattern
            if back == 1:
                known = carries.setdefault((call, out, _key(atoms[0])), (len(carries), atoms[0]))
                row.append(Carry(known[0]))
            elif back == 0:
                row.append(Own(call, out))
            elif not isinstance(atoms[0], int):
                row.append(Literal())
            else:
                values = tuple(twins.get(v, v) for v in atoms)
                if len(set(values)) == 1 and not start <= makers.get(values[0], OUTSIDE)[0] < end:
                    row.append(Const(values[0]))
                else:
                    row.append(Row(stacks.setdefault(tuple(atoms), len(stacks))))
        operands.append(tuple(row))
    ends = tuple((call, out, first) for (call, out, _), (_, first) in carries.items())
    return Run(start, length, count, tuple(operands), ends, tuple(stacks))


def _key(atom: Any) -> Any:
    """Equal for the same value; a literal equals only itself."""
    return atom if isinstance(atom, int) else ("literal", id(atom))


OUTSIDE = (-1, 0, 0)


def _pattern(
    atoms: tuple[Any, ...], makers: Maker, start: int, length: int, end: int
) -> tuple[int, int, int] | None:
    """How many blocks back an operand is made, by which call and as which result. None unless it is
    the same for all blocks, except for the first value of a carry."""

    def one(block: int, atom: Any) -> tuple[int, int, int]:
        at, out = makers.get(atom, (-1, 0)) if isinstance(atom, int) else (-1, 0)
        if not start <= at < end:
            return OUTSIDE
        where, call = divmod(at - start, length)
        return block - where, call, out

    first, *rest = (one(b, atom) for b, atom in enumerate(atoms))
    literals = sum(not isinstance(atom, int) for atom in atoms)
    alike = len(set(rest)) == 1
    back = rest[0][0]
    if not alike or back > 1 or (back == 1 and first != OUTSIDE) or (back < 1 and first != rest[0]):
        return None
    if literals not in (0, len(atoms)) and not (back == 1 and literals == 1):
        return None
    return rest[0]
