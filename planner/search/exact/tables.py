"""Hash-consed tables: equal arrays get one number, and work on them is done once.

A network of repeated layers has the same few cost tables many times.  ``Pool.intern`` gives equal
content the same id (a 32-bit checksum selects the bucket, an exact comparison decides);
``Pool.derive`` and ``Pool.note`` cache functions of interned tables under a key of ids.

Paper: Ershov, "On programming of arithmetic operations", CACM 1(8), 1958 (hash consing).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

from planner.search.problem import FORBIDDEN, Array

T = TypeVar("T")


class Pool:
    """Interned arrays.

    Args:
        share: if False, nothing is shared (every array gets a new id); for measuring and testing.
    """

    def __init__(self, share: bool = True) -> None:
        self.share = share
        self.tables: list[Array] = []
        self._buckets: dict[tuple[tuple[int, ...], str, int], list[int]] = {}
        self._objects: dict[int, tuple[Array, int]] = {}
        self._notes: dict[Hashable, Any] = {}

    def intern(self, array: Array) -> int:
        """Id of an array's content, in O(size)."""
        solid = np.ascontiguousarray(array)
        if not self.share:
            self.tables.append(solid)
            return len(self.tables) - 1
        key = (solid.shape, solid.dtype.str, zlib.crc32(solid.reshape(-1).view(np.uint8).data))
        bucket = self._buckets.setdefault(key, [])
        for candidate in bucket:
            if np.array_equal(self.tables[candidate], solid):
                return candidate
        bucket.append(len(self.tables))
        self.tables.append(solid)
        return bucket[-1]

    def intern_costs(self, array: Array) -> int:
        """Id of a cost table with infinite forbidden entries; O(1) for an object seen before."""
        known = self._objects.get(id(array))
        if known is not None and self.share:
            return known[1]
        clean = np.asarray(array, dtype=np.float64)
        if clean.size and clean.max() >= FORBIDDEN:
            clean = np.where(clean >= FORBIDDEN, np.inf, clean)
        index = self.intern(clean)
        self._objects[id(array)] = (array, index)
        return index

    def note(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, computed once for each key."""
        if not self.share:
            return make()
        if key not in self._notes:
            self._notes[key] = make()
        noted: T = self._notes[key]
        return noted

    def derive(self, key: Hashable, make: Callable[[], Array]) -> int:
        """Id of the table ``make()``, computed once for each key."""
        return self.note(key, lambda: self.intern(make()))

    def transposed(self, table: int) -> int:
        """Id of the transpose of a matrix."""
        return self.derive(("transpose", table), lambda: self.tables[table].T)

    def add(self, left: int, right: int) -> int:
        """Id of the sum of two tables of one shape."""
        return self.derive(("add", left, right), lambda: self.tables[left] + self.tables[right])

    def take(self, table: int, indices: int, axis: int) -> int:
        """Id of ``np.take(table, indices, axis)``; ``indices`` is itself interned."""
        return self.derive(
            ("take", table, indices, axis),
            lambda: np.take(self.tables[table], self.tables[indices], axis=axis),
        )
