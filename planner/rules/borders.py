"""Factor rules for the borders of loops and branches (for kinds, see graph/jaxpr/build.py)."""

from __future__ import annotations

from collections.abc import Sequence

from planner.rules.factor import FactorRule, Mapped

Shape = tuple[int, ...]


def border_rule(kind: str, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]) -> FactorRule:
    """The rule of one border.

    ``loop_xs`` drops and ``loop_ys`` adds a leading dimension, which must not be sharded:
    every iteration needs its own slice on every device. All others are identities.
    """
    if kind == "loop_test":
        bare: tuple[Mapped, ...] = tuple(tuple(() for _ in s) for s in in_shapes)
        return FactorRule(bare, (), (), frozenset(), frozenset(), "border")
    wide = in_shapes[0] if kind in ("loop_xs", "loop_back") or not out_shapes else out_shapes[0]
    sizes = tuple(n for n in wide if n > 1)
    numbers = iter(range(len(sizes)))
    dims: Mapped = tuple((next(numbers),) if n > 1 else () for n in wide)
    lead = frozenset(dims[0]) if kind in ("loop_xs", "loop_ys") and dims else frozenset()
    operands: tuple[Mapped, ...]
    results: tuple[Mapped, ...]
    if kind == "loop_xs":
        operands, results = (dims,), (dims[1:],)
    elif kind == "loop_ys":
        operands, results = (dims[1:],), (dims,)
    else:
        operands = tuple(dims if len(s) == len(wide) else () for s in in_shapes)
        results = tuple(dims for _ in out_shapes)
    return FactorRule(operands, results, sizes, frozenset(), lead, "border")
