"""Analyzes how the body of a Pallas kernel depends on its place in the grid and on earlier runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from planner import compat
from planner.rules.kernels.pallas.integers import Number, evaluated, inner_call, literal

PLACES = frozenset({"program_id", "num_programs"})
"""Primitives that read a place in the grid, or the grid's size; ``axis`` counts the dimensions that
the kernel was written for, without those that ``jax.vmap`` adds in front."""

READING = frozenset({"get", "masked_load", "load"})
WRITING = frozenset({"swap", "addupdate", "masked_swap", "store"})
"""Primitives of references, by what they do to their first operand."""

Refs = frozenset[Any]


def bodies(eqn: Any) -> Iterator[Any]:
    """The jaxprs in an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(compat.body(item) if hasattr(item, "jaxpr") else item, "eqns"):
                yield compat.body(item)


def draws(jaxpr: Any) -> bool:
    """Whether a body uses the core's generator of random numbers, whose state carries over from
    place to place."""
    return any(
        "prng" in eqn.primitive.name or any(map(draws, bodies(eqn)))
        for eqn in compat.body(jaxpr).eqns
    )


def writes(jaxpr: Any) -> frozenset[int]:
    """The references that a body may write, by position among its arguments. An operation counts as
    writing unless it is known to only read."""
    inner = compat.body(jaxpr)
    at = {v: k for k, v in enumerate(inner.invars)}
    written: set[int] = set()
    for eqn in inner.eqns:
        refs = [v for v in eqn.invars if not compat.is_literal(v) and v in at]
        refs = [v for v in refs if compat.is_ref(v.aval)]
        if not refs or eqn.primitive.name in READING:
            continue
        if eqn.primitive.name in WRITING:
            written.update(at[v] for v in eqn.invars[:1] if not compat.is_literal(v) and v in at)
            continue
        pairs = _entered(eqn)
        if pairs is None:
            written.update(at[v] for v in refs)
            continue
        for operands, body in pairs:
            for k in writes(body):
                if not compat.is_literal(operands[k]) and operands[k] in at:
                    written.add(at[operands[k]])
    return frozenset(written)


def _entered(eqn: Any) -> list[tuple[Sequence[Any], Any]] | None:
    """The bodies of an equation with the operands that they take; None if that is not known."""
    call, params, name = inner_call(eqn), eqn.params, eqn.primitive.name
    if call is not None:
        return [(eqn.invars, call)]
    if name == "cond":
        return [(eqn.invars[1:], b) for b in params["branches"]]
    if name == "scan":
        return [(eqn.invars, params["jaxpr"])]
    if name == "while":
        test, body = params["cond_nconsts"], params["body_nconsts"]
        carried = eqn.invars[test + body :]
        return [
            ((*eqn.invars[:test], *carried), params["cond_jaxpr"]),
            ((*eqn.invars[test : test + body], *carried), params["body_jaxpr"]),
        ]
    return None


def read_places(jaxpr: Any) -> dict[int, int]:
    """The dimensions of the grid that the results or the effects of a body depend on, each with its
    period: only the place modulo this number matters. A period of 0 means that all of it does."""
    inner = compat.body(jaxpr)
    needed = {v for v in inner.outvars if not compat.is_literal(v)}
    periods: dict[int, int] = {}

    def note(axis: int, period: int) -> None:
        known = periods.get(axis, period)
        periods[axis] = math.lcm(known, period) if known and period else 0

    live = []
    for eqn in reversed(inner.eqns):
        if not (eqn.effects or needed.intersection(eqn.outvars)):
            continue
        needed.update(v for v in eqn.invars if not compat.is_literal(v))
        live.append(eqn)
        if eqn.primitive.name in PLACES:
            note(int(eqn.params["axis"]), _period(inner, eqn.outvars[0], live))
        for body in bodies(eqn):
            for axis, period in read_places(body).items():
                note(axis, period)
    return periods


