"""Rewrites a step with its layers in pipeline stages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from planner.graph.flat import FlatJaxpr, Run, execute, flatten, looped
from planner.graph.shapes import by_shapes
from planner.graph.trace import Traced, trace
from planner.stages.body import Body, body_at, body_of
from planner.stages.chains.chain import Chain
from planner.stages.chains.evened import evened
from planner.stages.chains.groups import group_chain
from planner.stages.chains.scans import scan_chain
from planner.stages.errors import NoStagesError, refused
from planner.stages.parts import parts_of
from planner.stages.passed import passed_along
from planner.stages.ticks import Pipeline

UNEQUAL = 'With schedule="1f1b" each stage is a program of its own, and need not be equal to others'
"""Hint if the stages can't share one program."""


def staged(
    function: Callable[..., Any], traced: Traced, args: Sequence[Any], parts: int, count: int
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """A step that computes the same as ``function``, with its layers in stages.

    Args:
        function: a step in microbatches, made for this (``microbatched(..., apart=True)``).
        traced: its trace for ``args``.
        args: its arguments, or ShapeDtypeStructs.
        parts: number of microbatches, two or more.
        count: number of stages.

    Returns:
        A function of the same arguments, which is rewritten again for other shapes, and a line that
        describes the stages; no line if ``count`` is 1.

    Raises:
        NoStagesError: the step has no chain of ``count`` equal stages.
    """
    if count == 1:
        return function, ()
    if parts == 1:
        raise refused("stages work on microbatches; ask for microbatches=2 or more")

    def staged(traced: Traced, args: Sequence[Any]) -> tuple[Callable[..., Any], str]:
        flat = traced.flat
        at = body_at(flat, parts)
        even = evened(flatten(flat.calls[at].eqn.params["jaxpr"]).live(), count)
        if even is not None:
            program, left = even
            loop = looped(flat.calls[at].eqn, functools.partial(execute, program))
            step, what = staged(trace(with_call(flat, at, loop, traced), args), args)
            return step, f"{what}; {left} more behind the last"
        body = body_of(flat.calls[at])
        try:
            chain = _chain(body, count)
            rest = parts_of(body, chain)
        except NoStagesError as error:
            raise NoStagesError(f"{error}. {UNEQUAL}") from None
        pipeline = Pipeline(body, passed_along(body, chain, rest), rest, count, parts)
        return with_call(flat, at, pipeline.run, traced), chain.what

    first, line = staged(traced, args)
    step = by_shapes(function, args, first, lambda args: staged(trace(function, args), args)[0])
    return step, (line,)


def _chain(body: Body, count: int) -> Chain:
    """The chain of a loop's body: from a scan, or else from written-out layers."""
    first: NoStagesError | None = None
    for find in (scan_chain, group_chain):
        try:
            chain = find(body, count)
        except NoStagesError as error:
            first = first or error
            continue
        if chain is not None:
            return chain
    raise first or refused("it has no repeated layers with a backward pass")


def with_call(flat: FlatJaxpr, at: int, run: Run, traced: Traced) -> Callable[..., Any]:
    """The step, with ``run`` computing one of its calls."""
    calls = list(flat.calls)
    calls[at] = calls[at].running(run)
    program = dataclasses.replace(flat, calls=tuple(calls))

    def step(*args: Any) -> Any:
        leaves = execute(program, jax.tree_util.tree_leaves(args))
        return jax.tree_util.tree_unflatten(traced.out_tree, leaves)

    return step
