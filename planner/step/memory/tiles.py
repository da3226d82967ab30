"""How arrays lie in the tiles of a TPU: the bytes of padding, and how full registers are.

A register holds 8 rows of 128 lanes, and so does a tile in memory. Tiles of arrays with fewer rows
have 1, 2 or 4 rows (https://openxla.org/xla/tiled_layout).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.graph.ir import SCALAR, Graph, Op
from planner.space.buffer import Tiled
from planner.space.factors import Layout

COPIED = 1.25
"""Ratio of an array's padding to that of the best layout above which a product copies it."""


def padding(shape: tuple[int, ...], tile: tuple[int, int], lying: Sequence[int] = ()) -> float:
    """Ratio of the bytes that an array takes to those of its elements; ``tile``: rows and lanes.

    The compiler chooses the two minor dimensions that waste the least
    (https://openxla.org/xla/tiled_layout); ``lying``: the dimensions that may be the most minor
    one, empty if all may. Tiles of arrays with fewer rows have 1, 2 or 4 rows.
    """
    rows, lanes = tile
    if tile == (1, 1) or len(shape) < 2 or not all(shape):
        return 1.0
    wide = [-(-n // lanes) * lanes / n for n in shape]
    short = [min(rows, 1 << (n - 1).bit_length()) for n in shape]
    high = [-(-n // few) * few / n for n, few in zip(shape, short, strict=True)]
    return min(
        wide[i] * h for i in lying or range(len(shape)) for j, h in enumerate(high) if i != j
    )


def paddings(shape: Sequence[NDArray[np.int64]], tiled: Tiled) -> NDArray[np.float64]:
    """``padding`` of many shapes at once; ``shape``: an array of lengths per dimension."""
    rows, lanes = tiled.tile
    wide = [-(-n // lanes) * lanes / n for n in shape]
    short = [np.minimum(rows, 1 << np.ceil(np.log2(n)).astype(np.int64)) for n in shape]
    high = [-(-n // few) * few / n for n, few in zip(shape, short, strict=True)]
    best = np.full(shape[0].shape, np.inf)
    for i in tiled.lying or range(len(shape)):
        others = [h for j, h in enumerate(high) if j != i]
        best = np.minimum(best, wide[i] * functools.reduce(np.minimum, others))
    return best


def rows_used(shape: tuple[int, ...], tile: tuple[int, int]) -> float:
    """The share of a register's rows that an array of this shape fills, in (0, 1].

    Of the layouts that waste the least (``padding``), the compiler prefers the one with the last
    two dimensions minor: 4 heads of 128 fill half of the 8 rows, with no memory wasted. Dimensions
    of size 1 don't count.
    """
    rows, lanes = tile
    shape = tuple(n for n in shape if n != 1)
    if tile == (1, 1) or len(shape) < 2 or not all(shape):
        return 1.0
    best: tuple[float, bool, float] | None = None
    last = len(shape) - 2
    for i, n in enumerate(shape):
        for j, m in enumerate(shape):
            if i != j:
                short = min(rows, 1 << (m - 1).bit_length())
                waste = -(-n // lanes) * lanes / n * (-(-m // short) * short / m)
                key = (waste, i < last or j < last, -short / rows)
                best = key if best is None or key < best else best
    return 1.0 if best is None else -best[2]


def copied(
    graph: Graph, op: Op, layouts: Sequence[Layout], tile: tuple[int, int]
) -> Iterator[tuple[int, float, float]]:
    """The operands and results that a product copies, by position (operands first), with their
    padding in the product and in the best layout.

    XLA:TPU (libtpu 0.0.42) lays no batch dimension of a product into tiles. If the other dimensions
    are small, the best layout of an array has its batch along the lanes: it is copied before and
    after (docs/explanation/memory.md). ``layouts``: those of the operands and of the result.
    """
    if op.kind != "dot_general" or op.fused or tile == (1, 1):
        return
    batch = set(layouts[0]).intersection(*layouts[1:]) - {-1}
    values = (*op.inputs, *op.outputs)
    for place, (value, layout) in enumerate(zip(values, layouts, strict=True)):
        shape = () if value == SCALAR else graph.values[value].shape
        within = [n for n, f in zip(shape, layout, strict=False) if f not in batch]
        if batch and len(within) > 1:
            there, best = padding(tuple(within), tile), padding(shape, tile)
            if there > COPIED * best:
                yield place, there, best