def _period(inner: Any, place: Any, readers: Sequence[Any]) -> int:
    """The modulus of all reads of a place; 0 if it is read in any other way."""
    if any(v is place for v in inner.outvars):
        return 0
    period = 1
    for eqn in readers:
        if not any(v is place for v in eqn.invars):
            continue
        divisor = eqn.invars[-1]
        if eqn.primitive.name != "rem" or divisor is place or not compat.is_literal(divisor):
            return 0
        period = math.lcm(period, int(divisor.val))
    return period


def starts_anew(jaxpr: Any, state: Collection[int], first: Collection[int]) -> bool:
    """Whether a body never reads what earlier runs left in references, if it is the first run along
    some dimensions of the grid.

    Args:
        jaxpr: the kernel's body.
        state: the references, by position among the body's arguments.
        first: the dimensions along which it is the first run, counted as by ``PLACES``.

    A reference is safe once all of it is written. An operation that is not understood counts as
    reading.
    """
    inner = compat.body(jaxpr)
    held = frozenset(inner.invars[k] for k in state)
    return _left(inner, held, {}, frozenset(first)) is not None


def _left(jaxpr: Any, held: Refs, known: dict[Any, Number], first: frozenset[int]) -> Refs | None:
    """The references of ``held`` that a body does not fully write; None if it reads one before."""
    for eqn in compat.body(jaxpr).eqns:
        name = eqn.primitive.name
        values = [literal(v) if compat.is_literal(v) else known.get(v) for v in eqn.invars]
        refs = [v for v in eqn.invars if not compat.is_literal(v) and v in held]
        if name == "program_id" and eqn.params["axis"] in first:
            known[eqn.outvars[0]] = np.asarray(0, np.int32)
            continue
        call = inner_call(eqn)
        left: Refs | None
        if call is not None:
            left = _inside(call, eqn.invars, values, held, first)
        elif name == "cond":
            left = _branches(eqn, values, held, first)
        elif not refs:
            known.update(zip(eqn.outvars, evaluated(eqn, values), strict=True))
            continue
        elif name == "swap" and refs == [eqn.invars[0]] and _unread(jaxpr, eqn.outvars[0]):
            whole = math.prod(compat.aval_shape(refs[0].aval))
            written = math.prod(compat.aval_shape(eqn.invars[1].aval))
            left = held - {refs[0]} if written == whole else held
        else:  # read, or written in a way that is not analyzed
            left = None
        if left is None:
            return None
        held = left
    return held


def _inside(
    body: Any, operands: Sequence[Any], values: Sequence[Number], held: Refs, first: frozenset[int]
) -> Refs | None:
    """``_left`` of a body that takes ``operands``, as references of the enclosing program."""
    inner = compat.body(body)
    pairs = zip(operands, inner.invars, strict=True)
    names = [(o, i) for o, i in pairs if not compat.is_literal(o) and o in held]
    known = dict(zip(inner.invars, values, strict=True))
    left = _left(inner, frozenset(i for _, i in names), known, first)
    if left is None:
        return None
    return held - {o for o, i in names if i not in left}


def _branches(eqn: Any, values: Sequence[Number], held: Refs, first: frozenset[int]) -> Refs | None:
    """``_left`` of a conditional: of the branch taken, or of all if that is not known."""
    branches = eqn.params["branches"]
    which = values[0]
    taken = branches if which is None else [branches[int(np.clip(which, 0, len(branches) - 1))]]
    left: Refs = frozenset()
    for branch in taken:
        after = _inside(branch, eqn.invars[1:], values[1:], held, first)
        if after is None:
            return None
        left |= after
    return left


def _unread(jaxpr: Any, var: Any) -> bool:
    """Whether nothing reads a result."""
    inner = compat.body(jaxpr)
    ends = [v for v in inner.outvars if not compat.is_literal(v)]
    read = [v for e in inner.eqns for v in e.invars if not compat.is_literal(v)]
    return not any(v is var for v in (*ends, *read))
