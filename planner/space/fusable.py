"""Which operations only pass dimensions along, so that their values share a decision."""

from __future__ import annotations

from planner.annotate import MARKS
from planner.graph.ir import Op
from planner.rules.factor import FactorRule

IDENTITY_BORDERS = frozenset({"loop_const", "loop_carry", "branch_in"}) | MARKS
"""Places where a value may change its sharding without being computed on."""

SHAPE_KEEPERS = frozenset(
    "broadcast_in_dim transpose reshape squeeze expand_dims copy iota loop_xs loop_ys loop_out "
    "branch_out convert_element_type reduce_precision optimization_barrier split_keys".split()
)


def is_fusable(op: Op, rule: FactorRule) -> bool:
    """Whether ``op`` only passes dimensions along, so that its values can share a decision."""
    if op.kind in IDENTITY_BORDERS or op.kind in ("loop_back", "loop_test"):
        return False
    if any(len(dim) > 1 for side in (rule.operands, rule.results) for v in side for dim in v):
        return False
    if op.kind in ("iota", "loop_xs", "loop_ys", "loop_out", "branch_out"):
        return True
    if any(rule.sizes[f] > 1 for f in rule.replicated):
        return False
    if rule.origin == "elementwise" or op.kind in SHAPE_KEEPERS:
        return not rule.reduction
    return op.kind.startswith("reduce_") or op.kind in ("argmax", "argmin")
