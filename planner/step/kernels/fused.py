"""Calls of user functions that stand for one hand-written kernel: fused (flash) attention.

A jitted function whose name starts with ``flash_attention`` is priced as one kernel, forward and
backward each. Values that only the kernel itself reads take no memory and no memory traffic.
Residuals that go only from a forward to its backward, also through a loop's borders, are inside
too, because such a kernel recomputes them (Dao et al. 2022, section 3.1). The name contains
``causal`` if half of the products is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodels import attention_drag
from planner.graph.ir import SCALAR, Graph, Op
from planner.rules.factor import FactorRule
from planner.step.kernels.flops import extents
from planner.step.memory.liveness import PASSES


def _passes_on(op: Op) -> bool:
    """Whether an operation's results are its operands: a border of a region, or a mark."""
    return op.kind.startswith(("loop_", "branch_")) or op.kind in PASSES


@dataclass(frozen=True)
class _Call:
    """One call: its products in order, and the factor of their FLOPs."""

    products: tuple[int, ...]
    factor: float


@dataclass(frozen=True)
class FusedCalls:
    """The fused calls of a graph.

    Attributes:
        call: per operation, the index of its call in ``calls``, or -1.
        calls: the calls.
        inside: per value, whether it never leaves fused calls.
    """

    call: tuple[int, ...]
    calls: tuple[_Call, ...]
    inside: tuple[bool, ...]

    def factor(self, call: int) -> float:
        """The factor of the FLOPs of a call's products: half if causal, more if the call is a
        backward that recomputes the scores, times ``attention_drag``."""
        return self.calls[call].factor

    def first_product(self, call: int) -> int:
        """The operation that represents the start of a call's kernel."""
        return self.calls[call].products[0]


def find_fused(graph: Graph, rules: Sequence[FactorRule]) -> FusedCalls:
    """Find the fused calls; linear in operations."""
    members: dict[str, list[int]] = {}
    for op in graph.ops:
        if op.fused:
            members.setdefault(op.fused, []).append(op.index)
    call = [-1] * len(graph.ops)
    calls: list[_Call] = []
    for name, ops in members.items():
        products = tuple(o for o in ops if graph.ops[o].kind == "dot_general")
        if not products:
            continue
        for o in ops:
            call[o] = len(calls)
        backward = not any(graph.ops[o].kind in ("exp", "exp2") for o in ops)
        calls.append(_Call(products, _factor(name, [rules[o] for o in products], backward)))
    if not calls:
        return FusedCalls(tuple(call), (), (False,) * len(graph.values))
    return FusedCalls(tuple(call), tuple(calls), _inside(graph, call))


def _factor(name: str, products: Sequence[FactorRule], backward: bool) -> float:
    """See ``FusedCalls.factor``."""
    causal = "causal" in name
    ends = sorted(s for rule in products[:1] for s in extents(rule))
    drag = attention_drag(ends[0], ends[-1], causal)
    again = (len(products) + 1) / len(products) if backward else 1.0
    return (0.5 if causal else 1.0) * again * drag


def _inside(graph: Graph, call: Sequence[int]) -> tuple[bool, ...]:
    """Values made by fused calls (or passed on by a border) that only fused calls read."""
    from_calls = [False] * len(graph.values)
    for op in graph.ops:
        if call[op.index] >= 0:
            for o in op.outputs:
                from_calls[o] = True
        elif _passes_on(op):
            sources = [i for i in op.inputs if i != SCALAR]
            for o in op.outputs:
                from_calls[o] = bool(sources) and all(from_calls[i] for i in sources)
    final = set(graph.outputs)
    inside = [m and v.index not in final for m, v in zip(from_calls, graph.values, strict=True)]
    for op in reversed(graph.ops):
        if call[op.index] < 0 and not (
            _passes_on(op) and op.outputs and all(inside[o] for o in op.outputs)
        ):
            for i in op.inputs:
                if i != SCALAR:
                    inside[i] = False
    return tuple(inside)
