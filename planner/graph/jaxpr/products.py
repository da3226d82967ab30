"""Flop of the products of a step as written, for model flop utilization."""

from __future__ import annotations

import math
from typing import Any

from planner import compat
from planner.graph.ir import PRODUCTS
from planner.graph.jaxpr.walk import called, loop_of


def _product_flop(eqn: Any) -> float:
    """Flop of an equation that is a product or a convolution; 0 for others."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("dot_general", "ragged_dot", "ragged_dot_general"):
        out = math.prod(compat.aval_shape(eqn.outvars[0].aval))
        left = compat.aval_shape(eqn.invars[0].aval)
        numbers = params.get("dimension_numbers")
        summed = numbers[0][0] if isinstance(numbers, tuple) else (len(left) - 1,)
        return 2.0 * out * math.prod(left[d] for d in summed)
    if name == "conv_general_dilated":
        out = math.prod(compat.aval_shape(eqn.outvars[0].aval))
        kernel = compat.aval_shape(eqn.invars[1].aval)
        features = int(kernel[params["dimension_numbers"].rhs_spec[0]])
        return 2.0 * out * math.prod(kernel) / max(features, 1)
    return 0.0


def products_of(jaxpr: Any, times: float = 1.0) -> dict[str, float]:
    """Flop of the products in a jaxpr and what it calls, by the dtype of their first operand.

    A loop counts once per iteration (a ``while`` once if that number is unknown). Of branches, the
    one with the most flop counts. The bodies of kernels are not counted.

    Args:
        jaxpr: closed or open.
        times: number of runs.
    """
    by_dtype: dict[str, float] = {}
    for eqn in compat.body(jaxpr).eqns:
        for dtype, flop in flop_of(eqn, times).items():
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + flop
    return by_dtype


def flop_of(eqn: Any, times: float = 1.0) -> dict[str, float]:
    """As ``products_of``, for one equation that runs ``times`` times."""
    name = eqn.primitive.name
    if name in PRODUCTS:
        flop = times * _product_flop(eqn)
        return {compat.dtype_name(eqn.invars[0].aval): flop} if flop else {}
    if name in ("scan", "while"):
        loop = loop_of(eqn)
        by_dtype: dict[str, float] = {}
        for body in loop.bodies:
            for dtype, flop in products_of(body.jaxpr, times * (loop.trips or 1)).items():
                by_dtype[dtype] = by_dtype.get(dtype, 0.0) + flop
        return by_dtype
    if name == "cond":
        branches = [products_of(b, times) for b in eqn.params["branches"]]
        return max(branches, key=lambda b: sum(b.values()), default={})
    inside = called(eqn)
    return {} if inside is None else products_of(inside.jaxpr, times)
