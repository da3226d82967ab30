"""Joins separate operations on the rows of a stack, such as an optimizer's, into one operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner import compat
from planner.graph.flat import Call, FlatJaxpr, runs_once

ROUNDS = 24
"""Most attempts to form batches; each one leaves out operations that turn out to lack a row."""

Place = tuple[Any, int]
"""A stack and a row of it."""


@dataclass(frozen=True)
class Batch:
    """The same operation on every row.

    Attributes:
        calls: one call per row.
        by_row: per operand, whether it is a row; otherwise it is the same for all.
    """

    calls: tuple[int, ...]
    by_row: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of a program.

    Attributes:
        batches: the batches, in the order of their first calls.
        same: per value that is computed like an earlier one, the earlier one, which replaces it.
        dropped: calls that compute only such values.
    """

    batches: tuple[Batch, ...]
    same: Mapping[int, int]
    dropped: frozenset[int]


def batches_of(
    flat: FlatJaxpr, place: Mapping[int, Place], length: Callable[[Any], int], taken: set[int]
) -> Batches:
    """Join operations into batches.

    Args:
        flat: the program.
        place: per value that is a row, its stack and its row there.
        length: number of rows of a stack.
        taken: calls that are in loops.
    """
    kinds: dict[Any, int] = {}
    known = [kinds.setdefault(kind_of(call), len(kinds)) for call in flat.calls]
    alone: set[int] = set()
    for _ in range(ROUNDS):
        outcome = _round(flat, place, length, taken, alone, known)
        if isinstance(outcome, Batches):
            return outcome
        alone |= outcome
    return Batches((), {}, frozenset())


def _round(
    flat: FlatJaxpr,
    place: Mapping[int, Place],
    length: Callable[[Any], int],
    taken: set[int],
    alone: set[int],
    kinds: Sequence[int],
) -> Batches | set[int]:
    """The batches without the calls in ``alone``; or more calls that must be left out."""
    where: dict[int, Place] = dict(place)
    same: dict[int, int] = {}
    dropped: set[int] = set()
    groups: dict[int, dict[int, int]] = {}
    rows_of: dict[int, int] = {}
    first: dict[int, int] = {}
    # a number per kind of call and its operands: a key that contains the keys of the operands would
    # be as large as all paths to the call
    numbers: dict[Any, int] = {}
    parts_of: list[tuple[Any, ...]] = []

    def size(stack: Any) -> int:
        return rows_of[stack[0]] if isinstance(stack, tuple) else length(stack)

    for at, call in enumerate(flat.calls):
        if at in taken:
            continue
        parts: list[Any] = []
        rows: set[int] = set()
        sizes: set[int] = set()
        for atom in call.ins:
            if not isinstance(atom, int):
                parts.append(literal_of(atom))
                continue
            value = same.get(atom, atom)
            if value in where:
                stack, row = where[value]
                parts.append(("row", stack))
                rows.add(row)
                sizes.add(size(stack))
            else:
                parts.append(("value", value))
        if len(rows) > 1 or len(sizes) > 1 or runs_once(call.eqn) or _adds_scalars(call):
            continue
        key = numbers.setdefault((kinds[at], tuple(parts)), len(numbers))
        if key == len(parts_of):
            parts_of.append(tuple(parts))
        twin = groups[key].get(min(rows), -1) if rows and key in groups else first.get(key, -1)
        if twin >= 0:  # computed already
            same.update(zip(call.outs, flat.calls[twin].outs, strict=True))
            dropped.add(at)
            continue
        if not rows:
            first[key] = at
            continue
        if at in alone:
            continue
        (row,) = rows
        groups.setdefault(key, {})[row] = at
        rows_of[key] = sizes.pop()
        where.update({v: ((key, o), row) for o, v in enumerate(call.outs)})
    lacking = {key for key, calls in groups.items() if len(calls) < rows_of[key]}
    if lacking:  # groups that only read their results may still become complete
        first_of = [
            key
            for key in lacking
            if not any(
                kind == "row" and isinstance(what, tuple) and what[0] in lacking
                for kind, what in parts_of[key]
            )
        ]
        return {at for key in first_of for at in groups[key].values()}
    batches = [
        Batch(
            tuple(calls[row] for row in range(rows_of[key])),
            tuple(part[0] == "row" for part in parts_of[key]),
        )
        for key, calls in groups.items()
    ]
    return Batches(tuple(batches), same, frozenset(dropped))


def _adds_scalars(call: Call) -> bool:
    """Whether a call may be a link of a sum over gradients, such as a norm's."""
    return call.kind in ("add", "add_any") and not any(
        compat.aval_shape(v.aval) for v in call.eqn.outvars
    )


def literal_of(atom: Any) -> tuple[str, str]:
    """A key that is equal for literals of the same value."""
    return "literal", str(atom.val)


def kind_of(call: Call) -> Any:
    """A key that is equal for operations of the same types and parameters."""
    params = tuple((name, _plain(value)) for name, value in sorted(call.eqn.params.items()))
    avals = tuple(str(v.aval) for v in (*call.eqn.invars, *call.eqn.outvars))
    return call.kind, call.backward, call.made, params, avals


def _plain(value: Any) -> Any:
    """A parameter in comparable form; programs and functions compare by identity."""
    return id(value) if hasattr(value, "jaxpr") or callable(value) else str(value)
