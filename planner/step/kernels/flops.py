"""FLOPs of one operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from planner.graph.ir import RAGGED, Graph, Op
from planner.rules.factor import FactorRule
from planner.rules.kernels.inside import MASKED, MASKED_GRADIENT

MOVES = frozenset(
    "reshape transpose broadcast_in_dim squeeze expand_dims iota slice concatenate pad copy "
    "convert_element_type dynamic_slice dynamic_update_slice gather rev".split()
)


_CUBES: Mapping[str, Callable[[float, float], float]] = {
    "cholesky": lambda m, n: n**3 / 3,
    "cholesky_update": lambda m, n: 4 * n * n,
    "lu": lambda m, n: min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),
    **dict.fromkeys(
        ("qr", "geqrf", "geqp3", "householder_product"),
        lambda m, n: 2 * min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),
    ),
    "ormqr": lambda m, n: 4 * m * n * min(m, n),
    "hessenberg": lambda m, n: 10 * n**3 / 3,
    "tridiagonal": lambda m, n: 4 * n**3 / 3,
    "eigh": lambda m, n: 9 * n**3,
    "eig": lambda m, n: 25 * n**3,
    "schur": lambda m, n: 25 * n**3,
    "svd": lambda m, n: (
        4 * max(m, n) ** 2 * min(m, n) + 8 * max(m, n) * min(m, n) ** 2 + 9 * min(m, n) ** 3
    ),
}
"""FLOPs of a decomposition of an m by n matrix, vectors included: Golub and Van Loan, Matrix
Computations, 4th edition (4.2.5, 3.2.6, 5.2.1, 7.4.3, 8.3.1, 8.3.3, 7.5.6, figure 8.6.1)."""


def in_place(graph: Graph, op: Op) -> bool:
    """Whether an operation writes some rows of an array that no other operation reads: XLA leaves
    the other rows in place, also in loops."""
    return op.kind == "dynamic_update_slice" and op.inputs[0] in graph.read_once


def ragged_groups(graph: Graph, op: Op) -> int:
    """The number of groups of a ragged product."""
    return graph.values[op.inputs[2]].shape[-1]


def masked_operands(graph: Graph, op: Op) -> int:
    """The number of operands of a ragged product that are copied once per group if a compiler
    multiplies all rows by the matrices of all groups: the rows; for a gradient, both operands."""
    rows, result = (graph.values[v].shape for v in (op.inputs[0], op.outputs[0]))
    return 2 if len(result) > len(rows) else 1


def op_flops(graph: Graph, op: Op, rule: FactorRule) -> float:
    """FLOPs of one run of an operation, unsharded."""
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
    if kind in RAGGED:  # each row is multiplied by the matrix of its group
        first, second, result = (
            {f for dim in side for f in dim} for side in (*rule.operands[:2], rule.results[0])
        )
        return 2.0 * math.prod(ins[0]) * math.prod(rule.sizes[f] for f in (second & result) - first)
    if kind == "conv_general_dilated":
        # per output element, one multiply-add for each kernel element of its feature
        shared = {f for dim in rule.operands[1] for f in dim} & {
            f for dim in rule.results[0] for f in dim
        }
        features = math.prod(rule.sizes[f] for f in shared)
        return 2.0 * math.prod(outs[0]) * math.prod(ins[1]) / features
    if kind in MOVES:
        return 0.0
    if kind in _CUBES and len(ins[0]) > 1:
        return math.prod(ins[0][:-2]) * _CUBES[kind](*ins[0][-2:])
    if kind == "triangular_solve":  # one multiply-add per element of half of a matrix
        return float(math.prod(ins[1]) * ins[0][-1])
    if kind == "fft":
        return 5.0 * math.prod(ins[0]) * math.log2(max(2, ins[0][-1]))
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
