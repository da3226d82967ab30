"""Sources whose rows are numbered: any process can read any row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from executor.data.common import DataError, RowLeaf
from executor.processes.agreement.fingerprints import Fingerprint, array_hash

Order = NDArray[np.int64]


class Source(Protocol):
    """Rows by number.

    Attributes:
        leaves: shapes [rows, ...] and dtypes of the leaves.
        tree: the tree structure of the leaves.
    """

    leaves: list[RowLeaf]
    tree: Any

    def order(self, seed: int | None, epoch: int) -> Order:
        """All rows once, in the order of an epoch; the same in every process."""

    def read(self, leaf: int, rows: Order) -> Any:
        """Some rows of one leaf, [len(rows), ...]."""

    def hold(self, lanes: int) -> None:
        """Set how many runs of the order are read side by side."""

    def done(self) -> None:
        """Release what was held for a batch that is complete."""

    def content(self) -> tuple[Fingerprint, ...]:
        """Content of the rows, to compare between processes: all of it, or a sample."""


WHOLE = 1 << 32
"""Bytes of an array in memory up to which all of it is compared."""
SAMPLE = 256
"""Rows that are compared of larger or memory-mapped arrays; files that are compared of a list."""


def sample_rows(rows: int, most: int = SAMPLE) -> Order:
    """Some rows, evenly spaced, including the first and the last.

    >>> sample_rows(1000, 3)
    array([  0, 499, 999])
    """
    return np.unique(np.linspace(0, rows - 1, min(rows, most)).astype(np.int64))


def row_content(leaves: Sequence[Any], what: str) -> tuple[Fingerprint, ...]:
    """Fingerprints of the leaves of some rows."""
    return tuple(Fingerprint(f"{k} {array_hash(x)}", what, x) for k, x in enumerate(leaves))


def shuffled(rows: int, seed: int | None, epoch: int) -> Order:
    """The numbers below ``rows``, in an order drawn from seed and epoch; a seed of None keeps their
    order."""
    if seed is None:
        return np.arange(rows)
    return np.random.default_rng([seed, epoch]).permutation(rows)


class Arrays:
    """A pytree of arrays or memory maps, rows in the first dimension.

    Raises:
        DataError: leaves of different lengths, leaves without rows, or none.
    """

    def __init__(self, source: Any) -> None:
        self.leaves, self.tree = jax.tree_util.tree_flatten(source)
        if not all(getattr(leaf, "shape", ()) for leaf in self.leaves):
            raise DataError("a source is a pytree of arrays with rows in their first dimension")
        lengths = {
            jax.tree_util.keystr(path): int(leaf.shape[0])
            for path, leaf in jax.tree_util.tree_leaves_with_path(source)
        }
        if len(set(lengths.values())) != 1:
            listing = ", ".join(f"{path or 'the source'} has {n}" for path, n in lengths.items())
            raise DataError(f"leaves must have equally many rows: {listing or 'there are none'}")
        self._rows = next(iter(lengths.values()))

    def order(self, seed: int | None, epoch: int) -> Order:
        """All rows, shuffled as a whole."""
        return shuffled(self._rows, seed, epoch)

    def read(self, leaf: int, rows: Order) -> Any:
        """Read rows of a leaf; only these rows of an array or memory map are read."""
        array: Any = self.leaves[leaf]
        return np.asarray(array[rows])

    def hold(self, lanes: int) -> None:
        """Nothing is held."""

    def done(self) -> None:
        """Nothing is held."""

    def content(self) -> tuple[Fingerprint, ...]:
        """Arrays in memory of up to WHOLE bytes, and SAMPLE rows of the others."""
        fingerprints: list[Fingerprint] = []
        for k, leaf in enumerate(self.leaves):
            whole = isinstance(leaf, np.ndarray) and not _is_mapped(leaf) and leaf.nbytes <= WHOLE
            rows = leaf if whole else self.read(k, sample_rows(self._rows))
            fingerprints += row_content([rows], f"array {k} of the rows")
        return tuple(fingerprints)


def _is_mapped(array: Any) -> bool:
    """Whether an array, or what it is a view of, is mapped from a file."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return array is not None


class Elements:
    """A random-access source: it has ``len(source)`` rows, and ``source[k]`` is one row, a pytree.
    Examples are ``grain.MapDataset`` and ``grain.sources.RandomAccessDataSource``.

    Raises:
        DataError: it is empty or endless, or row 0 is not a pytree of arrays.
    """

    def __init__(self, source: Any) -> None:
        self._source, self._rows = source, len(source)
        if not 0 < self._rows < 2**48:
            raise DataError(
                f"{type(source).__name__} has {self._rows} rows: expected some, and an end; leave "
                "repeat() out, epochs= says how often"
            )
        first, self.tree = jax.tree_util.tree_flatten(source[0])
        if not first:
            raise DataError(f"row 0 of {type(source).__name__} is empty: expected arrays")
        self._form = [np.asarray(x) for x in first]
        self.leaves: list[RowLeaf] = [
            jax.ShapeDtypeStruct((self._rows, *x.shape), x.dtype) for x in self._form
        ]
        self._held: dict[int, list[Any]] = {}

    def order(self, seed: int | None, epoch: int) -> Order:
        """All rows, shuffled as a whole."""
        return shuffled(self._rows, seed, epoch)

    def read(self, leaf: int, rows: Order) -> Any:
        """Read rows of a leaf; each row is read once per batch, however many leaves it has."""
        return np.stack([self._row(int(k))[leaf] for k in rows])

    def hold(self, lanes: int) -> None:
        """The rows of a batch are held, whatever the number of lanes."""

    def done(self) -> None:
        """Release the rows."""
        self._held.clear()

    def content(self) -> tuple[Fingerprint, ...]:
        """The first row, a middle one and the last."""
        return tuple(
            entry
            for k in sample_rows(self._rows, 3)
            for entry in row_content(
                jax.tree_util.tree_leaves(self._source[int(k)]), f"row {k} of the source"
            )
        )

    def _row(self, k: int) -> list[Any]:
        if k not in self._held:
            self._held[k] = same_form(self._source[k], self.tree, self._form, f"row {k}")
        return self._held[k]


def same_form(row: Any, tree: Any, form: list[Any], where: str) -> list[Any]:
    """The leaves of a row as arrays.

    Raises:
        DataError: their form, shapes or dtypes differ from those of the first row (``form``).
    """
    leaves, row_tree = jax.tree_util.tree_flatten(row)
    if row is None:
        raise DataError(f"{where} is None, as filter() leaves it; use to_iter_dataset() after it")
    if row_tree != tree:
        raise DataError(f"{where} is {row_tree}, the first is {tree}")
    arrays = [np.asarray(x) for x in leaves]
    for k, (got, first) in enumerate(zip(arrays, form, strict=True)):
        if (got.shape, got.dtype) != (first.shape, first.dtype):
            raise DataError(
                f"{where}: leaf {k} is {got.dtype}{list(got.shape)}, of the first row it is "
                f"{first.dtype}{list(first.shape)}; pad or cut them to one shape"
            )
    return arrays
