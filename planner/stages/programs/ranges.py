"""Cuts scans over layers into ranges of iterations, so that stages can begin between them."""

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


def in_ranges(flat: FlatJaxpr, count: int, batch: frozenset[int]) -> tuple[FlatJaxpr, int]:
    """Cut every pair of scans over layers, forward and backward, of a loop's body into ``count``
    pairs, each over a part of the iterations. Returns the new body and the number of cut pairs.

    A scan is over layers if most bytes that it scans over do not depend on the batch (``batch``:
    the values that do). Scans over time, and scans whose iterations ``count`` does not divide, stay
    whole.

    Stacks that the backward scan reads from the forward scan stay in parts; the results of its
    iterations (a gradient per layer) are concatenated again.
    """
    readers = flat.readers
    calls, values, cut = list(flat.calls), flat.values, 0
    for at, call in enumerate(flat.calls):
        if call.kind != "scan" or call.backward or int(call.eqn.params["length"]) % count:
            continue
        if not _is_over_layers(call, batch):
            continue
        other, stacks = partner_of(flat, at, readers)
        if other is None:
            continue
        parts = {
            v: tuple(range(values + count * k, values + count * (k + 1)))
            for k, v in enumerate(sorted(stacks))
        }
        values += count * len(parts)
        back, carries = calls[other], loop_of(call.eqn).carries
        left = call.outs[carries:]
        outs = (*call.outs[:carries], *(n for v in left for n in parts.get(v, (v,))))
        whole = [parts.get(v) is None if isinstance(v, int) else True for v in back.ins]
        ins = tuple(
            n for v in back.ins for n in (parts.get(v, (v,)) if isinstance(v, int) else (v,))
        )
        ahead = _ahead(call, count, [v in parts for v in left])
        calls[at] = dataclasses.replace(call, outs=outs, run=ahead, made=True)
        run = _back(back, count, whole)
        calls[other] = dataclasses.replace(back, ins=ins, run=run, made=True)
        cut += 1
    return dataclasses.replace(flat, calls=tuple(calls), values=values), cut


def _is_over_layers(call: Call, batch: frozenset[int]) -> bool:
    loop = loop_of(call.eqn)
    _, _, rows = loop.split(list(zip(call.ins, call.eqn.invars, strict=True)))
    sizes = [(v in batch, nbytes(var.aval)) for v, var in rows if isinstance(v, int)]
    fixed = sum(n for moves, n in sizes if not moves)
    return fixed > 0 and 2 * fixed >= sum(n for _, n in sizes)


def _ahead(call: Call, count: int, parted: Sequence[bool]) -> Run:
    """Runs the iterations in parts, in order; stacks that are ``parted`` stay in parts."""
    loop = loop_of(call.eqn)

    def run(values: Sequence[Any]) -> list[Any]:
        consts, carry, rows = loop.split(values)
        stacks = []
        for part in _order(call, count):
            carry, ys = _scan(call, consts, carry, [_part(x, part, count) for x in rows])
            stacks.append(ys)
        out: list[Any] = []
        for k, is_kept in enumerate(parted):
            ys = [stack[k] for stack in _sorted(call, stacks)]
            out += ys if is_kept else [jnp.concatenate(ys)]
        return [*carry, *out]

    return run


def _back(call: Call, count: int, whole: Sequence[bool]) -> Run:
    """Runs the backward scan in parts; operands that are not ``whole`` come in parts."""
    loop = loop_of(call.eqn)

    def run(values: Sequence[Any]) -> list[Any]:
        given = iter(values)
        groups = [[next(given)] if w else [next(given) for _ in range(count)] for w in whole]
        consts, carry, rows = loop.split(groups)
        fixed, state = [g[0] for g in consts], [g[0] for g in carry]
        stacks = []
        for part in _order(call, count):
            xs = [g[part] if len(g) > 1 else _part(g[0], part, count) for g in rows]
            state, ys = _scan(call, fixed, state, xs)
            stacks.append(ys)
        pieces = zip(*_sorted(call, stacks), strict=True)
        return [*state, *(jnp.concatenate(ys) for ys in pieces)]

    return run


def _order(call: Call, count: int) -> Sequence[int]:
    parts = range(count)
    return parts[::-1] if call.eqn.params["reverse"] else parts


def _sorted(call: Call, stacks: list[Any]) -> list[Any]:
    return stacks[::-1] if call.eqn.params["reverse"] else stacks


def _part(x: Any, part: int, count: int) -> Any:
    size = x.shape[0] // count
    return jax.lax.slice_in_dim(x, part * size, (part + 1) * size)


def _scan(call: Call, consts: list[Any], carry: list[Any], rows: list[Any]) -> Any:
    """Run some iterations of a scan."""
    params, carries = call.eqn.params, loop_of(call.eqn).carries
    length = None if rows else int(params["length"])

    def once(carry: Any, xs: Any) -> Any:
        results = compat.evaluate_body(params["jaxpr"], (*consts, *carry, *xs))
        return list(results[:carries]), list(results[carries:])

    with compat.provenance(call.origin):
        return jax.lax.scan(once, carry, rows, length=length, reverse=bool(params["reverse"]))
