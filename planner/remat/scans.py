"""Recomputes the body of a forward scan in the backward scan that reads its stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner import compat
from planner.graph.flat import Call, FlatJaxpr, flatten, nbytes, scan
from planner.graph.jaxpr.places import user_line
from planner.graph.jaxpr.walk import loop_of
from planner.remat.frontier import Block, Cut, InChunks, compared_maxima
from planner.remat.sites import Site, Sites, pays, to_device, to_host


def paired_scans(flat: FlatJaxpr, sites: Sites) -> tuple[FlatJaxpr, frozenset[int]]:
    """Rewrite pairs of scans.

    Returns:
        The program, and the positions of calls that belong to a pair (rewritten or not).
    """
    calls, readers = list(flat.calls), flat.readers
    paired: set[int] = set()
    values = flat.values
    for at, call in enumerate(flat.calls):
        if call.kind != "scan" or at in paired:
            continue
        partner, dropped = partner_of(flat, at, readers)
        if partner is None:
            continue
        paired |= {at, partner}
        body = flatten(call.eqn.params["jaxpr"]).live()
        chunks = sites.chunks(body)
        never = chunks.values
        if never or sites.policy.flop_per_byte:
            never |= compared_maxima(body.calls)
        block = _block(call, body, dropped, InChunks(never, chunks.loops))
        body_cut = sites.cut(block)
        what = f"the body of the scan at {user_line(call.eqn) or 'an unknown line'}"
        sites.found.append(Site(what, int(call.eqn.params["length"]), block, body_cut))
        if not pays(block, body_cut):
            continue
        saved_values = sorted(body_cut.kept)
        stacks = tuple(range(values, values + len(saved_values)))
        values += len(stacks)
        away = sites.policy.on_host
        calls[at] = _forward(call, body, dropped, saved_values, stacks, away)
        calls[partner] = _backward(call, calls[partner], body, dropped, body_cut, stacks, away)
    if not paired:
        return flat, frozenset()
    done = FlatJaxpr(tuple(calls), flat.inputs, flat.outputs, flat.consts, values)
    return done, frozenset(paired)


def partner_of(
    flat: FlatJaxpr, at: int, readers: Sequence[Sequence[int]]
) -> tuple[int | None, frozenset[int]]:
    """The backward scan that reads most of the stacked results of a scan, and the results that only
    it reads."""
    call = flat.calls[at]
    n_carry, length = loop_of(call.eqn).carries, call.eqn.params["length"]
    outputs = {v for v in flat.outputs if isinstance(v, int)}
    by_reader: dict[int, set[int]] = {}
    sizes = dict(zip(call.outs, (nbytes(v.aval) for v in call.eqn.outvars), strict=True))
    for value in call.outs[n_carry:]:
        value_readers = set(readers[value])
        if len(value_readers) != 1 or value in outputs:
            continue
        other = flat.calls[reader := value_readers.pop()]
        if other.kind != "scan" or other.eqn.params["length"] != length or not other.backward:
            continue
        consts, carries, _ = loop_of(other.eqn).split(other.ins)
        if value not in (*consts, *carries):
            by_reader.setdefault(reader, set()).add(value)
    if not by_reader:
        return None, frozenset()
    best = max(by_reader, key=lambda r: sum(sizes[v] for v in by_reader[r]))
    return best, frozenset(by_reader[best])


def _block(call: Call, body: FlatJaxpr, dropped: frozenset[int], chunks: InChunks) -> Block:
    """One iteration of the forward scan; its carries could be stacked instead of results."""
    loop = loop_of(call.eqn)
    _, carries, _ = loop.split(body.inputs)
    avals = compat.body(call.eqn.params["jaxpr"]).invars[loop.consts :]
    entries = {v: nbytes(a.aval) for v, a in zip(carries, avals, strict=False)}
    body_values = {v for c in body.calls for v in c.outs}
    wanted = {
        o
        for v, o in zip(call.outs, body.outputs, strict=True)
        if v in dropped and isinstance(o, int)
    }
    wanted &= body_values | entries.keys()
    return Block(body.calls, frozenset(wanted), entries, frozenset(), chunks.values, chunks.loops)


def _forward(
    call: Call,
    body: FlatJaxpr,
    dropped: frozenset[int],
    saved_values: Sequence[int],
    stacks: tuple[int, ...],
    away: bool,
) -> Call:
    """The forward scan, which stacks stored values instead of dropped ones."""
    loop = loop_of(call.eqn)
    n_carry = loop.carries
    left = [k for k, v in enumerate(call.outs[n_carry:]) if v not in dropped]

    def run(values: Sequence[Any]) -> list[Any]:
        consts, first, rows = loop.split(values)

        def once(carry: Any, xs: Any) -> Any:
            env = body.env((*consts, *carry, *xs))
            body.run(body.calls, env)
            results = [body.read(v, env) for v in body.outputs]
            ys = results[n_carry:]
            saved = [to_host(env[v]) if away else env[v] for v in saved_values]
            return results[:n_carry], ([ys[k] for k in left], saved)

        carry, (ys, saved) = scan(call.eqn, once, first, rows)
        return [*carry, *ys, *saved]

    outs = (*call.outs[:n_carry], *(call.outs[n_carry + k] for k in left), *stacks)
    return Call(call.eqn, call.ins, outs, run, call.backward, place=call.place)


def _backward(
    forward: Call,
    call: Call,
    body: FlatJaxpr,
    dropped: frozenset[int],
    body_cut: Cut,
    stacks: tuple[int, ...],
    away: bool,
) -> Call:
    """The backward scan, which recomputes dropped values from stored ones."""
    loop, earlier = loop_of(call.eqn), loop_of(forward.eqn)
    place = dict(zip(forward.outs, body.outputs, strict=True))
    calls = [body.calls[k] for k in body_cut.again]
    consts, carries, rows = loop.split(call.ins)
    left = [v for v in rows if v not in dropped]
    f_consts, _, f_rows = earlier.split(forward.ins)
    cuts = np.cumsum([len(x) for x in (consts, carries, left, f_consts, f_rows)])
    rest = [None] * earlier.carries
    saved_values = sorted(body_cut.kept)

    def run(values: Sequence[Any]) -> list[Any]:
        parts = [list(values[a:b]) for a, b in zip((0, *cuts), (*cuts, None), strict=True)]
        consts, first, left_xs, f_consts, f_xs, saved = parts

        def once(carry: Any, xs: Any) -> Any:
            left_row, f_row, saved = xs
            env = body.env((*f_consts, *rest, *f_row))
            env.update(zip(saved_values, map(to_device, saved) if away else saved, strict=True))
            body.run(calls, env)
            given = iter(left_row)
            full = [body.read(place[v], env) if v in dropped else next(given) for v in rows]
            results = compat.evaluate_body(call.eqn.params["jaxpr"], (*consts, *carry, *full))
            return list(results[: loop.carries]), list(results[loop.carries :])

        carry, ys = scan(call.eqn, once, first, (left_xs, f_xs, saved))
        return [*carry, *ys]

    ins = (*consts, *carries, *left, *f_consts, *f_rows, *stacks)
    return Call(call.eqn, ins, call.outs, run, call.backward, place=call.place)
