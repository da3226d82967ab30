"""Evaluates integers of index maps and kernel bodies with numpy, without starting a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from planner import compat

Number = np.ndarray[Any, Any] | None
"""A scalar, or one per index; None if it is not known."""


def _select(which: Any, *cases: Any) -> Any:
    return np.choose(np.asarray(which).astype(int), np.broadcast_arrays(*cases))


def _divided(a: Any, b: Any) -> Any:
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(np.asarray(a).dtype)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divided,
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sign": np.sign,
    "abs": np.abs,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": lambda x: ~x,
    "select_n": _select,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
}
_CALLS = frozenset("jit pjit closed_call core_call custom_jvp_call".split())


def inner_call(eqn: Any) -> Any:
    """The body of a call that only runs its equations; None for other equations."""
    if eqn.primitive.name not in _CALLS:
        return None
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def evaluated(eqn: Any, values: Sequence[Number]) -> list[Number]:
    """The results of an equation of scalars; None for those that are not known."""
    unknown: list[Number] = [None] * len(eqn.outvars)
    if eqn.primitive.name == "convert_element_type" and values[0] is not None:
        dtype = np.dtype(eqn.params["new_dtype"])
        return [values[0].astype(dtype)] if dtype.kind in "biu" else unknown
    function = _FUNCTIONS.get(eqn.primitive.name)
    if function is None or any(x is None for x in values):
        return unknown
    if any(
        compat.aval_shape(v.aval) or np.asarray(x).dtype.kind not in "biu"
        for v, x in zip(eqn.invars, values, strict=True)
    ):
        return unknown
    with np.errstate(divide="ignore", over="ignore"):
        return [np.asarray(function(*values))]


def run(jaxpr: Any, values: Sequence[Number]) -> list[Number]:
    """The results of a body of scalars, closed or open; None for those that are not known."""
    inner = compat.body(jaxpr)
    known: dict[Any, Number] = dict(zip(inner.invars, values, strict=True))

    def read(atom: Any) -> Number:
        return literal(atom) if compat.is_literal(atom) else known.get(atom)

    for eqn in inner.eqns:
        ins = [read(v) for v in eqn.invars]
        body = inner_call(eqn)
        outs = evaluated(eqn, ins) if body is None else run(body, ins)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in inner.outvars]


def literal(atom: Any) -> Number:
    """The value of a literal if it is an integer or a boolean, else None."""
    value = np.asarray(atom.val)
    return value if value.dtype.kind in "biu" and not value.shape else None
