"""The grid dimensions along which a Pallas kernel may be split, proved from the kernel itself.

A kernel runs its body once for every place of a grid. An index map gives the block of each operand
and result that a place reads or writes. A dimension of the grid may be split if

* the index map of each result gives block ``i // r`` for place i along it, and the index map of
  each operand either does the same or does not depend on the dimension;
* the body does not depend on the place along it, or only on that place modulo a number;
* no state of the kernel (scratch memory, unused results) passes from one place along it to the
  next.

The kernel on a shard is then the same kernel with a shorter grid (see ``local``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner import compat
from planner.rules.factor import FactorRule, canonical_rule
from planner.rules.kernels.pallas.body import draws, read_places, starts_anew, writes
from planner.rules.kernels.pallas.integers import run
from planner.rules.key import EqnKey

NAME = "pallas_call"
"""The primitive."""


@dataclass(frozen=True)
class GridAxis:
    """A dimension of a grid that may be split.

    Attributes:
        dim: its index in the grid.
        parts: the largest number of parts.
        sites: the dimensions of operands and results that are split with it, each as (position
            among the block mappings, dimension).
    """

    dim: int
    parts: int
    sites: tuple[tuple[int, int], ...]


def grid_rule(eqn: EqnKey) -> FactorRule | None:
    """The factor rule of a ``pallas_call``; None if it can't be split."""
    if eqn.name != NAME:
        return None
    axes = grid_axes(eqn.params, eqn.unused)
    if not axes:
        return None
    grid = eqn.params["grid_mapping"]
    skipped = len(eqn.in_shapes) - grid.num_inputs  # bounds of the grid, prefetched scalars
    shapes = (*eqn.in_shapes, *eqn.out_shapes)
    sizes = [axis.parts for axis in axes]
    dims: list[list[list[int]]] = []
    for value, shape in enumerate(shapes):
        dims.append([])
        for d, size in enumerate(shape):
            factors = [n for n, a in enumerate(axes) if (value - skipped, d) in a.sites]
            rest = size // math.prod(sizes[n] for n in factors)
            if rest > 1:
                sizes.append(rest)
                factors.append(len(sizes) - 1)
            dims[value].append(factors)
    count = len(eqn.in_shapes)
    return canonical_rule(
        dims[:count],
        dims[count:],
        sizes,
        eqn.in_shapes,
        eqn.out_shapes,
        replicated=range(len(axes), len(sizes)),
        origin="grid",
    )


def grid_axes(params: Any, unused: frozenset[int]) -> tuple[GridAxis, ...]:
    """The dimensions of a kernel's grid that may be split; ``unused``: indices of results."""
    grid = params["grid_mapping"]
    compiler = params.get("compiler_params")
    if params.get("mesh") is not None or getattr(compiler, "has_side_effects", False):
        return ()
    if getattr(compiler, "collective_id", None) is not None or grid.get_grid_indices is not None:
        return ()
    first = grid.num_index_operands
    if draws(params["jaxpr"]) or any(k < first + grid.num_inputs for k in writes(params["jaxpr"])):
        return ()
    written_for = [d for d in range(len(grid.grid)) if d not in grid.vmapped_dims]
    body = params["jaxpr"]
    read = {written_for[a]: period for a, period in read_places(body).items()}
    taken: set[tuple[int, int]] = set()
    out = []
    for dim, size in enumerate(grid.grid):
        period = read.get(dim, 1)
        if not isinstance(size, int) or size < 2 or not period:
            continue
        axis = _axis(params, dim, period, unused)
        if axis is None or taken.intersection(axis.sites):
            continue
        state = _state(grid, {value for value, _ in axis.sites})
        # places along jax.vmap's dimensions are independent; along others no state may carry over
        starts = [k for k, d in enumerate(written_for) if d > dim or (d == dim and d in read)]
        if state and dim in written_for and not starts_anew(body, state, starts):
            continue
        taken.update(axis.sites)
        out.append(axis)
    return tuple(out)


def _state(grid: Any, split: set[int]) -> list[int]:
    """The references that outlive a run of the body, by position among its arguments: scratch
    memory, and results that are not split."""
    first, count = grid.num_index_operands, len(grid.block_mappings)
    results = [first + k for k in range(grid.num_inputs, count) if k not in split]
    return [*results, *range(first + count, first + count + len(grid.scratch_avals))]


def _axis(params: Any, dim: int, period: int, unused: frozenset[int]) -> GridAxis | None:
    """A dimension of the grid, split into multiples of ``period`` places; None if the index maps
    prevent a split."""
    grid = params["grid_mapping"]
    size = grid.grid[dim]
    repeats: dict[tuple[int, int], int] = {}
    for value, mapping in enumerate(grid.block_mappings):
        outs = compat.body(mapping.index_map_jaxpr).outvars
        for d, out in enumerate(outs):
            if not _depends(mapping.index_map_jaxpr, out, dim):
                continue
            repeat = _repeat(mapping, d, dim, size)
            block = _block(mapping.block_shape[d])
            if repeat is None or block is None:
                return None
            if compat.aval_shape(mapping.array_aval)[d] != block * (size // repeat):
                return None
            repeats[value, d] = repeat
    together = math.lcm(period, *repeats.values())  # places that stay on one device
    split = [value for value, _ in repeats]
    used = [k for k in range(grid.num_outputs) if k not in unused]
    whole = len(set(split)) == len(split) and size % together == 0
    whole = whole and all(grid.num_inputs + k in split for k in used)
    for operand, result in params.get("input_output_aliases") or ():
        pair = operand - grid.num_index_operands, grid.num_inputs + result
        sites = [{d: r for (v, d), r in repeats.items() if v == value} for value in pair]
        whole = whole and sites[0] == sites[1]
    if not (whole and repeats and size > together):
        return None
    return GridAxis(dim, size // together, tuple(repeats))


def skipped_operands(grid: Any) -> int:
    """The number of operands before the arrays: bounds of the grid and prefetched scalars."""
    return int(grid.num_index_operands) + sum(not isinstance(n, int) for n in grid.grid)


def _block(dim: Any) -> int | None:
    """The size of a block's dimension; None if blocks may overlap."""
    name = type(dim).__name__
    if dim is None or name in ("Squeezed", "Mapped"):
        return 1
    if isinstance(dim, int):
        return dim
    return int(dim.block_size) if name == "Blocked" else None


def _depends(jaxpr: Any, out: Any, dim: int) -> bool:
    """Whether a result of an index map depends on a dimension of the grid."""
    if compat.is_literal(out):
        return False
    inner = compat.body(jaxpr)
    needed = {out}
    for eqn in reversed(inner.eqns):
        if needed.intersection(eqn.outvars) or eqn.primitive.name == "swap":
            needed.update(v for v in eqn.invars if not compat.is_literal(v))
    return inner.invars[dim] in needed


def _repeat(mapping: Any, d: int, dim: int, size: int) -> int | None:
    """The number of consecutive places with the same block: place i has block ``i // repeat`` in
    dimension ``d``. None if that does not hold at all places along the other dimensions."""
    inner = compat.body(mapping.index_map_jaxpr)
    places: list[Any] = [None] * len(inner.invars)
    places[dim] = np.arange(size, dtype=np.int32)
    if inner.outvars[d] is inner.invars[dim]:
        return 1
    blocks = run(mapping.index_map_jaxpr, places)[d]
    if blocks is None or np.shape(blocks) != (size,):
        return None
    repeat = size // (int(blocks[-1]) + 1) if blocks[-1] >= 0 else 0
    if repeat < 1 or size % repeat or not np.array_equal(blocks, np.arange(size) // repeat):
        return None
    return repeat
