"""The properties of an equation that determine its factor rule."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex_core

from planner.rules.kernels.pallas.text import kernel_text

Shape = tuple[int, ...]


def _shape(aval: Any) -> Shape:
    """The shape of an abstract value; values without one (tokens) count as scalars."""
    return tuple(getattr(aval, "shape", ()))


@dataclass(frozen=True, eq=False)
class EqnKey:
    """A primitive with its parameters and the abstract values around it.

    Literal inputs are given as abstract values like any other input. Abstract
    values need only a ``shape`` and a ``dtype``. ``unused`` holds the indices of unused results, if
    the rule may depend on them (kernels that keep scratch memory in results).
    """

    primitive: jex_core.Primitive
    params: Mapping[str, Any]
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    unused: frozenset[int] = frozenset()

    @classmethod
    def of(cls, eqn: jex_core.JaxprEqn) -> EqnKey:
        """The key of a jaxpr equation."""
        return cls(
            primitive=eqn.primitive,
            params=eqn.params,
            in_avals=tuple(var.aval for var in eqn.invars),
            out_avals=tuple(var.aval for var in eqn.outvars),
        )

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.primitive.name)

    @property
    def in_shapes(self) -> tuple[Shape, ...]:
        """The shape of each input."""
        return tuple(_shape(aval) for aval in self.in_avals)

    @property
    def out_shapes(self) -> tuple[Shape, ...]:
        """The shape of each output."""
        return tuple(_shape(aval) for aval in self.out_avals)

    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """Stand-ins for the inputs, to trace the primitive with."""
        struct: Any = jax.ShapeDtypeStruct
        return [struct(aval.shape, aval.dtype) for aval in self.in_avals]

    def signature(self) -> Hashable:
        """A hashable value, equal for keys that have the same rule."""
        kernel = kernel_text(self.params) if self.name == "pallas_call" else ""
        return (
            self.name,
            kernel,
            repr(sorted(self.params.items(), key=lambda item: item[0])),
            tuple((_shape(a), str(getattr(a, "dtype", a))) for a in self.in_avals),
            tuple((_shape(a), str(getattr(a, "dtype", a))) for a in self.out_avals),
            self.unused,
        )
