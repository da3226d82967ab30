"""Phases, roles and segments put on the operations and values of a traced step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from planner.graph.ir import Graph, Phase
from planner.graph.labels.blocks import repeated_blocks
from planner.graph.labels.phases import phases_of
from planner.graph.labels.roles import roles_of


def labelled(graph: Graph, named: Sequence[Phase | None]) -> Graph:
    """The graph with everything that this package tells of it.

    Args:
        graph: a traced step without labels.
        named: per operation, the phase that its name stack tells, if any.
    """
    phases, blocks = phases_of(graph, named), repeated_blocks(graph)
    segments = [(-1, 0)] * len(graph.ops)
    for number, block in enumerate(blocks):
        for copy in range(block.count):
            start = block.start + copy * block.length
            segments[start : start + block.length] = [(number, copy)] * block.length
    ops = tuple(
        op.labelled(phase, segment)
        for op, phase, segment in zip(graph.ops, phases, segments, strict=True)
    )
    return dataclasses.replace(graph, values=roles_of(graph, phases), ops=ops, blocks=blocks)
