"""Analyzes the loop over microbatches of a step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner import compat
from planner.graph.flat import Call, FlatJaxpr, flatten
from planner.graph.jaxpr.walk import Loop, loop_of
from planner.stages.errors import refused


@dataclass(frozen=True, eq=False)
class Body:
    """One iteration.

    Attributes:
        call: the loop.
        loop: its structure.
        flat: its body.
        rows: the numbers of the values that it scans over.
        summed: per carry, the value (or literal) that an iteration adds to it, or several: the
            parts of its first dimension, in order.
        stacked: the values that it stacks.
        batch: values that depend on ``rows``.
        sums: per carry, the calls of the loop that are not in ``flat``: the addition, and the calls
            that join or convert the parts before it.
    """

    call: Call
    loop: Loop
    flat: FlatJaxpr
    rows: tuple[int, ...]
    summed: tuple[Any, ...]
    stacked: tuple[Any, ...]
    batch: frozenset[int]
    sums: tuple[tuple[Call, ...], ...] = ()

    @property
    def added(self) -> frozenset[int]:
        """The values that are added up."""
        pieces = (v for x in self.summed for v in (x if isinstance(x, tuple) else (x,)))
        return frozenset(v for v in pieces if isinstance(v, int))


def body_at(flat: FlatJaxpr, parts: int) -> int:
    """The index of the loop over microbatches: of the scans with ``parts`` iterations, the one with
    the most calls."""
    loops = [
        at for at, c in enumerate(flat.calls) if c.kind == "scan" and loop_of(c.eqn).trips == parts
    ]
    if not loops:
        raise refused("it has no loop over microbatches")
    return max(loops, key=lambda at: len(flatten(flat.calls[at].eqn.params["jaxpr"]).calls))


def body_of(call: Call) -> Body:
    """Analyze a loop over microbatches.

    Raises:
        NoStagesError: an iteration does more than add to its carries.
    """
    flat = flatten(call.eqn.params["jaxpr"]).live()
    loop = loop_of(call.eqn)
    _, carries, rows = loop.split(flat.inputs)
    readers = Counter(v for c in flat.calls for v in c.ins if isinstance(v, int))
    readers.update(v for v in flat.outputs if isinstance(v, int))
    sums: list[tuple[Call, ...]] = []
    makers = {v: c for c in flat.calls for v in c.outs}
    summed, adds, fresh = [], set(), flat.values
    apart: dict[int, list[Call]] = {}  # per conversion, the conversions of its operand's parts
    for carry, out in zip(carries, flat.outputs, strict=False):
        add = makers.get(out) if isinstance(out, int) else None
        if add is None or add.kind != "add" or carry not in add.ins:
            line = f"{add.place.line}: " if add is not None and add.place else ""
            what = "an input" if add is None else f"a result of {add.kind}"
            raise refused(
                f"{line}{what} is returned that is no sum over examples. Compute what does not "
                "depend on the batch, such as the next random key, outside of the layers: split "
                "keys before a loop over layers, which takes them as xs"
            )
        adds.add(id(add))
        added = add.ins[1] if add.ins[0] == carry else add.ins[0]
        wider = makers.get(added) if isinstance(added, int) else None
        if wider is None or wider.kind != "convert_element_type" or readers[added] > 1:
            wider = None
        source = added if wider is None else wider.ins[0]
        joined = makers.get(source) if isinstance(source, int) else None
        if joined is not None and _joins(joined) and readers[source] == 1:
            adds.add(id(joined))
            added = tuple(joined.ins)
            if wider is not None:
                adds.add(id(wider))
                apart[id(wider)] = _each(wider, joined, fresh)
                added = tuple(c.outs[0] for c in apart[id(wider)])
                fresh += len(added)
        summed.append(added)
        sums.append(tuple(c for c in (joined, wider, add) if c is not None and id(c) in adds))
    calls = tuple(
        part for c in flat.calls for part in apart.get(id(c), [] if id(c) in adds else [c])
    )
    if any(isinstance(v, int) and v in set(carries) for c in calls for v in c.ins):
        raise refused("a microbatch reads what those before it added up")
    for c in calls:
        if c.eqn.effects:
            raise refused(f"{c.place.line if c.place else ''}: {c.kind} has an effect")
    stacked = flat.outputs[loop.carries :]
    pieces = [v for x in summed for v in (x if isinstance(x, tuple) else (x,))]
    flat = FlatJaxpr(calls, flat.inputs, (*pieces, *stacked), flat.consts, fresh).live()
    return Body(
        call,
        loop,
        flat,
        tuple(rows),
        tuple(summed),
        tuple(stacked),
        depends(calls, rows),
        tuple(sums),
    )


def _joins(call: Call) -> bool:
    """Whether a call joins its operands along their first dimension."""
    return call.kind == "concatenate" and not call.eqn.params["dimension"]


def _each(wider: Call, joined: Call, fresh: int) -> list[Call]:
    """The conversion ``wider``, applied to each operand that ``joined`` joins; the results are
    numbered from ``fresh`` on."""
    (whole,), dtype = wider.eqn.outvars, wider.eqn.params["new_dtype"]

    def run(values: Sequence[Any]) -> list[Any]:
        return [values[0].astype(dtype)]

    out = []
    for k, (v, var) in enumerate(zip(joined.ins, joined.eqn.invars, strict=True)):
        part = compat.variable_like(whole, compat.aval_shape(var.aval))
        eqn = wider.eqn.replace(invars=[var], outvars=[part])
        out.append(
            dataclasses.replace(wider, eqn=eqn, ins=(v,), outs=(fresh + k,), run=run, made=True)
        )
    return out


def depends(calls: Sequence[Call], on: Sequence[int]) -> frozenset[int]:
    """The values ``on``, and all values that calls compute from them."""
    out = set(on)
    for c in calls:
        if any(isinstance(v, int) and v in out for v in c.ins):
            out.update(c.outs)
    return frozenset(out)


def closure(calls: Sequence[Call], wanted: Sequence[int]) -> list[Call]:
    """The calls that some values need, in order."""
    need, makers = set(wanted), []
    for c in reversed(calls):
        if need.intersection(c.outs):
            makers.append(c)
            need.update(v for v in c.ins if isinstance(v, int))
    return makers[::-1]
