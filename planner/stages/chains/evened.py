"""Scans whose iterations the stages do not divide: the remaining iterations become separate scans
after the last stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.graph.flat import Call, FlatJaxpr, Run, nbytes
from planner.graph.jaxpr.walk import loop_of
from planner.remat.scans import partner_of


def evened(flat: FlatJaxpr, count: int) -> tuple[FlatJaxpr, int] | None:
    """Cut the largest pair of scans, forward and backward, of a loop's body in two: a multiple of
    ``count`` iterations, and the rest. Returns the new body and the number of iterations in the
    rest; None if there is no pair, or either part is empty."""
    readers = flat.readers
    pairs = []
    for at, call in enumerate(flat.calls):
        if call.kind == "scan" and not call.backward and not call.eqn.params["reverse"]:
            other, stacks = partner_of(flat, at, readers)
            if other is not None and flat.calls[other].eqn.params["reverse"]:
                pairs.append((sum(nbytes(v.aval) for v in call.eqn.invars), at, other, stacks))
    if not pairs:
        return None
    _, at, other, stacks = max(pairs)
    call, back = flat.calls[at], flat.calls[other]
    length = int(call.eqn.params["length"])
    first = length - length % count
    if first in (0, length):
        return None
    halves = {
        v: (flat.values + 2 * k, flat.values + 2 * k + 1) for k, v in enumerate(sorted(stacks))
    }
    carries = loop_of(call.eqn).carries
    carried, left = call.outs[:carries], call.outs[carries:]
    outs = (*carried, *(n for v in left for n in halves.get(v, (v,))))
    ins = tuple(n for v in back.ins for n in (halves.get(v, (v,)) if _int(v) else (v,)))
    whole = [_int(v) and v in halves for v in back.ins]
    ahead = _ahead(call, first, [v in halves for v in left])
    calls = list(flat.calls)
    calls[at] = dataclasses.replace(call, outs=outs, run=ahead, made=True)
    calls[other] = dataclasses.replace(back, ins=ins, run=_back(back, first, whole), made=True)
    values = flat.values + 2 * len(halves)
    return dataclasses.replace(flat, calls=tuple(calls), values=values), length - first


def _int(atom: Any) -> bool:
    return isinstance(atom, int)


def _ahead(call: Call, first: int, halved: Sequence[bool]) -> Run:
    """Runs the first iterations, then the rest; stacks that are ``halved`` stay in two parts."""
    loop = loop_of(call.eqn)
    rest = int(call.eqn.params["length"]) - first

    def run(values: Sequence[Any]) -> list[Any]:
        consts, carry, rows = loop.split(values)
        carry, one = _scan(call, first, consts, carry, [x[:first] for x in rows])
        carry, two = _scan(call, rest, consts, carry, [x[first:] for x in rows])
        ys = []
        for a, b, half in zip(one, two, halved, strict=True):
            ys += [a, b] if half else [jnp.concatenate([a, b])]
        return [*carry, *ys]

    return run


def _back(call: Call, first: int, halved: Sequence[bool]) -> Run:
    """Runs the backward scan, the rest first; operands that are ``halved`` come in two parts."""
    loop = loop_of(call.eqn)
    rest = int(call.eqn.params["length"]) - first

    def run(values: Sequence[Any]) -> list[Any]:
        given = iter(values)
        pairs = [(next(given), next(given)) if h else (next(given), None) for h in halved]
        consts, carry, rows = loop.split(pairs)
        fixed, state = [a for a, _ in consts], [a for a, _ in carry]
        early = [a if b is not None else a[:first] for a, b in rows]
        late = [b if b is not None else a[first:] for a, b in rows]
        state, two = _scan(call, rest, fixed, state, late)
        state, one = _scan(call, first, fixed, state, early)
        return [*state, *(jnp.concatenate([a, b]) for a, b in zip(one, two, strict=True))]

    return run


def _scan(call: Call, turns: int, consts: list[Any], carry: list[Any], rows: list[Any]) -> Any:
    """Run some iterations of a scan, which may have no rows."""
    params, carries = call.eqn.params, loop_of(call.eqn).carries

    def once(carry: Any, xs: Any) -> Any:
        results = compat.evaluate_body(params["jaxpr"], (*consts, *carry, *xs))
        return list(results[:carries]), list(results[carries:])

    with compat.provenance(call.origin):
        reverse = bool(params["reverse"])
        return jax.lax.scan(once, carry, rows, length=turns, reverse=reverse)
