"""Errors for operations that prevent a step from being cut into microbatches."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from planner import compat
from planner.microbatch.errors import CoupledError, NotExactError
from planner.microbatch.pairs import Node, Number, Pair

MOST_SHOWN = 6
"""Most shapes of an operation that a message shows."""
WRITES = frozenset("dynamic_update_slice scatter scatter-add scatter_add".split())
"""Operations that write rows to an array."""
INDEXED = WRITES | {"gather", "dynamic_slice"}
"""Operations that select rows by index."""
VIEWS = frozenset("transpose reshape squeeze expand_dims convert_element_type".split())
"""Operations whose result has the same elements as their operand."""
TAKES, COUNTS = frozenset({"slice", "dynamic_slice"}), frozenset({"iota"})
"""Operations that take some of the examples, and operations that number them."""


def by_number(pair: Pair, node: Node, fed: Set[int]) -> bool:
    """Whether an operation selects examples by indices from the batch, or from a start index. These
    select other examples in a microbatch. Permutations are computed within the microbatch."""
    if node.name not in INDEXED:
        return False
    table, numbers = node.ins[:2]
    if isinstance(table, Number) or not pair.scaled(table):
        return False
    return node.name.startswith("dynamic") or (isinstance(numbers, int) and numbers in fed)


def coupled(node: Node, why: str) -> CoupledError:
    """The error for an operation that makes examples depend on each other, with what would help."""
    mixes = why.startswith(("mixes", "may mix", "reduces"))
    helps = "write the loss as a sum or mean over examples" if mixes else ""
    if mixes and "jvp" not in node.names:  # such as a metric
        helps = "return one number per example, or a sum or mean of them"
    if node.name in WRITES:
        helps = "write what examples make to a table or queue behind the step, from its results"
    elif why.startswith("computes") and _counts(node):
        helps = "select no other examples of the batch by number, if that is what it is for"
    elif node.name == "sort":
        helps = "order or shuffle the examples before the step"
    return CoupledError(node.line or node.name, _place(node, why), helps, operands=node.values)


def taken_for_batch(pair: Pair, batch: Set[int], operands: tuple[int, ...]) -> tuple[int, ...]:
    """Positions of the batch's arguments that an operation reads unchanged, together with a value
    that is no such argument. They may not hold examples, such as a frozen matrix whose number of
    rows equals the batch size."""
    makers = {o: n for n in pair.nodes for o in n.outs}
    positions = {v: k for k, v in enumerate(pair.inputs) if k in batch}

    def argument(value: int) -> int | None:
        while (n := makers.get(value)) is not None and n.name in VIEWS and n.values:
            value = n.values[0]
        return positions.get(value)

    arguments = [argument(v) for v in operands]
    if None not in arguments:
        return ()
    return tuple(sorted({k for k in arguments if k is not None}))


def of_some(node: Node, size: int, examples: int) -> str:
    """Text for an operation that makes another number of examples, with what would help."""
    if size < examples and node.name in TAKES | COUNTS:
        what = "takes" if node.name in TAKES else "counts"
        return (
            f"{what} {size} of {examples} examples; give each example a weight in the batch, 0 for "
            "those that do not count"
        )
    return (
        f"makes groups of several examples: {size} of {examples}; to keep them together, pass each "
        "group as one example, in a dimension of its own"
    )


def _counts(node: Node) -> bool:
    """Whether an operation computes integers."""
    return all(np.dtype(v.aval.dtype).kind in "iu" for v in node.whole.outvars)


def refused(node: Node, why: str) -> NotExactError:
    """The error for an operation that can't run in a microbatch."""
    return NotExactError(
        f"this step can't be cut into microbatches: {_place(node, why)}; leave microbatches= out"
    )


def _place(node: Node, why: str) -> str:
    shapes = [str(compat.aval_shape(v.aval)) for v in (*node.whole.invars, *node.whole.outvars)]
    shapes = shapes if len(shapes) <= MOST_SHOWN else [*shapes[:MOST_SHOWN], "..."]
    where = "".join(f"{x}: " for x in (node.line or node.names,) if x)
    return f"{where}{node.name} of {', '.join(shapes)} {why}"
