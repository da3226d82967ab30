"""Marks in a step whose examples are split into groups (replicas), each on separate devices.

A mark that splits examples over mesh axes holds for the whole microbatch; for a group it would use
the devices of the other groups. So marks inside the groups leave these axes out: the planner splits
the groups over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from planner import compat
from planner.annotate import FREE, MARK, mark_entries
from planner.graph.jaxpr.walk import STRUCTURED
from planner.microbatch.pairs import equations
from planner.spec import Sharding

MARKS = (MARK, "sharding_constraint")


def example_axes(whole: Any, small: Any) -> frozenset[str]:
    """The mesh axes over which marks split examples.

    Args:
        whole, small: the jaxpr of the step for the batch and for a microbatch.
    """
    axes: set[str] = set()
    for a, b in zip(equations(whole), equations(small), strict=False):
        if a.primitive is not b.primitive:  # in unused code; the rest was proved equal
            break
        entries = mark_entries(a.primitive.name, a.params) if a.primitive.name in MARKS else None
        if entries is None:
            continue
        shapes = compat.aval_shape(a.outvars[0].aval), compat.aval_shape(b.outvars[0].aval)
        for entry, m, n in zip(entries, *shapes, strict=False):
            if m != n:
                axes.update(*Sharding.of([None if entry is FREE else entry]).dims)
    return frozenset(axes)


def without_axes(eqn: Any, axes: frozenset[str]) -> Any:
    """An equation with some mesh axes removed from its marks, at any depth; the planner decides
    these dimensions."""
    name = eqn.primitive.name
    if not axes:
        return eqn
    if name == MARK:
        entries = _stripped(eqn.params["entries"], axes)
        return eqn.replace(params={**eqn.params, "entries": entries})
    if name == "sharding_constraint" and isinstance(
        eqn.params["sharding"], jax.sharding.NamedSharding
    ):
        sharding = eqn.params["sharding"]
        entries = _stripped(tuple(sharding.spec), axes)
        spec = jax.sharding.PartitionSpec(*entries)
        free = frozenset(d for d, e in enumerate(entries) if e is FREE)
        params = {"sharding": sharding.update(spec=spec), "unconstrained_dims": free}
        return eqn.replace(params={**eqn.params, **params})
    if name not in STRUCTURED:
        return eqn
    return eqn.replace(params={k: _param(v, axes) for k, v in eqn.params.items()})


def _stripped(entries: Sequence[Any], axes: frozenset[str]) -> tuple[Any, ...]:
    out: list[Any] = []
    for entry in entries:
        names = () if entry is None or entry is FREE else entry
        names = (names,) if isinstance(names, str) else names
        left = tuple(n for n in names if n not in axes)
        out.append(entry if len(left) == len(names) else left or FREE)
    return tuple(out)


def _param(value: Any, axes: frozenset[str]) -> Any:
    if isinstance(value, tuple) and value and all(hasattr(x, "jaxpr") for x in value):
        return tuple(_jaxpr(x, axes) for x in value)
    if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
        return _jaxpr(value, axes)
    return value


def _jaxpr(value: Any, axes: frozenset[str]) -> Any:
    inner = compat.body(value)
    jaxpr = inner.replace(eqns=[without_axes(eqn, axes) for eqn in inner.eqns])
    closed = getattr(value, "jaxpr", None) is not None
    return compat.with_consts(jaxpr, compat.consts(value)) if closed else jaxpr
