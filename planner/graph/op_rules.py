"""The factor rule of every operation of a graph."""

from __future__ import annotations

from collections.abc import Sequence

from planner.annotate import MARKS
from planner.graph.ir import Graph
from planner.rules.borders import border_rule
from planner.rules.factor import FactorRule
from planner.rules.key import EqnKey
from planner.rules.registry import rules_for


def op_rules(graph: Graph, eqns: Sequence[EqnKey | None]) -> tuple[FactorRule, ...]:
    """One factor rule per operation: ``border_rule`` for borders, the registry for the rest, once
    for equal operations.

    Args:
        graph: a traced step.
        eqns: a key per operation, None for borders.
    """
    keys_by_op: dict[int, EqnKey] = {}
    alike: list[int] = []  # per operation, the one whose rule it has
    first: dict[int, int] = {}
    for op, eqn, code in zip(graph.ops, eqns, graph.codes, strict=True):
        by_code = eqn is None or bool(op.attrs) or not eqn.params  # the code covers the parameters
        at = first.setdefault(code, op.index) if by_code else op.index
        alike.append(at)
        if at == op.index and eqn is not None and op.kind not in MARKS:
            keys_by_op[at] = eqn
    known = dict(zip(keys_by_op, rules_for(list(keys_by_op.values())), strict=True))
    for op, at in zip(graph.ops, alike, strict=True):
        if at == op.index and at not in known:
            ins = [graph.values[i].shape if i >= 0 else () for i in op.inputs]
            known[at] = border_rule(op.kind, ins, [graph.values[o].shape for o in op.outputs])
    return tuple([known[at] for at in alike])
