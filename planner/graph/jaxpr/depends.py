"""Which arguments the results of a program depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.graph.jaxpr.walk import Body, Walk

Names = frozenset[int]
NONE: Names = frozenset()


def depends(jaxpr: Any, args: Sequence[Names]) -> list[Names]:
    """Per result, the names of all arguments that it depends on.

    Args:
        jaxpr: closed or open.
        args: the names of each argument, which are any numbers; arguments may share a name.
    """
    return _Depends().run(jaxpr, args)


class _Depends(Walk[Names]):
    def const(self, var: Any, value: Any) -> Names:
        return NONE

    def literal(self, atom: Any) -> Names:
        return NONE

    def equation(self, eqn: Any, ins: list[Names]) -> Sequence[Names]:
        return super().equation(eqn, ins) if any(ins) else [NONE] * len(eqn.outvars)

    def operation(self, eqn: Any, ins: list[Names]) -> Sequence[Names]:
        return [NONE.union(*ins)] * len(eqn.outvars)

    def cond(self, eqn: Any, ins: list[Names], branches: tuple[Body, ...]) -> Sequence[Names]:
        each = [self.run(body.jaxpr, body.args(ins)) for body in branches]
        return [ins[0].union(*names) for names in zip(*each, strict=True)]
