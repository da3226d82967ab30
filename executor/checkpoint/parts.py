"""Leaves on disk that are read in parts, on demand.

Leaves that are copied from one file to another are never in memory as a whole. A part is a range of
rows of a leaf's first dimension: `PART_BYTES`, or the rows of one chunk if that is larger, since a
chunk on disk is read as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from executor.checkpoint.common import CheckpointError, Path, path_text

PART_BYTES = 64 * 2**20
"""Bytes of a part, and of a chunk that is written."""

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Stored:
    """A leaf on disk.

    Attributes:
        path: its keys.
        shape: shape of the array.
        dtype: NumPy dtype of the elements.
        read: a part -> its elements; raises CheckpointError, which names leaf and file, if damaged.
        rows: rows of the first dimension in one chunk on disk.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Index], np.ndarray]
    rows: int = 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def parts(self, multiple: int = 1) -> Iterator[Index]:
        """Parts along the first dimension that make up the leaf, in order. Each but the last has a
        number of rows that is a multiple of ``multiple`` and of the rows of a chunk."""
        whole = tuple(slice(0, n) for n in self.shape)
        if self.nbytes <= PART_BYTES or not self.shape:
            yield whole
            return
        multiple = math.lcm(multiple, self.rows)
        rows = max(1, PART_BYTES * self.shape[0] // self.nbytes // multiple) * multiple
        for begin in range(0, self.shape[0], rows):
            yield (slice(begin, min(begin + rows, self.shape[0])), *whole[1:])

    def whole(self) -> np.ndarray:
        """The whole leaf."""
        return self.read(tuple(slice(0, n) for n in self.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.whole() if dtype is None else self.whole().astype(dtype)

    def cast(self, dtype: np.dtype[Any]) -> Stored:
        """The same leaf with elements of another type, rounded part by part.

        Raises:
            CheckpointError (when read): a number is too large for the type.
        """

        def rounded(index: Index) -> np.ndarray:
            with np.errstate(over="ignore"):
                before = self.read(index)
                after = before.astype(dtype)
            lost = np.isfinite(before.astype(np.float64)) & ~np.isfinite(after.astype(np.float64))
            if lost.any():
                raise CheckpointError(
                    f"{path_text(self.path)} has {before[lost].flat[0]}, too large for {dtype}; "
                    "choose another type, or leave this leaf out"
                )
            return after

        return replace(self, dtype=dtype, read=rounded)
