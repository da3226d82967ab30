"""Text that identifies a kernel: JAX's own text of a grid omits its index maps."""

from __future__ import annotations

import re
from typing import Any

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def program_text(jaxpr: Any) -> str:
    """A body as text, without the addresses of functions."""
    return _ADDRESS.sub("", str(jaxpr))


def grid_text(grid: Any) -> str:
    """The text of a grid without the shapes of its arrays: its counts and scratch memory, and the
    blocks and index maps of operands and results."""
    rows = [
        f"{m.block_shape} {m.transforms} {program_text(m.index_map_jaxpr)}"
        for m in grid.block_mappings
    ]
    counts = (grid.vmapped_dims, grid.num_index_operands, grid.num_inputs, grid.num_outputs)
    return f"{counts} {grid.scratch_avals} {rows}"


def kernel_text(params: Any) -> str:
    """The text of a whole kernel."""
    grid = params["grid_mapping"]
    arrays = [m.array_aval for m in grid.block_mappings]
    return f"{grid.grid} {arrays} {grid_text(grid)} {program_text(params['jaxpr'])}"
