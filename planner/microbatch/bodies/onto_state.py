"""What examples add to rows of the state, such as counts of classes: written apart from the state.

``table.at[rows].add(x)`` is the table, plus a sum over examples. As one operation, each microbatch
would add the table again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.graph.flat import Call, FlatJaxpr, execute, flatten
from planner.graph.trace import Traced

ADDS = frozenset({"scatter-add", "scatter_add"})


def added_apart(function: Callable[..., Any], whole: Traced) -> Callable[..., Any] | None:
    """The step with sums over examples added to arrays that are no zeros behind these sums; None
    where there are none. ``whole``: its trace for some arguments; others must be of the same
    structure, and of shapes that make the same operations."""
    if not any(_adds(call, zeros) for call, zeros in _calls(flatten(whole.jaxpr))):
        return None

    @functools.wraps(function)
    def step(*args: Any) -> Any:
        leaves = jax.tree_util.tree_leaves(args)
        closed, tree = compat.make_jaxpr(function, args)
        flat = flatten(closed)
        calls = [
            call.running(functools.partial(_apart, call)) if _adds(call, zeros) else call
            for call, zeros in _calls(flat)
        ]
        program = FlatJaxpr(tuple(calls), flat.inputs, flat.outputs, flat.consts, flat.values)
        return jax.tree_util.tree_unflatten(
            jax.tree_util.tree_structure(tree), execute(program, leaves)
        )

    return step


def _calls(flat: FlatJaxpr) -> list[tuple[Call, set[int]]]:
    """The calls, each with the values that are zeros."""
    zeros = {
        call.outs[0]
        for call in flat.calls
        if call.kind == "broadcast_in_dim"
        and not isinstance(call.ins[0], int)
        and not call.ins[0].val
    }
    return [(call, zeros) for call in flat.calls]


def _adds(call: Call, zeros: set[int]) -> bool:
    return call.kind in ADDS and isinstance(call.ins[0], int) and call.ins[0] not in zeros


def _apart(call: Call, values: Sequence[Any]) -> list[Any]:
    """The rows of a call added to zeros, and these to its operand."""
    table, *rest = values
    with compat.provenance(call.origin):
        zeros = jnp.zeros_like(table)
    (rows,) = compat.evaluate_equation(call.eqn, [zeros, *rest], call.origin)
    with compat.provenance(call.origin):
        return [table + rows]
