"""Replaces primitives of libraries that are plain JAX inside by calls of jitted functions.

Equinox, Lineax, Optimistix and Diffrax define primitives to give loops and linear solves custom
rules for derivatives and batching. Their implementation (``def_impl``) is Python on JAX arrays, and
they are lowered to it. Such a primitive has no sharding rule. After differentiation, its equation
becomes a call of the implementation, whose operations are planned like any others. Primitives of
jax, those whose implementation can't be traced, and those with a registered rule stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from planner import compat
from planner.graph.jaxpr.walk import in_bodies
from planner.rules.kernels.registered import registered

OWN = frozenset({"jax", "jaxlib", "planner", "executor"})
"""Packages whose primitives stay as they are: those of jax, and marks."""


def with_inlined(jaxpr: Any, names: set[str]) -> Any:
    """The jaxpr, closed or open, with such equations as calls, also in the bodies of its equations;
    the same object if there are none. Adds the names of the primitives to ``names``."""
    inner = compat.body(jaxpr)
    eqns = [_called(eqn, names) for eqn in inner.eqns]
    if all(a is b for a, b in zip(eqns, inner.eqns, strict=True)):
        return jaxpr
    rewritten = inner.replace(eqns=eqns)
    return rewritten if inner is jaxpr else compat.with_consts(rewritten, compat.consts(jaxpr))


def _called(eqn: Any, names: set[str]) -> Any:
    """An equation of a library's primitive as a call; also rewrites the bodies of an equation."""
    call = _call(eqn) if _of_library(eqn.primitive) and registered(eqn) is None else eqn
    if call is not eqn:
        names.add(str(eqn.primitive.name))
    params = {k: in_bodies(v, lambda x: with_inlined(x, names)) for k, v in call.params.items()}
    same = all(params[k] is v for k, v in call.params.items())
    return call if same else call.replace(params=params)


@functools.lru_cache
def _of_library(primitive: Any) -> bool:
    """Whether a primitive is implemented by Python code outside of jax."""
    run = getattr(primitive, "impl", None)
    while isinstance(run, functools.partial):
        run = run.func
    module = str(getattr(run, "__module__", None) or "")
    return bool(module) and module.partition(".")[0] not in OWN


def _call(eqn: Any) -> Any:
    """The equation as a call; unchanged if its implementation can't be traced, or returns arrays of
    other types."""

    def run(*operands: Any) -> list[Any]:
        output = eqn.primitive.impl(*operands, **eqn.params)
        results = output if eqn.primitive.multiple_results else [output]
        return [
            jax.lax.convert_element_type(x, v.aval.dtype) if getattr(x, "weak_type", False) else x
            for x, v in zip(results, eqn.outvars, strict=True)
        ]

    structs = [compat.as_struct(v.aval) for v in eqn.invars]
    try:
        closed, _ = compat.make_jaxpr(jax.jit(run), structs)
    except Exception:  # raised by the library: it needs concrete values
        return eqn
    inner = compat.body(closed)
    if len(inner.eqns) != 1 or compat.consts(closed):
        return eqn
    (call,) = inner.eqns
    plain = list(call.invars) == list(inner.invars) and list(call.outvars) == list(inner.outvars)
    alike = [str(v.aval) for v in call.outvars] == [str(v.aval) for v in eqn.outvars]
    if not (plain and alike) or _runs_itself(eqn, call):
        return eqn
    return eqn.replace(primitive=call.primitive, params=call.params, effects=call.effects)


def _runs_itself(eqn: Any, call: Any) -> bool:
    """Whether a call contains the equation itself, as when a library compiles its primitive alone
    (``apply_primitive``)."""
    bodies = [compat.body(v) for v in call.params.values()]
    for body in (b for b in bodies if hasattr(b, "eqns")):
        for inner in body.eqns:
            if inner.primitive is eqn.primitive and str(inner.params) == str(eqn.params):
                return True
            if _runs_itself(eqn, inner):
                return True
    return False


def inlined_notes(names: Sequence[str]) -> tuple[str, ...]:
    """The notes of a plan about inlined primitives."""
    if not names:
        return ()
    return (
        f"planned and run by the Python implementation of a library: {', '.join(names)}; register "
        "a rule for a primitive that is lowered to something else",
    )
