"""Stages of a model whose layers are one scan: each runs an equal share of its iterations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from planner import compat
from planner.graph.flat import Call, flatten, nbytes
from planner.graph.jaxpr.places import user_line
from planner.graph.jaxpr.walk import loop_of
from planner.remat.scans import partner_of
from planner.stages.body import Body, closure, depends
from planner.stages.chains.chain import Chain, Stack, Task
from planner.stages.errors import refused


def scan_chain(body: Body, count: int) -> Chain | None:
    """The chain of the forward scan with the largest operands and the backward scan that reads its
    stacks; None if there is no such pair.

    Raises:
        NoStagesError: the pair can't be cut.
    """
    flat = body.flat
    readers = flat.readers
    pairs = []
    for at, call in enumerate(flat.calls):
        if call.kind == "scan" and not call.backward and any(v in body.batch for v in call.outs):
            other, stacks = partner_of(flat, at, readers)
            if other is not None:
                size = sum(nbytes(v.aval) for v in call.eqn.invars)
                pairs.append((size, at, other, stacks))
    if not pairs:
        return None
    _, at, other, stacks = max(pairs)
    ahead, back = flat.calls[at], flat.calls[other]
    line = user_line(ahead.eqn) or "an unknown line"
    length = int(ahead.eqn.params["length"])
    if length < count:
        raise refused(f"the scan at {line} has {length} turns, fewer than {count} stages")
    if ahead.eqn.params["reverse"] or not back.eqn.params["reverse"]:
        raise refused(f"the scan at {line} does not run forward, and its gradient backward")
    fresh = iter(range(flat.values, 1 << 62))
    forward = _task(body, ahead, count, fresh, frozenset(), "forward", readers)
    alike = _alike(body, ahead, stacks)
    before, once = _once(ahead, alike, fresh)
    back = back.reading(once)
    backward = _task(body, back, count, fresh, stacks - alike, "backward", readers)
    what = f"{count} stages, each {length // count} of the {length} turns of the scan at {line}"
    return Chain(forward, backward, {at: True, other: False}, what, before)


def _alike(body: Body, call: Call, stacks: frozenset[int]) -> frozenset[int]:
    """The stacked results of a scan that are equal for all microbatches, such as parameters in
    another dtype."""
    loop = loop_of(call.eqn)
    inner = flatten(call.eqn.params["jaxpr"])
    consts, carries, _ = loop.split(inner.inputs)
    given = loop.split(call.ins)[0]
    varies = [c for c, v in zip(consts, given, strict=True) if v in body.batch] + carries
    hit = depends(inner.calls, varies)
    pairs = zip(call.outs[loop.carries :], inner.outputs[loop.carries :], strict=True)
    return frozenset(v for v, o in pairs if v in stacks and isinstance(o, int) and o not in hit)


def _once(
    call: Call, alike: frozenset[int], fresh: Iterator[int]
) -> tuple[tuple[Call, ...], dict[int, int]]:
    """A call that computes the stacked results ``alike`` of a scan without the scan, and their new
    numbers."""
    if not alike:
        return (), {}
    loop = loop_of(call.eqn)
    inner = flatten(call.eqn.params["jaxpr"])
    consts, _, rows = loop.split(call.ins)
    inner_outs = dict(zip(call.outs, inner.outputs, strict=True))
    calls = closure(inner.calls, [inner_outs[v] for v in alike])
    read = {v for c in calls for v in c.ins if isinstance(v, int)} | {inner_outs[v] for v in alike}
    pairs = list(zip(inner.inputs[: loop.consts], consts, strict=True))
    shared = [(n, v) for n, v in pairs if n in read]
    pairs = list(zip(inner.inputs[loop.consts + loop.carries :], rows, strict=True))
    over = [(n, v) for n, v in pairs if n in read]
    names = {v: next(fresh) for v in sorted(alike)}

    def run(values: Sequence[Any]) -> list[Any]:
        fixed = dict(zip((n for n, _ in shared), values, strict=False))

        def one(turn: list[Any]) -> list[Any]:
            env = {**inner.consts, **fixed, **dict(zip((n for n, _ in over), turn, strict=True))}
            inner.run(calls, env)
            return [inner.read(inner_outs[v], env) for v in names]

        return list(jax.vmap(one)(list(values[len(shared) :])))

    ins = tuple(v for _, v in (*shared, *over))
    return (Call(call.eqn, ins, tuple(names.values()), run, False, True, call.place),), names


def _task(
    body: Body,
    call: Call,
    count: int,
    fresh: Iterator[int],
    stacks: frozenset[int],
    kind: str,
    readers: Sequence[Sequence[int]],
) -> Task:
    """The task that runs an equal share of a scan's iterations."""
    loop = loop_of(call.eqn)
    line = user_line(call.eqn) or "an unknown line"
    consts, carries, rows = loop.split(call.ins)
    reads = [next(fresh) for _ in carries]
    row_stacks: dict[int, Stack] = {}
    over = []
    for v in rows:
        if v in stacks:
            over.append(v)
            continue
        if not isinstance(v, int) or v in body.batch:
            raise refused(f"the scan at {line} goes over values of the batch, a row for each layer")
        over.append(next(fresh))
        row_stacks[over[-1]] = Stack((v,))
    sums: dict[int, Stack] = {}
    last = {v for v in body.flat.outputs if isinstance(v, int)}
    for v in call.outs[loop.carries :]:
        if readers[v] and kind == "backward":
            raise refused(f"results of the scan at {line} are used before they are added up")
        if v in last:
            sums[v] = Stack((v,))
    share_call = dataclasses.replace(
        call, ins=(*consts, *reads, *over), run=_share(call.eqn, count), made=True
    )
    return Task(
        calls=(share_call,),
        carries=tuple(zip(reads, call.outs, carries, strict=False)),
        exits=tuple((v, v) for v in call.outs[: loop.carries]),
        stacks=row_stacks,
        rows={},
        shared=frozenset(v for v in consts if isinstance(v, int)),
        sums=sums,
        residuals=tuple(v for v in rows if v in stacks),
    )


def _share(eqn: Any, count: int) -> Any:
    """Runs an equal share of a scan's iterations."""
    loop, params = loop_of(eqn), eqn.params

    def run(values: Sequence[Any]) -> list[Any]:
        consts, first, rows = loop.split(values)

        def once(carry: Any, xs: Any) -> Any:
            results = compat.evaluate_body(params["jaxpr"], (*consts, *carry, *xs))
            return list(results[: loop.carries]), list(results[loop.carries :])

        with compat.provenance(eqn):
            carry, ys = jax.lax.scan(
                once,
                first,
                rows,
                length=params["length"] // count,
                reverse=bool(params["reverse"]),
                unroll=params.get("unroll", 1),
            )
        return [*carry, *ys]

    return run
