"""The parts of a microbatch outside its stages: before the first, after the last, and at the end.

The end follows the first stage's backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.flat import Call
from planner.graph.jaxpr.places import user_line
from planner.stages.body import Body
from planner.stages.chains.chain import Chain, made_by
from planner.stages.errors import refused


@dataclass(frozen=True, eq=False)
class Parts:
    """The calls of a body outside its chain.

    Attributes:
        base: those that depend on the batch and parameters alone.
        middle: between the last stage's forward pass and its backward pass.
        tail: after the first stage's backward pass.
        soon, late: the sums that base and middle compute, and those that tail computes.
    """

    base: tuple[Call, ...]
    middle: tuple[Call, ...]
    tail: tuple[Call, ...]
    soon: list[int]
    late: list[int]


def parts_of(body: Body, chain: Chain) -> Parts:
    """Sort the calls that belong to no stage.

    Raises:
        NoStagesError: a call reads a value that does not exist when it runs; names its line.
    """
    flat = body.flat
    inside = [c for at, c in enumerate(flat.calls) if at in chain.members]
    ahead = made_by([c for at, c in enumerate(flat.calls) if chain.members.get(at) is True])
    back = made_by(inside) - ahead
    out_ahead = {r for _, r in chain.forward.exits}
    out_back = {r for _, r in chain.backward.exits}
    base, middle, tail = [], [], []
    of_middle, of_tail = set(out_ahead), set(out_back)
    for at, call in enumerate(flat.calls):
        if at in chain.members:
            continue
        read = {v for v in call.ins if isinstance(v, int)}
        line = user_line(call.eqn) or "an unknown line"
        if read & (ahead - out_ahead) or read & (back - out_back):
            raise refused(f"{line}: {call.kind} outside of the stages reads a value inside of one")
        if read & of_tail:
            if read & of_middle:
                raise refused(
                    f"{line}: {call.kind} reads results of both the first and the last stage"
                )
            tail.append(call)
            of_tail.update(call.outs)
        elif read & of_middle:
            middle.append(call)
            of_middle.update(call.outs)
        else:
            base.append(call)
    summed = body.added
    sums = {v for t in (chain.forward, chain.backward) for s in t.sums.values() for v in s.values}
    if bad := summed & (ahead | back) - sums - out_ahead - out_back:
        raise refused(f"a sum over stages is added up as one value ({len(bad)})")
    for v in body.stacked:
        if isinstance(v, int) and (v in of_tail or v in (ahead | back) - out_ahead):
            raise refused("a result per example is made behind the first stage's backward pass")
    late = sorted(v for v in summed - sums if v in of_tail)
    soon = sorted(v for v in summed - sums if v not in of_tail)
    return Parts(tuple(base), tuple(middle), tuple(tail), soon, late)
