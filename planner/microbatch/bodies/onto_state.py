"""Separates sums over examples from the state that they are added to, such as counts of classes.

``table.at[rows].add(x)`` is the table plus a sum over examples. As one operation, it would add the
table again in each microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.graph.flat import Call, FlatJaxpr, execute, flatten
from planner.graph.trace import Traced

ADDS = frozenset({"scatter-add", "scatter_add", "scatter-sub", "scatter_sub"})


def added_apart(
    function: Callable[..., Any], whole: Traced, batch: Collection[int]
) -> Callable[..., Any] | None:
    """The step with such sums computed first and then added to the state; None if it has none.

    The results are equal up to rounding: the updates of a row are added up before they are added to
    it. Sums in loops, branches and rematerialized blocks are unchanged.

    Args:
        function: the step.
        whole: its trace for some arguments. Other arguments must have the same structure, and
            shapes that give the same operations.
        batch: the arguments that hold examples, by position.
    """
    if not _added(flatten(whole.jaxpr), batch):
        return None

    @functools.wraps(function)
    def step(*args: Any) -> Any:
        leaves = jax.tree_util.tree_leaves(args)
        closed, results = compat.make_jaxpr(function, args)
        flat = flatten(closed)
        positions = _added(flat, batch)
        calls = [
            call.running(functools.partial(_apart, call)) if k in positions else call
            for k, call in enumerate(flat.calls)
        ]
        out = execute(dataclasses.replace(flat, calls=tuple(calls)), leaves)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(results), out)

    return step


def _added(flat: FlatJaxpr, batch: Collection[int]) -> set[int]:
    """Positions of calls that add values computed from examples to values independent of them."""
    moving = {flat.inputs[k] for k in batch}
    zeros, positions = set[int](), set[int]()
    for k, call in enumerate(flat.calls):
        table, *rest = call.ins or (None,)
        if call.kind == "broadcast_in_dim" and not isinstance(table, int) and not table.val:
            zeros.update(call.outs)
        fed = not moving.isdisjoint(v for v in rest if isinstance(v, int))
        if fed and call.kind in ADDS and isinstance(table, int) and table not in moving | zeros:
            positions.add(k)
        if not moving.isdisjoint(v for v in call.ins if isinstance(v, int)):
            moving.update(call.outs)
    return positions


def _apart(call: Call, values: Sequence[Any]) -> list[Any]:
    """Add the updates of a call to zeros, and the result to its operand."""
    table, *rest = values
    with compat.provenance(call.origin):
        zeros = jnp.zeros_like(table)
    (rows,) = compat.evaluate_equation(call.eqn, [zeros, *rest], call.origin)
    with compat.provenance(call.origin):
        return [table + rows]
