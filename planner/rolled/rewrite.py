"""Rolls an unrolled step into loops: the same operations, with one row of a stack per block.

Its arguments and results have a stack in place of the leaves of equal blocks. The rolled step is
only planned, not run: it hardly changes how recipes compare, and it has a hundredth of the
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from planner import compat
from planner.errors import MeshwrightError, RequestError
from planner.graph.shapes import by_shapes
from planner.graph.trace import Traced, trace
from planner.rolled.form import Form
from planner.rolled.layout import layout_of

LEAST_CALLS = 1500
"""Fewest operations of a program that takes long to plan."""
COVERED = 0.8
"""Smallest share of them that must be in loops."""
MOVED = 0.02
"""Most bytes to move in and out of stacks, relative to those of arguments and stacks."""


@dataclass(frozen=True)
class Rolled:
    """A step of loops.

    Attributes:
        function: the step, a function of ``args``.
        args: its arguments as ShapeDtypeStructs.
        repeats: what the largest loops repeat, in words.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    repeats: str


def rolled(function: Callable[..., Any], traced: Traced, args: Sequence[Any]) -> Rolled | None:
    """The step with its equal blocks in loops; None if it is small, or if loops contain too little
    of it.

    Args:
        function: the step.
        traced: its trace for ``args``.
        args: its arguments, or ShapeDtypeStructs.
    """
    flat = traced.flat
    if len(flat.calls) < LEAST_CALLS or not traced.in_paths:
        return None
    layout = layout_of(flat, traced.in_paths, MOVED)
    if layout.covered < COVERED or layout.moved_share > MOVED:
        return None
    form = Form(layout, traced)
    structs = [compat.as_struct(aval) for aval in traced.jaxpr.in_avals]
    form_args = form.args(structs)

    def other(given: Sequence[Any]) -> Callable[..., Any]:
        """The step for other shapes, of a batch of another size."""
        leaves = list(structs)
        for position, leaf in form.leaves(given).items():
            leaves[position] = leaf
        again = trace(function, jax.tree_util.tree_unflatten(traced.in_tree, leaves), traced)
        if [c.kind for c in again.flat.calls] != [c.kind for c in flat.calls]:
            raise RequestError("with a batch of another size the step is another program")
        return form.program(again.flat)

    first = form.program(flat)
    step = by_shapes(first, form_args, first, other)
    try:
        trace(step, form_args)
    except MeshwrightError:  # for example, the type of a carry changes
        return None
    return Rolled(step, form_args, layout.repeats)
