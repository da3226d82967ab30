"""Sums that may stay partial on every device and become shards afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.annotate import MARK
from planner.graph.ir import SCALAR, Graph, Op, Phase, Role
from planner.graph.labels.roles import sums_gradient
from planner.rules.factor import FactorRule

STEPS = 8
"""Maximum number of operations between a gradient per example and the sum over the examples."""


def _of_each(graph: Graph, rules: Sequence[FactorRule], sum_: Op) -> bool:
    """Whether a sum adds up products of pairs of matrices, one per example or task, scaled or not:
    the dimensions that it sums over are those that number the pairs."""
    value, rule = sum_.inputs[0], rules[sum_.index]
    left = {f for dim in rule.results[0] for f in dim}
    along = {d for d, dim in enumerate(rule.operands[0]) if dim and not left.intersection(dim)}
    size = math.prod(graph.values[value].shape)
    for _ in range(STEPS):
        maker = graph.values[value].op
        if maker < 0:
            return False
        op, rule = graph.ops[maker], rules[maker]
        factors = {f for d in along for f in rule.results[op.outputs.index(value)][d]}
        if op.kind == "dot_general":
            pairs = ({f for dim in x for f in dim} for x in rule.operands)
            return bool(factors) and all(factors <= pair for pair in pairs)
        candidates = []
        for k, v in enumerate(op.inputs):
            if v != SCALAR and math.prod(graph.values[v].shape) == size:
                dims = {d for d, dim in enumerate(rule.operands[k]) if factors.intersection(dim)}
                candidates.append((graph.values[v].role is Role.GRADIENT, -k, v, dims))
        if not candidates:
            return False
        *_, value, along = max(candidates)
    return False


def sums_of_each(graph: Graph, rules: Sequence[FactorRule]) -> set[int]:
    """Sums that compute the gradient of a matrix from one gradient per example or task. They may
    stay partial and become shards, and compilers fuse the scaling of the addends into them."""
    shapes = {
        v.shape
        for v in map(graph.values.__getitem__, graph.state)
        if v.role is Role.PARAMETER and len(v.shape) > 1
    }
    return {
        op.outputs[0]
        for op in graph.ops
        if op.kind == "reduce_sum"
        and op.phase is not Phase.FORWARD
        and graph.values[op.outputs[0]].shape in shapes
        and _of_each(graph, rules, op)
    }


def sums_of_groups(graph: Graph) -> set[int]:
    """Sums that may stay partial and become shards, because only marks read them: sums of gradients
    and of results of loops (over groups of examples, ``planner.microbatch.rewrite``)."""
    sums = {
        op.outputs[0]
        for op in graph.ops
        if op.kind == "reduce_sum"
        and (maker := graph.values[op.inputs[0]].op) >= 0
        and (graph.ops[maker].kind == "loop_out" or sums_gradient(graph, op.outputs[0]))
    }
    if not sums:
        return sums
    marks = {v for op in graph.ops if op.kind == MARK for v in op.inputs}
    others = {v for op in graph.ops if op.kind != MARK for v in op.inputs}
    return sums & (marks - others - set(graph.outputs))
