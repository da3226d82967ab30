"""The operations of a graph that each call of the flat program corresponds to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planner import compat
from planner.graph.flat import Flattener
from planner.graph.jaxpr.walk import BARRIER, Body, Loop, Walk, loop_of


def operations(jaxpr: Any) -> dict[int, range]:
    """Per call of ``flatten(jaxpr)``, by its first result: the indices of its operations in the
    traced graph, counted from the beginning of ``jaxpr``."""
    walk = _Numbered()
    walk.run(jaxpr, tuple(walk.number() for _ in compat.body(jaxpr).invars))
    return walk.spans


def body_start(eqn: Any) -> int:
    """The number of operations of a loop before its body."""
    return len(loop_of(eqn).entering)


@dataclass(eq=False)
class _Numbered(Flattener):
    ops: int = 0
    spans: dict[int, range] = field(default_factory=dict)

    def operation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        counter = _Counter()
        counter.equation(eqn, [None] * len(eqn.invars))
        self.spans[self.count] = range(self.ops, self.ops + counter.ops)
        self.ops += counter.ops
        return super().operation(eqn, ins)


@dataclass(eq=False)
class _Counter(Walk[None]):
    """Counts operations as the tracer numbers them."""

    ops: int = 0

    def const(self, var: Any, value: Any) -> None:
        return None

    def literal(self, atom: Any) -> None:
        return None

    def operation(self, eqn: Any, ins: list[None]) -> Sequence[None]:
        self.ops += len(ins) if eqn.primitive.name == BARRIER else 1
        return [None] * len(eqn.outvars)

    def loop(self, eqn: Any, ins: list[None], loop: Loop) -> Sequence[None]:
        self.ops += len(loop.entering)
        for body in loop.bodies:
            self.run(body.jaxpr, [None] * len(compat.body(body.jaxpr).invars))
            self.ops += len(body.closing)
        self.ops += len(loop.leaving)
        return [None] * len(eqn.outvars)

    def cond(self, eqn: Any, ins: list[None], branches: tuple[Body, ...]) -> Sequence[None]:
        for branch in branches:
            self.ops += len(branch.entering)
            self.run(branch.jaxpr, [None] * len(compat.body(branch.jaxpr).invars))
        self.ops += len(eqn.outvars)
        return [None] * len(eqn.outvars)
