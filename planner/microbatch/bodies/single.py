"""A step for one example, derived from its traces for a batch and for one twice as large.

JAX traces dimensions of size one differently (it broadcasts, squeezes or sums them away), so a
microbatch of one example is not traced. Instead, a size that doubles with the batch counts examples
and is divided by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex_core

from planner import compat
from planner.microbatch.errors import NotExactError


def of_one(whole: Any, double: Any, examples: int) -> Any:
    """The jaxpr of a step for one example.

    Args:
        whole: the step's jaxpr for ``examples`` examples.
        double: the same for a batch of double size.
        examples: number of examples in ``whole``.

    Raises:
        NotExactError: the two differ in more than sizes that depend on the batch size.
    """
    return _Scaled(examples).jaxpr(whole, double)


class _Scaled:
    """``of_one`` in progress."""

    def __init__(self, examples: int) -> None:
        self.examples = examples

    def size(self, a: int, b: int) -> int:
        if a == b:
            return a
        if b != 2 * a or a % self.examples:
            raise NotExactError(
                f"this step can't be cut into microbatches of one example: a size is {a} for "
                f"{self.examples} examples and {b} for {2 * self.examples}; take fewer microbatches"
            )
        return a // self.examples

    def aval(self, a: Any, b: Any) -> Any:
        shapes = compat.aval_shape(a), compat.aval_shape(b)
        if shapes[0] == shapes[1]:
            return a
        if len(shapes[0]) != len(shapes[1]):
            raise NotExactError(f"a value has shape {shapes[0]}, and {shapes[1]} in a larger batch")
        return a.update(shape=tuple(map(self.size, *shapes)))

    def jaxpr(self, whole: Any, double: Any) -> Any:
        """A jaxpr, closed if ``whole`` is."""
        inner, other = compat.body(whole), compat.body(double)
        _same_length(inner.eqns, other.eqns)
        known: dict[Any, Any] = {}

        def new(a: Any, b: Any) -> Any:
            known[a] = jex_core.Var(self.aval(a.aval, b.aval))
            return known[a]

        def read(atom: Any) -> Any:
            return atom if compat.is_literal(atom) else known[atom]

        def fresh(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
            _same_length(first, second)
            return [new(a, b) for a, b in zip(first, second, strict=True)]

        constvars = fresh(inner.constvars, other.constvars)
        invars = fresh(inner.invars, other.invars)
        eqns = []
        for a, b in zip(inner.eqns, other.eqns, strict=True):
            if a.primitive is not b.primitive:
                raise NotExactError(
                    f"this step can't be cut into microbatches: {a.primitive} is {b.primitive} "
                    "for a larger batch"
                )
            params = {name: self.param(value, b.params[name]) for name, value in a.params.items()}
            ins = [read(v) for v in a.invars]
            eqns.append(a.replace(invars=ins, outvars=fresh(a.outvars, b.outvars), params=params))
        jaxpr = inner.replace(
            constvars=constvars,
            invars=invars,
            eqns=eqns,
            outvars=[read(v) for v in inner.outvars],
        )
        closed = getattr(whole, "jaxpr", None) is not None
        return compat.with_consts(jaxpr, compat.consts(whole)) if closed else jaxpr

    def param(self, a: Any, b: Any) -> Any:
        """A parameter of an equation for one example."""
        if a is b or isinstance(a, bool):
            return a
        if isinstance(a, int) and isinstance(b, int):
            return self.size(a, b)
        if hasattr(a, "eqns") or hasattr(getattr(a, "jaxpr", None), "eqns"):
            return self.jaxpr(a, b)
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            parts = [self.param(x, y) for x, y in zip(a, b, strict=True)]
            return type(a)(*parts) if hasattr(a, "_fields") else tuple(parts)
        if not _is_code(a) and not _equal(a, b):  # such as the grid of a kernel
            raise NotExactError(
                "this step can't be cut into microbatches of one example: an operation is made for "
                f"the batch's size ({type(a).__name__}); take fewer microbatches"
            )
        return a


def _is_code(a: Any) -> bool:
    """Whether a parameter is a function, such as the rule of a ``jax.custom_vjp``."""
    return callable(a) or hasattr(a, "call_wrapped")


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # arrays, and values that can't be compared
        return False


def _same_length(a: Sequence[Any], b: Sequence[Any]) -> None:
    if len(a) != len(b):
        raise NotExactError(
            "this step can't be cut into microbatches: it has other operations for a larger batch"
        )
