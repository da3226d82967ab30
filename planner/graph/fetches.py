"""Arrays in host memory: which operations read which copy of them on the device, and when.

Such an array is copied to the device before an operation that reads it, and again before a later
reader if products run in between: between its uses it takes no device memory. Its new value is
copied back as soon as it is computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from planner.graph.ir import PRODUCTS, Graph

Span = tuple[int, int]
"""The first and the last operation that read one copy."""


def fetches(graph: Graph, live: Sequence[bool], values: Iterable[int]) -> dict[int, list[Span]]:
    """Per array, its copies to the device in a step. O(operations).

    Args:
        graph: the step.
        live: per operation, whether its results are used.
        values: inputs of the step.
    """
    out: dict[int, list[Span]] = {value: [] for value in values}
    products: list[int] = []
    for op in graph.ops:
        if not live[op.index]:
            continue
        for value in dict.fromkeys(i for i in op.inputs if i in out):
            spans = out[value]
            last = spans[-1][1] if spans else -1
            branches = spans and op.kind == graph.ops[last].kind == "branch_in"
            between = len(products) - bisect_left(products, last + 1) if spans else 0
            if spans and (branches or not between):
                spans[-1] = (spans[-1][0], op.index)
            else:
                spans.append((op.index, op.index))
        if op.kind in PRODUCTS:
            products.append(op.index)
    return out
