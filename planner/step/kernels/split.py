"""Products on a TPU whose contraction is split.

XLA:TPU keeps an operand that fits in the fast memory beside the processor there, and multiplies
tiles of whole rows by whole columns. If neither operand fits and the contraction is long, tiles
cover a part of it: a finished tile is written while the matrix unit waits, and every other array
that the kernel reads or writes makes the tiles smaller, so that operands are read more often.
docs/explanation/compute.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DEEP = 2560
"""Longest contraction that is not split."""
DRAGS = (1.0, 1.15, 1.36)
"""How many times longer a product with a split contraction takes if its kernel reads or writes no
further array, one, or more. Compiled: 1.09 to 1.28 for one, 1.32 to 1.58 for two, 1.48 to 1.63 for
three (libtpu 0.0.42; v5e, v5p, v6e, tpu7x). What the model counts as read by two products in front
of their multiplication is often written once, so more than two count as two."""


def drag(arrays: int) -> float:
    """How many times longer such a product takes with ``arrays`` further arrays."""
    return DRAGS[min(arrays, len(DRAGS) - 1)]


@dataclass(frozen=True)
class Split:
    """What a product takes if its contraction is split.

    Attributes:
        depth: length of the contraction; ``contracted``: the classes of its factors.
        fast_bytes: operands with at most this traffic over the step stay in fast memory.
        drag: times its FLOPs, for further arrays.
        result_bytes: bytes of its result in the vector unit over the step.
    """

    depth: float
    contracted: tuple[int, ...]
    fast_bytes: float
    drag: float
    result_bytes: float

    def applies(
        self, operands: Sequence[Array], cut: Callable[[tuple[int, ...]], Array]
    ) -> NDArray[np.bool_]:
        """Whether the contraction is split on a device.

        Args:
            operands: bytes of a device's part of each operand over the step.
            cut: the number of pieces into which some classes, given by index, are cut together.
        """
        deep = self.depth / cut(self.contracted) > DEEP
        split: NDArray[np.bool_] = deep & (np.minimum(*operands) > self.fast_bytes)
        return split
