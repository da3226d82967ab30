"""Operations without a sharding rule, whose operands and results are whole on every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph.ir import SCALAR, Graph
from planner.rules.factor import FactorRule


@dataclass(frozen=True)
class Whole:
    """Equal operations without a rule.

    Attributes:
        kind: the primitive.
        source: the line, or ``""``.
        count: the number of operations.
        nbytes: bytes of the operands and results of one operation, all on every device.
    """

    kind: str
    source: str
    count: int
    nbytes: int

    @property
    def name(self) -> str:
        """The primitive and its line."""
        return f"{self.kind} ({self.source or 'no line'})"


def held_whole(graph: Graph, rules: Sequence[FactorRule]) -> tuple[Whole, ...]:
    """The operations without a rule whose results are used, equal ones in one row.

    Args:
        graph: the step.
        rules: one per operation.

    Returns:
        The operations, in program order.
    """
    live = graph.live_ops()
    seen: dict[tuple[str, str, int], int] = {}
    for op in graph.ops:
        if live[op.index] and rules[op.index].origin == "opaque":
            ends = {v for v in (*op.inputs, *op.outputs) if v != SCALAR}
            key = op.kind, op.source, sum(graph.values[v].nbytes for v in ends)
            seen[key] = seen.get(key, 0) + 1
    return tuple(Whole(kind, source, n, size) for (kind, source, size), n in seen.items())
