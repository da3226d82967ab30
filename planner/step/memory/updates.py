"""Gradients that XLA:TPU makes and uses in one kernel: the product also computes the update.

Such a gradient is not written. Its kernel holds tiles of the parameter and of its moments, old and
new, beside those of the gradient. It reads its smaller operand once if that fits into the fast
memory of the core; if not, it takes twice as long as the product and the update in sequence:
docs/explanation/decisions/022-what-is-sent.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.graph.ir import PRODUCTS, Graph, Op, Phase
from planner.space.groups import GroupLink, Groups
from planner.step.memory.liveness import PASSES

ACROSS = ("reduce_", "arg", "loop_", "branch_")
"""Prefixes of kinds of operations that need a whole array or leave a region."""


def gradients_in_updates(
    graph: Graph,
    groups: Groups,
    live: Sequence[bool],
    sent: Callable[[GroupLink], bool],
) -> frozenset[int]:
    """Results of products that only an update reads, with no collective between.

    Args:
        graph: the step.
        groups: its groups.
        live: per operation, whether its results are used.
        sent: whether a link has a collective, if a plan is known.
    """
    away = {x.value for x in groups.links if x.operand <= -2 and sent(x)}
    root: dict[int, int] = {}
    behind: dict[int, frozenset[int]] = {}  # per value, the gradients that it is computed from
    written: set[int] = set()
    nothing: frozenset[int] = frozenset()
    for op in graph.ops:
        if not live[op.index]:
            continue
        if op.kind in PRODUCTS and op.outputs[0] not in away:
            root[op.outputs[0]] = op.outputs[0]
            behind[op.outputs[0]] = frozenset({op.outputs[0]})
            continue
        made_of = nothing.union(*(behind.get(i, nothing) for i in op.inputs))
        if not made_of:
            continue
        within = groups.fusable[op.index] and not op.kind.startswith(ACROSS)
        if op.kind in ("transpose", "convert_element_type") and op.inputs[0] in root:
            root[op.outputs[0]] = root[op.inputs[0]]
        elif not within or op.kind in PASSES or not _in_update(op, made_of):
            written.update(made_of)
            continue
        for o in op.outputs:
            behind[o] = made_of
    written.update(root[o] for o in graph.outputs if o in root)
    return frozenset(root.values()) - written


def _in_update(op: Op, gradients: frozenset[int]) -> bool:
    """Whether an operation that reads gradients runs with an update: it is a part of one, or adds
    what other operations contribute to a gradient, such as those of a table that is also the
    weights of a product."""
    adds = op.kind in ("add_any", "convert_element_type")
    return op.phase is Phase.UPDATE or (adds and len(gradients) == 1)
