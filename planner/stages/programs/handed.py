"""Values that one place makes and another reads: the plan gives their shardings to both places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.graph.flat import Call
from planner.graph.jaxpr.walk import BARRIER
from planner.stages.programs.homes import ALL
from planner.stages.programs.layered import Apart

Place = tuple[int, int]
"""An operation of the graph and a position among its results."""


def result_place(call: Call, k: int, ops: Mapping[int, range]) -> Place | None:
    """The place of result ``k`` of a call in the graph; None if the graph has no such value."""
    span = ops.get(id(call))
    if span is None or call.made:
        return None
    count, name = len(call.outs), call.eqn.primitive.name
    if name in LEAVING and len(span) >= count:
        return span.stop - count + k, 0
    return (span.start, k) if len(span) == 1 else None


LEAVING = frozenset({BARRIER, "scan", "while", "cond"})
"""Calls that end with one operation per result."""


def handed(apart: Apart) -> tuple[frozenset[int], frozenset[int]]:
    """Values of a microbatch, and values outside of the loop, that leave the place where they are
    made: values that other places read, and results of the step."""
    split, where, flat = apart.split, apart.homes, apart.flat
    inner = {v for v, _, _ in split.moves}
    loop = flat.calls[apart.at]
    outer: set[int] = {v for v in flat.outputs if isinstance(v, int)}
    for node in where.behind:
        outer |= {v for v in node.ins if isinstance(v, int) and where.place.get(v) != node.place}
        if node.call is None:
            inner |= {
                p
                for p in _terms(apart, loop.outs.index(node.outs[0]))
                if split.makers[p][1] != node.place or node.place == ALL
            }
    return frozenset(inner), frozenset(outer)


def handed_places(apart: Apart) -> list[Place]:
    """The places of the values of ``handed`` in the graph."""
    inner, outer = handed(apart)
    both = ((apart.split.body.flat.calls, inner), (apart.flat.calls, outer))
    places = [
        result_place(call, k, apart.ops)
        for calls, values in both
        for call in calls
        for k, v in enumerate(call.outs)
        if v in values
    ]
    return sorted({place for place in places if place is not None})


def _terms(apart: Apart, at: int) -> list[int]:
    """The values that a result of the loop consists of."""
    pieces, stacked = apart.split.pieces, apart.split.body.stacked
    terms: list[Any] = (
        [p for piece in pieces[at] for p in piece]
        if at < len(pieces)
        else [stacked[at - len(pieces)]]
    )
    return [p for p in terms if isinstance(p, int)]
