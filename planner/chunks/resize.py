"""One operation on a chunk of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.errors import InternalError
from planner.graph.flat import Call

Rows = Sequence[int | None]
"""Per value, its row dimension, or None."""


@dataclass(frozen=True)
class Cut:
    """How rows are cut into chunks: each takes ``piece`` neighboring rows of every ``parts *
    piece``.

    Attributes:
        rows: their number.
        parts: number of chunks.
        piece: divides the rows of a chunk.
    """

    rows: int
    parts: int
    piece: int

    @property
    def chunk(self) -> int:
        """Rows per chunk."""
        return self.rows // self.parts

    def apart(self, x: Any, row: int) -> Any:
        """[.., rows, ..] -> [parts, .., chunk, ..]"""
        before, after = x.shape[:row], x.shape[row + 1 :]
        count = self.chunk // self.piece
        y = x.reshape(*before, count, self.parts, self.piece, *after)
        y = jnp.moveaxis(y, row + 1, 0)
        return y.reshape(self.parts, *before, self.chunk, *after)

    def joined(self, x: Any, row: int) -> Any:
        """The inverse of ``apart``."""
        before, after = x.shape[1 : row + 1], x.shape[row + 2 :]
        count = self.chunk // self.piece
        y = x.reshape(self.parts, *before, count, self.piece, *after)
        y = jnp.moveaxis(y, 0, row + 1)
        return y.reshape(*before, self.rows, *after)

    def positions(self, places: Any, number: Any) -> Any:
        """Positions among all rows, from those in a chunk; ``number``: index of the chunk."""
        first = number.astype(places.dtype) * self.piece
        if self.piece == 1:
            return places * self.parts + first
        return places // self.piece * (self.parts * self.piece) + first + places % self.piece


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


def on_chunk(call: Call, values: Sequence[Any], outs: Rows, cut: Cut, number: Any) -> list[Any]:
    """The results of an operation on the rows of one chunk.

    Args:
        call: the operation.
        values: its operands; those with rows have only the rows of this chunk.
        outs: per result, its row dimension.
        cut: the chunks.
        number: index of the chunk; traced.
    """
    eqn = call.eqn
    shapes = [
        tuple(cut.chunk if d == row else n for d, n in enumerate(compat.aval_shape(v.aval)))
        for v, row in zip(eqn.outvars, outs, strict=True)
    ]
    if call.kind == "iota":
        with compat.provenance(call.origin):
            iota = jax.lax.broadcasted_iota(jnp.int32, shapes[0], eqn.params["dimension"])
            if eqn.params["dimension"] == outs[0]:
                iota = cut.positions(iota, number)
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
