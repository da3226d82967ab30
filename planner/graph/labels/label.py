"""Labels the operations and values of a traced step with phases, roles and segments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from planner.graph.ir import Graph, Phase, Role
from planner.graph.labels.blocks import repeated_blocks
from planner.graph.labels.examples import (
    fed_beside_state,
    frozen_inputs,
    is_ambiguous,
    may_be_fed,
    maybe_examples,
    state_examples,
    with_roles,
)
from planner.graph.labels.phases import phases_of
from planner.graph.labels.roles import roles_of
from planner.graph.labels.untrained import may_be_untrained, untrained_roles
from planner.rules.factor import FactorRule


def labelled(graph: Graph, named: Sequence[Phase | None]) -> Graph:
    """The graph with phases, roles and segments.

    Args:
        graph: a traced step without labels.
        named: per operation, the phase in its name stack, if any.
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


def by_dimensions(graph: Graph, rules: Callable[[], Sequence[FactorRule]]) -> Graph:
    """The graph with the roles that follow from dimensions: which arguments are frozen weights,
    which hold examples.

    Args:
        graph: with labels.
        rules: returns the rules, one per operation; called only if they are needed.
    """
    if may_be_untrained(graph) and (roles := untrained_roles(graph, rules())):
        return with_roles(graph, roles)
    if may_be_fed(graph):
        graph = with_roles(graph, dict.fromkeys(fed_beside_state(graph, rules()), Role.BATCH))
    if is_ambiguous(graph):
        graph = with_roles(graph, dict.fromkeys(frozen_inputs(graph, rules()), Role.FROZEN))
    if maybe_examples(graph):
        graph = with_roles(graph, dict.fromkeys(state_examples(graph, rules()), Role.EXAMPLES))
    return graph
