"""The step with its layers in pipeline stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from planner.graph.flat import execute, flatten
from planner.graph.shapes import by_shapes
from planner.graph.trace import Traced, trace
from planner.stages.body import body_at, body_of
from planner.stages.chains.groups import group_chain
from planner.stages.chains.scans import scan_chain
from planner.stages.errors import refused
from planner.stages.parts import parts_of
from planner.stages.passed import passed_along
from planner.stages.ticks import Pipeline


def staged(
    function: Callable[..., Any], traced: Traced, args: Sequence[Any], parts: int, count: int
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """A step that computes what ``function`` does, its layers in stages.

    Args:
        function: a step in microbatches, made for this (``microbatched(..., apart=True)``).
        traced: what it is for ``args``.
        args: its arguments, or ShapeDtypeStructs.
        parts: microbatches, two or more.
        count: stages.

    Returns:
        A function of the same arguments (those of other shapes are rewritten anew), and a line that
        says what the stages are; none where ``count`` is 1.

    Raises:
        NoStagesError: it has no chain of that many equal stages.
    """
    if count == 1:
        return function, ()
    if parts == 1:
        raise refused("stages work on microbatches; ask for microbatches=2 or more")

    def made(traced: Traced) -> tuple[Callable[..., Any], str]:
        flat = flatten(traced.jaxpr).live()
        at = body_at(flat, parts)
        body = body_of(flat.calls[at])
        chain = scan_chain(body, count) or group_chain(body, count)
        if chain is None:
            raise refused("it has no repeated layers with a backward pass")
        rest = parts_of(body, chain)
        pipeline = Pipeline(body, passed_along(body, chain, rest), rest, count, parts)
        calls = list(flat.calls)
        calls[at] = calls[at].running(pipeline.run)
        program = dataclasses.replace(flat, calls=tuple(calls))

        def step(*args: Any) -> Any:
            leaves = execute(program, jax.tree_util.tree_leaves(args))
            return jax.tree_util.tree_unflatten(traced.out_tree, leaves)

        return step, chain.what

    first, line = made(traced)
    return by_shapes(function, args, first, lambda args: made(trace(function, args))[0]), (line,)
