"""A Pallas kernel on a shard of its operands: the same body, a shorter grid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from planner import compat
from planner.rules.kernels.pallas.grid import grid_axes, skipped_operands
from planner.rules.kernels.pallas.text import grid_text, program_text
from planner.rules.key import Shape

_COUNTS = ("flops", "transcendentals", "bytes_accessed")
"""Fields of a cost estimate of which a shard has a share."""


def local_params(
    params: Any,
    in_shapes: Sequence[Shape],
    out_shapes: Sequence[Shape],
    unused: frozenset[int],
) -> dict[str, Any]:
    """The parameters of the same kernel on shards of these shapes.

    Raises:
        ValueError: the grid can't be split this way.
    """
    grid = params["grid_mapping"]
    shapes = [tuple(s) for s in (*in_shapes[skipped_operands(grid) :], *out_shapes)]
    lengths = list(grid.grid)
    done = set()
    for axis in grid_axes(params, unused):
        ratios = set()
        for value, d in axis.sites:
            whole = compat.aval_shape(grid.block_mappings[value].array_aval)[d]
            done.add((value, d))
            ratios.add(whole / shapes[value][d])
        (ratio,) = ratios if len(ratios) == 1 else (0.0,)
        if ratio < 1 or axis.parts % ratio:
            raise ValueError(f"shards of {sorted(ratios)} along dimension {axis.dim} of the grid")
        lengths[axis.dim] = int(lengths[axis.dim] / ratio)
    mappings = []
    for value, (mapping, shape) in enumerate(zip(grid.block_mappings, shapes, strict=True)):
        before = compat.aval_shape(mapping.array_aval)
        pairs = enumerate(zip(before, shape, strict=True))
        if any(m != n and (value, d) not in done for d, (m, n) in pairs):
            raise ValueError(f"shards of shape {shape} of {before}")
        mappings.append(mapping.replace(array_aval=mapping.array_aval.update(shape=shape)))
    out_pairs = zip(params["out_avals"], out_shapes, strict=True)
    out = [aval.update(shape=tuple(shape)) for aval, shape in out_pairs]
    changed: dict[str, Any] = {
        "grid_mapping": grid.replace(grid=tuple(lengths), block_mappings=tuple(mappings)),
        "out_avals": tuple(out),
    }
    said = params.get("cost_estimate")
    if said is not None:
        share = _places(lengths) / _places(grid.grid)
        counts = {f: int(getattr(said, f) * share) for f in _COUNTS if hasattr(said, f)}
        changed["cost_estimate"] = dataclasses.replace(said, **counts)
    return {**params, **changed}


def _places(lengths: Sequence[Any]) -> int:
    """Number of places of a grid; dimensions of unknown length count as one."""
    return math.prod(n for n in lengths if isinstance(n, int))


def same_body(one: Any, other: Any) -> bool:
    """Whether two kernels do the same at each place of their grids."""
    grids = [grid_text(p["grid_mapping"]) for p in (one, other)]
    return grids[0] == grids[1] and program_text(one["jaxpr"]) == program_text(other["jaxpr"])
