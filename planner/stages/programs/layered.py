"""A step whose stages are separate programs: the step that is planned, and how it is split."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from costmodels.orders import Order, OrderError, chunks_of, named_order, order_of_rows
from planner.errors import RequestError
from planner.graph.flat import Call, FlatJaxpr, execute, flatten, looped
from planner.graph.jaxpr.places import user_line
from planner.graph.jaxpr.walk import loop_of
from planner.graph.shapes import by_shapes
from planner.graph.trace import Traced, trace
from planner.spec import Recipe
from planner.stages.body import Body, body_at, body_of, depends
from planner.stages.errors import refused
from planner.stages.programs.cuts import named_begins
from planner.stages.programs.homes import ALL, Homes, homes
from planner.stages.programs.numbers import body_start, operations
from planner.stages.programs.ranges import in_ranges
from planner.stages.programs.split import FORWARD, Split, balanced, passes_of, split
from planner.stages.rewrite import with_call


@dataclass(frozen=True, eq=False)
class Apart:
    """A step split into the programs of its stages.

    Attributes:
        flat: the step.
        at: the index of the call that is the loop over microbatches.
        split: its body, split into tasks.
        homes: where the rest of the step runs.
        ops: per call, by ``id``, its operations in the graph.
        cuts: per stage, the operation that its forward pass begins with.
    """

    flat: FlatJaxpr
    at: int
    split: Split
    homes: Homes
    ops: dict[int, range]
    cuts: tuple[int, ...]

    @property
    def starts(self) -> dict[int, int]:
        """Per call, by ``id``, the first of its operations."""
        return {call: span.start for call, span in self.ops.items()}


def taken_apart(
    traced: Traced,
    parts: int,
    count: int,
    weights: bool,
    cuts: Sequence[int] = (),
    seconds: Callable[[int], float] | None = None,
    manual: Sequence[tuple[str, int]] = (),
) -> Apart:
    """Split a step of ``layered`` into the programs of its stages.

    Args:
        traced: the step.
        parts: number of microbatches.
        count: number of stages.
        weights: whether the gradients of weights are separate tasks.
        cuts: per stage, the operation of the graph that its forward pass begins with; empty:
            stages that take about the same time.
        seconds: the time of a call's operations, given the first of them; None: by FLOPs.
        manual: (pattern, stage), instead of stages that take about the same time.

    Raises:
        NoStagesError: see ``balanced`` and ``named_begins``.
    """
    flat = traced.flat
    at = body_at(flat, parts)
    loop = flat.calls[at]
    body = body_of(loop)
    outside = operations(traced.jaxpr)
    first = outside[loop.outs[0]].start + body_start(loop.eqn)
    inside = operations(loop.eqn.params["jaxpr"])
    ops = {id(c): outside[c.outs[0]] for c in flat.calls if c.outs}
    added = [c for calls in body.sums for c in calls]
    for calls, pieces in zip(body.sums, body.summed, strict=True):
        for c in calls:  # a conversion of each part has the position of the original
            if c.kind == "convert_element_type":
                inside.update((v, inside[c.outs[0]]) for v in pieces)
    for c in (*body.flat.calls, *added):
        if c.outs:
            ops[id(c)] = _behind(inside[c.outs[0]], first)
    starts = {call: span.start for call, span in ops.items()}
    passes = passes_of(body)
    if cuts:
        order = [starts[id(c)] for c in passes.ahead]
        begins = [bisect.bisect_left(order, op) for op in cuts]
    elif manual:
        begins = named_begins(_labels(traced, flat, body, loop, passes.ahead), manual)
    elif seconds is not None:
        spent = seconds
        begins = balanced(body, passes, count, lambda c: spent(starts[id(c)]))
    else:
        begins = balanced(body, passes, count)
    done = split(body, passes, begins, weights)
    here = tuple(starts[id(passes.ahead[k])] for k in begins)
    return Apart(flat, at, done, homes(flat, at, done), ops, here)


def _labels(
    traced: Traced, flat: FlatJaxpr, body: Body, loop: Call, calls: Sequence[Call]
) -> list[list[str]]:
    """Per call, its line and the paths of the step's arguments that it reads, directly or through
    calls that do not depend on the batch."""
    inside, _, _ = body.loop.split(body.flat.inputs)
    outside, _, _ = body.loop.split(loop.ins)
    paths: dict[int, set[str]] = {
        v: {path} for v, path in zip(flat.inputs, traced.graph.input_paths, strict=True)
    }
    for c in flat.calls:
        if c is loop:
            break
        known = set().union(*(paths.get(v, ()) for v in c.ins if isinstance(v, int)))
        paths.update((v, known) for v in c.outs)
    within = {v: paths.get(u, set()) for v, u in zip(inside, outside, strict=True) if _int(u)}
    for c in body.flat.calls:
        if not body.batch.intersection(c.outs):
            known = set().union(*(within.get(v, ()) for v in c.ins if isinstance(v, int)))
            within.update((v, known) for v in c.outs)
    out = []
    for c in calls:
        line = user_line(c.eqn)
        read = set().union(*(within.get(v, ()) for v in c.ins if isinstance(v, int)))
        out.append([*([line] if line else []), *sorted(read)])
    return out


def _int(v: Any) -> bool:
    return isinstance(v, int)


def _behind(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)


def layered(
    function: Callable[..., Any],
    traced: Traced,
    args: Sequence[Any],
    recipe: Recipe,
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """A step whose stages can be separate programs, and lines that describe the stages.

    Args:
        function: a step in microbatches, made for this (``microbatched(..., apart=True)``).
        traced: its trace for ``args``.
        args: its arguments, or ShapeDtypeStructs.
        recipe: with two microbatches or more, stages and a schedule. Scans over layers are cut
            into one part per stage. For a recipe with cuts, the lines are empty.

    Raises:
        NoStagesError: the step has too few blocks, or can't be split.
    """
    parts, count = recipe.microbatches, recipe.stages
    if parts == 1:
        raise refused("stages work on microbatches; ask for microbatches=2 or more")

    def staged(traced: Traced) -> Callable[..., Any] | None:
        flat = traced.flat
        at = body_at(flat, parts)
        eqn = flat.calls[at].eqn
        inner = flatten(eqn.params["jaxpr"]).live()
        batch = depends(inner.calls, loop_of(eqn).split(inner.inputs)[2])
        program, cut = in_ranges(inner, count, batch)
        loop = looped(eqn, functools.partial(execute, program))
        return with_call(flat, at, loop, traced) if cut else None

    first = staged(traced)
    step = function
    if first is not None:
        step = by_shapes(
            function, args, first, lambda args: staged(trace(function, args)) or function
        )
        traced = trace(step, args)
    if recipe.cuts:
        return step, ()
    count = chunk_count(recipe)
    return step, stage_lines(taken_apart(traced, parts, count, False, manual=recipe.manual))


def chunk_count(recipe: Recipe) -> int:
    """The number of chunks that the layers are cut into."""
    if recipe.order:
        return len(order_of_rows(recipe.schedule, recipe.order).place)
    return recipe.stages * chunks_of(recipe.schedule)


def order_of(recipe: Recipe) -> Order:
    """The schedule of a plan.

    Raises:
        RequestError: it does not support these numbers of stages and microbatches.
    """
    name, stages, parts = recipe.schedule, recipe.stages, recipe.microbatches
    try:
        if not recipe.order:
            return named_order(name, stages, parts)
        order = order_of_rows(name, recipe.order)
        if (len(order.devices), order.microbatches) != (stages, parts):
            raise OrderError(
                f"schedule {name!r} is one of {len(order.devices)} stages and "
                f"{order.microbatches} microbatches, not of {stages} and {parts}"
            )
        return order
    except OrderError as error:
        raise RequestError(str(error)) from None


def stage_lines(apart: Apart) -> tuple[str, ...]:
    """Lines that describe each stage, for the report."""
    split, where = apart.split, apart.homes
    out = []
    for stage in range(split.count):
        calls = split.tasks[FORWARD, stage].own
        places = [p for p in (user_line(c.eqn) for c in calls) if p]
        here = sum(p == stage for p in where.home)
        span = " to ".join(dict.fromkeys((places[0], places[-1]))) if places else "no line of yours"
        out.append(f"{stage}: {len(calls)} operations, {span}; {here} arrays of the state")
    everywhere = sum(p == ALL for p in where.home)
    if everywhere:
        out.append(f"on all stages, or split over them: {everywhere} arrays of the state")
    sent = {
        (v, reader)
        for v, (kind, _), (reading, reader) in split.moves
        if kind == FORWARD != reading and v not in split.tasks[FORWARD, reader].ins
    }
    if sent:
        out.append(
            f"{len(sent)} results of forward passes are sent to the backward pass of another stage"
        )
    return tuple(out)
