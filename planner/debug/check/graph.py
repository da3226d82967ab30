"""Checks of the graph: ``Graph.verify``, values and their roles, regions, ties and blocks."""

from __future__ import annotations

import math

from planner.debug.check.layouts import demand, within
from planner.graph.ir import SCALAR, Graph, Role


def check_graph(graph: Graph) -> None:
    """Demand the invariants of a graph.

    Raises:
        InternalError: the operation, value, region or block at fault.
    """
    graph.verify()
    _values(graph)
    _regions(graph)
    _ties(graph)
    _blocks(graph)


def _values(graph: Graph) -> None:
    """Demand valid numbers and producers of values, and that they belong to inputs."""
    demand(
        len(graph.inputs) == len(graph.input_paths), "graph", "inputs and paths differ in number"
    )
    demand(
        len(graph.outputs) == len(graph.output_paths), "graph", "results and paths differ in number"
    )
    inputs = set(graph.inputs)
    demand(len(inputs) == len(graph.inputs), "graph", "a value is two inputs")
    for position, value in enumerate(graph.values):
        where = f"%{value.index} {value}"
        demand(value.index == position, where, f"stands at {position}")
        within(
            where, "produced by operation", [op for op in (value.op,) if op != -1], len(graph.ops)
        )
        if value.op >= 0:
            outputs = graph.ops[value.op].outputs
            demand(value.index in outputs, where, f"operation {value.op} does not make it")
        if value.of != -1:
            demand(value.of in inputs, where, f"{value.role} of %{value.of}, which is no input")
        elif value.role is Role.GRADIENT:
            demand(False, where, "a gradient of no input")


def _regions(graph: Graph) -> None:
    """Demand that regions come after their parents and run a finite number of times."""
    for position, region in enumerate(graph.regions):
        where = f"region {region.index} ({region.kind})"
        demand(region.index == position, where, f"stands at {position}")
        demand(region.parent < position, where, f"its parent is region {region.parent}")
        demand(
            region.weight >= 0 and math.isfinite(region.weight),
            where,
            f"runs {region.weight} times",
        )
    for op in graph.ops:
        within(f"operation {op.index} {op.kind}", "in region", (op.region,), len(graph.regions))


def _ties(graph: Graph) -> None:
    """Demand that ties join an input and a result of one shape, each at most once."""
    for i, o in graph.ties:
        where = f"tie of input {i} and result {o}"
        within(where, "input", (i,), len(graph.inputs))
        within(where, "result", (o,), len(graph.outputs))
        old, new = graph.values[graph.inputs[i]], graph.outputs[o]
        demand(old.carried, where, f"%{old.index} is not carried")
        if new != SCALAR:
            new_value = graph.values[new]
            demand(new_value.shape == old.shape, where, f"{old} becomes {new_value}")
    for side, what in ((0, "input"), (1, "result")):
        taken = [tie[side] for tie in graph.ties]
        demand(len(taken) == len(set(taken)), "ties", f"the same {what} twice")
    tied = {graph.inputs[i] for i, _ in graph.ties}
    loose = [v.index for v in graph.values if v.carried and v.index not in tied]
    demand(not loose, "ties", f"{loose} are carried and have no tie")


def _blocks(graph: Graph) -> None:
    """Demand that blocks are disjoint, segments match them, and the copies of a block are equal."""
    expected = [(-1, 0)] * len(graph.ops)
    for number, block in enumerate(graph.blocks):
        where = f"block {number}"
        demand(
            block.length > 0 and block.count > 1,
            where,
            f"{block.count} copies of {block.length} operations",
        )
        demand(
            block.start >= 0 and block.end <= len(graph.ops),
            where,
            f"operations {block.start} to {block.end - 1} of {len(graph.ops)}",
        )
        for at in range(block.start, block.end):
            demand(expected[at] == (-1, 0), where, f"operation {at} is in two blocks")
            expected[at] = (number, (at - block.start) // block.length)
            first = block.start + (at - block.start) % block.length
            kind, first_kind = graph.ops[at].kind, graph.ops[first].kind
            demand(
                kind == first_kind,
                where,
                f"operation {at} is {kind}, in the first copy {first_kind}",
            )
    for op, segment in zip(graph.ops, expected, strict=True):
        demand(
            op.segment == segment,
            f"operation {op.index} {op.kind}",
            f"in segment {op.segment}, by the blocks in {segment}",
        )
