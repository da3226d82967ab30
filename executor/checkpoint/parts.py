"""Leaves that are on disk, and are read part by part when they are wanted.

What goes from one file to another is never in memory as a whole. A part is some rows of a leaf's
first dimension: `PART_BYTES`, or the rows that were saved together where they are larger, since a
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
"""Bytes of a part, and of a chunk of what is written."""

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Stored:
    """A leaf on disk.

    Attributes:
        path: its keys.
        shape: of the array.
        dtype: of its elements, as NumPy has it.
        read: a part -> its elements; raises CheckpointError, naming leaf and file, for damage.
        rows: of its first dimension that lie in one chunk on disk.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Index], np.ndarray]
    rows: int = 1

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    def parts(self, multiple: int = 1) -> Iterator[Index]:
        """Parts along the first dimension that make up the leaf, in order, each of a multiple of
        so many rows, and of those of a chunk."""
        whole = tuple(slice(0, n) for n in self.shape)
        if self.nbytes <= PART_BYTES or not self.shape:
            yield whole
            return
        multiple = math.lcm(multiple, self.rows)
        rows = max(1, PART_BYTES * self.shape[0] // self.nbytes // multiple) * multiple
        for begin in range(0, self.shape[0], rows):
            yield (slice(begin, min(begin + rows, self.shape[0])), *whole[1:])

    def whole(self) -> np.ndarray:
        """All of it."""
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
