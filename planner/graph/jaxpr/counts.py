"""The number of iterations of a ``while``, if its equation determines it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner import compat

_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_STEPS = {"add": 1, "add_any": 1, "sub": -1}


def counted(eqn: Any) -> int | None:
    """The iterations of a ``while`` that counts in a carry, from a start to an end by a step.

    None if one of the three is no literal, if the test is not ``<``, ``<=``, ``>`` or ``>=`` of the
    counter and the end, or if there is no iteration.
    """
    test, body = (compat.body(eqn.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
    consts, in_body = int(eqn.params["cond_nconsts"]), int(eqn.params["body_nconsts"])
    compared = _maker(test, test.outvars[0])
    if compared is None or compared.primitive.name not in _TURNED:
        return None
    kind, (counter, end) = compared.primitive.name, compared.invars
    if _place(test.invars[consts:], counter) is None:
        kind, counter, end = _TURNED[kind], end, counter
    carry, const = _place(test.invars[consts:], counter), _place(test.invars[:consts], end)
    if carry is None:
        return None
    last = _number(end if const is None else eqn.invars[const])
    first = _number(eqn.invars[consts + in_body + carry])
    step = _step(body, body.invars[in_body + carry], body.outvars[carry])
    if first is None or last is None or step is None:
        return None
    sign = 1 if kind in ("lt", "le") else -1
    if sign * step <= 0:
        return None
    span = sign * (last - first) + (kind in ("le", "ge"))
    return math.ceil(span / (sign * step)) if span > 0 else None


def _step(body: Any, before: Any, after: Any) -> int | None:
    """The literal that an iteration adds to a carry, or None."""
    eqn = _maker(body, after)
    if eqn is None or eqn.primitive.name not in _STEPS:
        return None
    left, right = eqn.invars
    if eqn.primitive.name != "sub" and right is before:
        left, right = right, left
    by = _number(right)
    return by * _STEPS[eqn.primitive.name] if left is before and by is not None else None


def _maker(jaxpr: Any, var: Any) -> Any:
    """The equation that computes a value; None if there is none."""
    return next((e for e in jaxpr.eqns if any(v is var for v in e.outvars)), None)


def _place(variables: Sequence[Any], atom: Any) -> int | None:
    """The position of a variable in a sequence, or None."""
    return next((k for k, v in enumerate(variables) if v is atom), None)


def _number(atom: Any) -> int | None:
    """The value of an integer literal; None for anything else."""
    value = np.asarray(getattr(atom, "val", None))
    return int(value) if value.shape == () and value.dtype.kind in "iu" else None
