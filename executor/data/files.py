"""Rows in files: counted once, numbered across all files, read file by file.

An epoch shuffles the files, and the rows in each. Batches then take equal runs of that order side
by side (``lanes``, one for each part that the batch is split into). The devices of one process
therefore read rows of only a few files, and all runs are equally long, however long the files are.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from executor.data.agree import everyones, everyones_bytes
from executor.data.common import DataError, RowLeaf
from executor.data.sources import Order, row_content, sample_rows, shuffled
from executor.processes.agreement.fingerprints import Fingerprint

Read = Callable[[Any], Any]
FIRST = 64
"""Rows of the first file that processes compare."""


def read_file(file: str | os.PathLike[str]) -> Any:
    """A ``.npy`` file as a memory map, a ``.npz`` file as a dict of arrays.

    Raises:
        DataError: another kind of file, or one that can't be read.
    """
    kind = Path(file).suffix
    try:
        if kind == ".npy":
            return np.load(file, mmap_mode="r")
        if kind == ".npz":
            with np.load(file) as archive:
                return dict(archive)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{file}: {error}") from error
    raise DataError(
        f"{file}: only .npy and .npz are read by themselves; pass read=, a function of a file "
        "that gives a pytree of arrays with rows first"
    )


class Files:
    """Rows of a list of files, the same list in all processes.

    Args:
        files: the arguments of ``read``.
        read: a file -> a pytree of arrays with rows first, of the same form for all files; the
            number of rows may differ.
        count: a file -> its number of rows, if that is cheaper than reading it. Each process counts
            its share of the files, then one collective shares the counts.

    Raises:
        DataError: there are no files or no rows, or the first file is not a pytree of arrays.
            Raised in all processes if one process can't read a file.
    """

    def __init__(
        self,
        files: Sequence[Any],
        read: Read = read_file,
        count: Callable[[Any], int] | None = None,
    ) -> None:
        if not files:
            raise DataError("no files: expected at least one")
        self.files, self._read = tuple(files), read
        self._open: OrderedDict[int, list[Any]] = OrderedDict()
        self._most = 2
        counts = self._counts(count)
        self._ends = np.cumsum(counts)
        self._rows = int(self._ends[-1])
        first = next((k for k, n in enumerate(counts) if n), None)
        if first is None:
            raise DataError(f"{len(files)} files with no rows in them")
        self.tree: Any
        leaves, self.tree = jax.tree_util.tree_flatten(read(self.files[first]))
        self._first = row_content(
            [np.array(x[:FIRST]) for x in leaves],
            f"rows of {os.path.basename(str(self.files[first]))}",
        )
        self.leaves: list[RowLeaf] = [
            jax.ShapeDtypeStruct((self._rows, *x.shape[1:]), x.dtype) for x in leaves
        ]

    def order(self, seed: int | None, epoch: int) -> Order:
        """The order of all rows in an epoch: the files are shuffled, and the rows of each file; a
        seed of None shuffles nothing."""
        if seed is None:
            return np.arange(self._rows)
        generator = np.random.default_rng([seed, epoch])
        starts = np.concatenate([[0], self._ends])
        files = shuffled(len(self.files), seed, epoch)
        return np.concatenate(
            [starts[k] + generator.permutation(starts[k + 1] - starts[k]) for k in files]
        )

    def read(self, leaf: int, rows: Order) -> Any:
        """Read rows of a leaf; opens the files that are not open."""
        like = self.leaves[leaf]
        out = np.empty((len(rows), *like.shape[1:]), like.dtype)
        which = np.searchsorted(self._ends, rows, side="right")
        for k in np.unique(which):
            here = which == k
            begin = self._ends[k - 1] if k else 0
            out[here] = self._file(int(k))[leaf][rows[here] - begin]
        return out

    def hold(self, lanes: int) -> None:
        """Keep one file per lane open, and one more while a lane moves to its next file."""
        self._most = lanes + 1

    def done(self) -> None:
        """Files stay open: the next batch continues in them."""

    def content(self) -> tuple[Fingerprint, ...]:
        """The sizes of SAMPLE files, and the first rows of the first."""
        chosen = [self.files[k] for k in sample_rows(len(self.files))]
        return (*(_size(file) for file in chosen), *self._first)

    def _counts(self, count: Callable[[Any], int] | None) -> list[int]:
        local_counts = np.full(len(self.files), -1)
        failed: Exception | None = None
        for k in range(jax.process_index(), len(self.files), jax.process_count()):
            try:
                local_counts[k] = count(self.files[k]) if count else self._length(self.files[k])
            except Exception as error:  # raised below, when no process waits for this one any more
                failed, local_counts[k] = error, -2
                break
        names = "\n".join(os.path.basename(str(file)) for file in self.files).encode()
        prints = everyones_bytes(hashlib.sha256(names).digest())
        others = [k for k, digest in enumerate(prints) if digest != prints[0]]
        if others:
            raise DataError(
                f"process {others[0]} has another list of files than process 0; give all the same, "
                "in the same order (glob does not sort)"
            )
        all_counts = everyones(local_counts)
        if failed is not None:
            raise failed
        bad = np.argwhere(all_counts == -2)
        if len(bad):
            process, k = bad[0]
            raise DataError(f"process {process} can't read {self.files[k]}: see what it says")
        return [int(n) for n in all_counts.max(axis=0)]

    def _length(self, file: Any) -> int:
        lengths = {int(x.shape[0]) for x in jax.tree_util.tree_leaves(self._read(file))}
        if len(lengths) != 1:
            raise DataError(f"{file}: its arrays have {sorted(lengths)} rows, expected one number")
        return lengths.pop()

    def _file(self, k: int) -> list[Any]:
        if k in self._open:
            self._open.move_to_end(k)
            return self._open[k]
        while len(self._open) >= self._most:
            self._open.popitem(last=False)
        leaves, tree = jax.tree_util.tree_flatten(self._read(self.files[k]))
        if tree != self.tree:
            raise DataError(f"{self.files[k]} holds {tree}, the first file {self.tree}")
        rows = int(self._ends[k] - (self._ends[k - 1] if k else 0))
        for leaf, like in zip(leaves, self.leaves, strict=True):
            expected = (rows, *like.shape[1:])
            if (leaf.shape, leaf.dtype) != (expected, like.dtype):
                raise DataError(
                    f"{self.files[k]} holds {leaf.dtype}{list(leaf.shape)}, expected "
                    f"{like.dtype}{list(expected)}"
                )
        self._open[k] = leaves
        return leaves


def _size(file: Any) -> Fingerprint:
    """A file's name and size; no size if it is not a file on this host."""
    name = os.path.basename(str(file))
    try:
        size = os.path.getsize(file)
    except (OSError, TypeError):
        return Fingerprint("", name)
    return Fingerprint(f"{name} {size}", f"{name} of {size} bytes")
