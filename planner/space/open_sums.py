"""Which sums may stay parts on every device, which become shards behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.annotate import MARK
from planner.graph.ir import SCALAR, Graph, Phase, Role
from planner.graph.labels.roles import sums_gradient
from planner.rules.factor import FactorRule

STEPS = 8
"""Operations between a gradient per example and the sum over the examples."""


def _of_each(graph: Graph, rules: Sequence[FactorRule], value: int) -> bool:
    """Whether a value is a product of pairs of matrices, one per example or task, scaled or not."""
    size = math.prod(graph.values[value].shape)
    for _ in range(STEPS):
        made = graph.values[value].op
        if made < 0:
            return False
        op, rule = graph.ops[made], rules[made]
        if op.kind == "dot_general":
            factors = [{f for dim in x for f in dim} for x in (*rule.operands, *rule.results)]
            return bool(set.intersection(*factors))
        alike = [v for v in op.inputs if v != SCALAR]
        alike = [v for v in alike if math.prod(graph.values[v].shape) == size]
        if not alike:
            return False
        value = max(alike, key=lambda v: graph.values[v].role is Role.GRADIENT)
    return False


def open_sums(graph: Graph, rules: Sequence[FactorRule]) -> set[int]:
    """Sums that may stay parts, which become shards: of gradients, and of what a loop leaves, where
    a mark alone reads them (gradients of groups of examples, ``planner.microbatch.rewrite``); and
    those that make the gradient of a matrix from one per example, or per task."""
    shapes = {
        v.shape
        for v in map(graph.values.__getitem__, graph.state)
        if v.role is Role.PARAMETER and len(v.shape) > 1
    }
    matrices = {
        op.outputs[0]
        for op in graph.ops
        if op.kind == "reduce_sum"
        and op.phase is not Phase.FORWARD
        and graph.values[op.outputs[0]].shape in shapes
        and _of_each(graph, rules, op.inputs[0])
    }
    found = {
        op.outputs[0]
        for op in graph.ops
        if op.kind == "reduce_sum"
        and (made := graph.values[op.inputs[0]].op) >= 0
        and (graph.ops[made].kind == "loop_out" or sums_gradient(graph, op.outputs[0]))
    }
    if not found:
        return matrices
    marks = {v for op in graph.ops if op.kind == MARK for v in op.inputs}
    others = {v for op in graph.ops if op.kind != MARK for v in op.inputs}
    return matrices | found & (marks - others - set(graph.outputs))
