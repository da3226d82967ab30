"""Bodies of loops and of parts that the program rematerializes; masks that are computed before a
body move into it.

Differentiation moves what does not depend on parameters out of a scan: a causal mask, broadcast to
the shape of all scores, becomes an operand of the loop. Inside the body, its rows can be computed
chunk by chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

from planner.graph.flat import Call, FlatJaxpr, Run, flatten, runs_once
from planner.graph.jaxpr.walk import REMAT, called, loop_of

MOST = 64
"""Largest number of operations that compute a constant."""


def body_of(call: Call) -> tuple[Any, range] | None:
    """The body of a scan or a rematerialized part, and which operands it reads unchanged."""
    if call.made:
        return None
    if call.kind == "scan":
        return call.eqn.params["jaxpr"], range(loop_of(call.eqn).consts)
    body = called(call.eqn) if call.kind in REMAT else None
    return None if body is None else (body.jaxpr, range(len(call.ins)))


def with_constants(
    flat: FlatJaxpr, call: Call, jaxpr: Any, operands: range
) -> tuple[FlatJaxpr, frozenset[int]]:
    """A body that computes its constant operands itself, and the positions of these operands.

    A constant operand is a literal, or one that operations before the body compute from literals
    alone.
    """
    body = flatten(jaxpr)
    makers = {v: at for at, c in enumerate(flat.calls) for v in c.outs}
    copies: list[Call] = []
    names: dict[int, int] = {}
    count = body.values
    moved: set[int] = set()
    inside: dict[int, Any] = {}
    for position in operands:
        value = call.ins[position]
        if not isinstance(value, int):
            inside[body.inputs[position]] = value
            moved.add(position)
            continue
        chain = _chain(flat, makers, value)
        if chain is None:
            continue
        for maker in chain:
            if maker.outs[0] not in names:
                outs = tuple(range(count, count + len(maker.outs)))
                count += len(outs)
                copies.append(dataclasses.replace(maker.reading(names), outs=outs))
                names.update(zip(maker.outs, outs, strict=True))
        inside[body.inputs[position]] = names[value]
        moved.add(position)
    calls = tuple(c.reading(inside) for c in body.calls)
    outputs = tuple(inside.get(v, v) if isinstance(v, int) else v for v in body.outputs)
    made_in = FlatJaxpr((*copies, *calls), body.inputs, outputs, body.consts, count)
    return made_in, frozenset(moved)


def _chain(flat: FlatJaxpr, makers: dict[int, int], value: int) -> list[Call] | None:
    """The calls that compute a value from literals alone, in order; None if there is no such
    chain, or it is too long."""
    chain: set[int] = set()
    todo = [value]
    while todo:
        at = makers.get(todo.pop())
        if at is None or flat.calls[at].made or runs_once(flat.calls[at].eqn) or len(chain) > MOST:
            return None
        if at not in chain:
            chain.add(at)
            todo += [v for v in flat.calls[at].ins if isinstance(v, int)]
    return [flat.calls[at] for at in sorted(chain)]


def without_operands(call: Call, moved: Set[int], run: Run) -> Call:
    """A call that no longer reads the operands ``moved``."""
    left = [k for k in range(len(call.ins)) if k not in moved]

    def all_of(values: Sequence[Any]) -> list[Any]:
        full: list[Any] = [None] * len(call.ins)
        for k, x in zip(left, values, strict=True):
            full[k] = x
        return run(full)

    ins = tuple(call.ins[k] for k in left)
    return Call(call.eqn, ins, call.outs, all_of, call.backward, made=True, place=call.place)
