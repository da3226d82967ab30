"""Flop of one operation."""

from __future__ import annotations

import math

from planner.graph.ir import RAGGED, Graph, Op
from planner.rules.factor import FactorRule
from planner.rules.kernels.inside import MASKED, MASKED_GRADIENT

MOVES = frozenset(
    "reshape transpose broadcast_in_dim squeeze expand_dims iota slice concatenate pad copy "
    "convert_element_type dynamic_slice dynamic_update_slice gather rev".split()
)


def in_place(graph: Graph, op: Op) -> bool:
    """Whether an operation writes some rows of an array that nobody else reads: XLA leaves the
    others where they are, in loops too."""
    return op.kind == "dynamic_update_slice" and op.inputs[0] in graph.read_once


def ragged_groups(graph: Graph, op: Op) -> int:
    """How many groups a ragged product has."""
    return graph.values[op.inputs[2]].shape[-1]


def masked_operands(graph: Graph, op: Op) -> int:
    """How many operands of a ragged product are copied once per group where a compiler multiplies
    all rows by the matrices of all groups: the rows; of a gradient both operands."""
    rows, made = (graph.values[v].shape for v in (op.inputs[0], op.outputs[0]))
    return 2 if len(made) > len(rows) else 1


def op_flops(graph: Graph, op: Op, rule: FactorRule) -> float:
    """Flop of one run of an operation, unsharded."""
    if op.work:
        return sum(flops for kind, flops, _ in op.work if kind not in (MASKED, MASKED_GRADIENT))
    values = graph.values
    return _flops(
        op.kind,
        rule,
        [values[o].shape for o in op.outputs],
        [values[i].shape for i in op.inputs if i >= 0],
    )


def _flops(
    kind: str, rule: FactorRule, outs: list[tuple[int, ...]], ins: list[tuple[int, ...]]
) -> float:
    if kind == "dot_general":
        return 2.0 * math.prod(rule.sizes)
    if kind in RAGGED:  # each row meets the matrix of its group
        first, second, made = (
            {f for dim in side for f in dim} for side in (*rule.operands[:2], rule.results[0])
        )
        return 2.0 * math.prod(ins[0]) * math.prod(rule.sizes[f] for f in (second & made) - first)
    if kind == "conv_general_dilated":
        # per output element, one multiply-add for each kernel element of its feature
        shared = {f for dim in rule.operands[1] for f in dim} & {
            f for dim in rule.results[0] for f in dim
        }
        features = math.prod(rule.sizes[f] for f in shared)
        return 2.0 * math.prod(outs[0]) * math.prod(ins[1]) / features
    if kind in MOVES:
        return 0.0
    size = max((math.prod(s) for s in (*outs, *ins)), default=0)
    return float(size)


def extents(rule: FactorRule) -> tuple[int, int, int]:
    """(m, n, k) of a product, without its batch dimensions."""
    left, right, out = (
        {f for dim in side for f in dim}
        for side in (rule.operands[0], rule.operands[1], rule.results[0])
    )

    def size(factors: set[int]) -> int:
        return math.prod(rule.sizes[f] for f in factors)

    return size((left & out) - right), size((right & out) - left), size((left & right) - out)
