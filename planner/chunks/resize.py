"""One operation on a chunk of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.errors import InternalError
from planner.graph.flat import Call

Rows = Sequence[int | None]
"""Per value, its row dimension, or None."""


def splits(call: Call, ins: Rows, outs: Rows) -> bool:
    """Whether an operation can be computed for a chunk of its rows."""
    if call.eqn.effects:
        return False
    if call.kind == "gather":
        numbers = call.eqn.params["dimension_numbers"]
        return outs[0] is not None and ins[0] in getattr(numbers, "operand_batching_dims", ())
    if call.kind == "scatter-add":
        numbers = call.eqn.params["dimension_numbers"]
        return outs[0] is not None and ins[0] in getattr(numbers, "operand_batching_dims", ())
    return True


def on_chunk(
    call: Call, values: Sequence[Any], outs: Rows, chunk: int, parts: int, number: Any
) -> list[Any]:
    """The results of an operation on the rows ``number``, ``number + parts``, and so on.

    Args:
        call: the operation.
        values: its operands; those with rows have only the ``chunk`` rows of this chunk.
        outs: per result, its row dimension.
        chunk: rows per chunk.
        parts: number of chunks.
        number: index of the chunk; traced.
    """
    eqn = call.eqn
    shapes = [
        tuple(chunk if d == row else n for d, n in enumerate(compat.aval_shape(v.aval)))
        for v, row in zip(eqn.outvars, outs, strict=True)
    ]
    if call.kind == "iota":
        with compat.provenance(call.origin):
            iota = jax.lax.broadcasted_iota(jnp.int32, shapes[0], eqn.params["dimension"])
            if eqn.params["dimension"] == outs[0]:
                iota = iota * parts + number.astype(jnp.int32)
            return [iota.astype(eqn.params["dtype"])]  # rounded once
    changed: dict[str, Any] = {}
    if call.kind == "broadcast_in_dim":
        changed = {"shape": shapes[0]}
    elif call.kind == "reshape":
        changed = {"new_sizes": shapes[0]}
    elif call.kind == "dot_general" and outs[0] is None:
        dtype = eqn.outvars[0].aval.dtype
        if wide(dtype) != dtype:  # a term of a sum, which is rounded when it is complete
            changed = {"preferred_element_type": wide(dtype)}
    eqn = eqn.replace(params={**eqn.params, **changed}) if changed else eqn
    results = compat.evaluate_equation(eqn, values, call.origin)
    for x, shape in zip(results, shapes, strict=True):
        if x.shape != shape:
            raise InternalError(f"{call.kind} of a chunk gives {x.shape}, expected {shape}")
    return results


def wide(dtype: Any) -> Any:
    """The type in which terms are added up."""
    short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if short else dtype
