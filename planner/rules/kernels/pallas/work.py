"""The work of Pallas kernels, from their authors' estimates or from their bodies."""

from __future__ import annotations

import math
from typing import Any

from planner import compat
from planner.rules.kernels.pallas.integers import inner_call

READS = frozenset({"get", "masked_load", "load"})
"""Primitives that read a part of a reference."""
_FREE = READS | {"swap", "masked_swap", "program_id", "num_programs"}


def body_flops(jaxpr: Any) -> tuple[float, int]:
    """Flop of one run of a body, and its number of matrix products. A conditional counts as its
    most expensive branch. A loop of unknown length runs until it has read every array of which it
    reads a part in each iteration."""
    flops, products = 0.0, 0
    for eqn in compat.body(jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        size = max((math.prod(compat.aval_shape(v.aval)) for v in eqn.outvars), default=0)
        call = inner_call(eqn)
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = compat.aval_shape(eqn.invars[0].aval)
            flops += 2.0 * size * math.prod(shape[d] for d in contracted)
            products += 1
        elif call is not None:
            more = body_flops(call)
            flops, products = flops + more[0], products + more[1]
        elif name == "cond":
            most = max(body_flops(b) for b in params["branches"])
            flops, products = flops + most[0], products + most[1]
        elif name in ("scan", "while"):
            inner = params["jaxpr" if name == "scan" else "body_jaxpr"]
            each = body_flops(inner)
            trips = int(params["length"]) if name == "scan" else _turns(inner)
            flops, products = flops + trips * each[0], products + each[1]
        elif name not in _FREE:
            flops += size
    return flops, products


def _turns(jaxpr: Any) -> int:
    """Iterations of a loop of unknown length; see `body_flops`."""
    most = 1
    for eqn in compat.body(jaxpr).eqns:
        if eqn.primitive.name in READS:
            ends = (eqn.invars[0], eqn.outvars[0])
            whole, part = (math.prod(compat.aval_shape(v.aval)) for v in ends)
            most = max(most, whole // max(1, part))
    return most


Work = tuple[tuple[str, float, float], ...]
"""See ``Op.work``."""


def kernel_work(params: Any) -> Work:
    """The work of a Pallas kernel, which counts as attention if it has two or more products.

    The flop are those of ``cost_estimate`` if the kernel's author gave one. Otherwise, they are
    those of the body times the number of places of the grid (dimensions of unknown length count as
    one).
    """
    grid = params["grid_mapping"].grid
    flops, products = body_flops(params["jaxpr"])
    said = params.get("cost_estimate")
    kind = "attention" if products > 1 else "matmul" if products else "vector"
    if said is not None:
        return ((kind, float(said.flops), 0.0),)
    return ((kind, flops * math.prod(n for n in grid if isinstance(n, int)), 0.0),)
