"""Metrics that depend on all examples at once, such as a maximum, a median or a rank.

They are computed after the loop, from arrays with one row per example that the loop returns. A
metric that is neither a sum nor a mean over examples thus does not prevent microbatches. Values
that the gradients depend on stay in the loop, where an operation that mixes examples is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from planner import compat
from planner.graph.ir import Phase
from planner.graph.labels.phases import named_phase
from planner.microbatch.algebra import MAP, Class
from planner.microbatch.errors import CoupledError
from planner.microbatch.pairs import Node, Pair

EXTREMES = frozenset({"reduce_max", "reduce_min", "reduce_or", "reduce_and"})
"""Reductions that may be done in two parts: over the elements of an example, then over examples."""
LEAST_ROOM = 1 << 16
"""Bytes of rows that a figure may always read after the loop."""


@dataclass
class Figures:
    """The figures of a step.

    Attributes:
        room: bytes of examples that one figure may read after the loop: those of the batch itself,
            at least ``LEAST_ROOM``.
        errors: per value that is a figure, the error of the operation that mixes examples.
    """

    room: float
    errors: dict[int, CoupledError] = field(default_factory=dict)

    @staticmethod
    def of(step: Pair, batch: Sequence[int]) -> Figures:
        """No figures yet; ``batch``: positions of the inputs that hold examples."""
        nbytes = sum(_nbytes(step.avals[step.inputs[k]][0]) for k in batch)
        return Figures(max(float(nbytes), float(LEAST_ROOM)))

    def takes(self, step: Pair, node: Node, of: Mapping[int, Class], error: CoupledError) -> bool:
        """Whether an operation that mixes examples can run after the loop; records its results."""
        rows = {v for v in node.values if of[v] is MAP}
        nbytes = sum(_nbytes(step.avals[v][0]) for v in rows)
        backward = named_phase(node.names) is Phase.BACKWARD
        if backward or node.whole.effects or nbytes > self.room:
            return False
        self.errors.update(dict.fromkeys(node.outs, error))
        return True

    def follows(self, step: Pair, node: Node, of: Mapping[int, Class]) -> bool:
        """Whether an operation reads a figure; records its results, which are figures as well.

        Raises:
            CoupledError: gradients depend on the figure, or too many bytes of examples are read.
        """
        errors = [self.errors[v] for v in node.values if v in self.errors]
        if errors and not self.takes(step, node, of, errors[0]):
            raise errors[0]
        return bool(errors)


def in_two_parts(step: Pair) -> Pair:
    """The step with each reduction of ``EXTREMES`` over examples and other dimensions split in two:
    over the elements of each example, then over examples."""
    nodes: list[Node] = []
    avals = list(step.avals)
    changed = False
    for n in step.nodes:
        rows = step.scaled(n.values[0]) if n.name in EXTREMES and n.values else []
        axes = tuple(n.whole.params.get("axes", ())) if rows else ()
        if len(rows) != 1 or rows[0] not in axes or len(axes) == 1:
            nodes.append(n)
            continue
        changed = True
        first = tuple(a for a in axes if a != rows[0])
        second = (rows[0] - sum(a < rows[0] for a in first),)
        value = len(avals)
        parts = [_both(n, eqn, first, second) for eqn in (n.whole, n.small)]
        (whole, last), (small, small_last) = parts
        avals.append((whole.outvars[0].aval, small.outvars[0].aval))
        nodes.append(replace(n, whole=whole, small=small, outs=(value,)))
        nodes.append(replace(n, whole=last, small=small_last, ins=(value,)))
    return replace(step, nodes=nodes, avals=avals) if changed else step


def _both(node: Node, eqn: Any, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[Any, Any]:
    """The two equations that replace a reduction."""
    reduce = {
        "reduce_max": jax.lax.reduce_max,
        "reduce_min": jax.lax.reduce_min,
        "reduce_or": jax.lax.reduce_or,
        "reduce_and": jax.lax.reduce_and,
    }[node.name]
    aval = eqn.invars[0].aval
    struct = jax.ShapeDtypeStruct(compat.aval_shape(aval), aval.dtype)
    jaxpr = jax.make_jaxpr(lambda x: reduce(reduce(x, first), second))(struct).jaxpr
    one, two = (e.replace(source_info=eqn.source_info) for e in jaxpr.eqns)
    return one, two


def _nbytes(aval: Any) -> int:
    return math.prod(compat.aval_shape(aval)) * compat.itemsize(aval)
