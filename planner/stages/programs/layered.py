"""The step whose stages are programs of their own: what is planned, and how it is taken apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.graph.flat import FlatJaxpr, execute, flatten, looped
from planner.graph.jaxpr.places import user_line
from planner.graph.shapes import by_shapes
from planner.graph.trace import Traced, trace
from planner.stages.body import body_at, body_of
from planner.stages.errors import refused
from planner.stages.programs.homes import ALL, Homes, homes
from planner.stages.programs.numbers import body_start, operations
from planner.stages.programs.ranges import in_ranges
from planner.stages.programs.split import FORWARD, Split, split
from planner.stages.rewrite import with_call


@dataclass(frozen=True, eq=False)
class Apart:
    """A step taken apart.

    Attributes:
        flat: the step.
        at: which of its calls is the loop over microbatches.
        split: its body in tasks.
        homes: where the rest is done.
        starts: per call, by ``id``, the operation of the graph that it starts with.
    """

    flat: FlatJaxpr
    at: int
    split: Split
    homes: Homes
    starts: dict[int, int]


def taken_apart(traced: Traced, parts: int, count: int, weights: bool) -> Apart:
    """A step of ``layered`` in the programs of its stages.

    Args:
        traced: the step.
        parts: microbatches.
        count: stages.
        weights: whether the gradients of weights are tasks of their own.

    Raises:
        NoStagesError: see ``split``.
    """
    flat = flatten(traced.jaxpr).live()
    at = body_at(flat, parts)
    loop = flat.calls[at]
    body = body_of(loop)
    done = split(body, count, weights)
    found = operations(traced.jaxpr)
    first = found[loop.outs[0]] + body_start(loop.eqn)
    inside = operations(loop.eqn.params["jaxpr"])
    starts = {id(c): found[c.outs[0]] for c in flat.calls if c.outs}
    starts.update((id(c), first + inside[c.outs[0]]) for c in body.flat.calls if c.outs)
    return Apart(flat, at, done, homes(flat, at, done), starts)


def layered(
    function: Callable[..., Any], traced: Traced, args: Sequence[Any], parts: int, count: int
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """A step whose stages can be programs of their own, and lines that say what they are.

    Args:
        function: a step in microbatches, made for this (``microbatched(..., apart=True)``).
        traced: what it is for ``args``.
        args: its arguments, or ShapeDtypeStructs.
        parts: microbatches, two or more.
        count: stages.

    Raises:
        NoStagesError: it has too few blocks, or can't be split.
    """
    if parts == 1:
        raise refused("stages work on microbatches; ask for microbatches=2 or more")

    def made(traced: Traced) -> Callable[..., Any] | None:
        flat = flatten(traced.jaxpr).live()
        at = body_at(flat, parts)
        eqn = flat.calls[at].eqn
        program, cut = in_ranges(flatten(eqn.params["jaxpr"]).live(), count)
        loop = looped(eqn, functools.partial(execute, program))
        return with_call(flat, at, loop, traced) if cut else None

    first = made(traced)
    step = function
    if first is not None:
        step = by_shapes(
            function, args, first, lambda args: made(trace(function, args)) or function
        )
        traced = trace(step, args)
    return step, _lines(taken_apart(traced, parts, count, False))


def _lines(apart: Apart) -> tuple[str, ...]:
    """What each stage is, for the report."""
    split, where = apart.split, apart.homes
    out = []
    for stage in range(split.count):
        calls = split.tasks[FORWARD, stage].own
        places = [p for p in (user_line(c.eqn) for c in calls) if p]
        here = sum(p == stage for p in where.home)
        span = f"{places[0]} to {places[-1]}" if places else "no line of yours"
        out.append(f"{stage}: {len(calls)} operations, {span}; {here} arrays of the state")
    everywhere = sum(p == ALL for p in where.home)
    if everywhere:
        out.append(f"on all stages, or split over them: {everywhere} arrays of the state")
    return tuple(out)
