"""Batches of numbered rows: every process reads only the rows that its devices hold.

All processes use the same order of rows, drawn from a seed and the epoch. No communication is
needed to agree on it, all make the same number of batches, and a restart needs only a position
(epoch and batch), with any number of processes. The batch's sharding determines which rows, and
which part of them, a process reads: split over several axes, along the sequence as well, or
replicated over a tensor axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from executor.data.common import (
    DataError,
    Position,
    RowReader,
    check_divides,
    check_request,
    global_array,
    lanes_of,
    own_lanes,
    position_of,
    sharding_list,
)
from executor.data.compare import compare_data
from executor.data.files import Files
from executor.data.sources import Arrays, Elements, Order


class Batches:
    """Batches of a source, sharded as a plan specifies, epoch after epoch; an iterator.

    Args:
        source: a pytree whose leaves have rows in their first dimension (arrays, memory maps), or
            a `Files` or `Elements`.
        shardings: shardings of one batch, a pytree of the same form or one for all leaves: those of
            the plan, such as ``step.prepare(state, batch).in_shardings[1]``.
        batch_size: rows of a batch, over all processes.
        seed: seed of the order of rows; None keeps the order of the source.
        policy: for the rows that do not fill a last batch: "drop" them, "pad" with the first rows
            of the epoch, or "leave" them as a smaller batch.
        epochs: number of epochs; None continues forever.
        prefetch: batches to read ahead, in a thread.

    Raises:
        DataError: leaves of different lengths, fewer rows than a batch, an unknown policy, or a
            last batch that the devices do not divide.
    """

    def __init__(
        self,
        source: Any,
        shardings: Any,
        *,
        batch_size: int,
        seed: int | None = 0,
        policy: str = "drop",
        epochs: int | None = None,
        prefetch: int = 2,
    ) -> None:
        self._source = source if isinstance(source, Files | Elements) else Arrays(source)
        leaves, tree = self._source.leaves, self._source.tree
        self._shardings = sharding_list(shardings, jax.tree_util.tree_unflatten(tree, leaves))
        self._rows = int(leaves[0].shape[0])
        self._size, self._seed, self._epochs, self._ahead = batch_size, seed, epochs, prefetch
        self._policy = policy
        check_request(batch_size, policy, prefetch)
        if self._rows < 1 or (self._rows < batch_size and policy == "drop"):
            raise DataError(
                f"{self._rows} rows do not fill a batch of {batch_size}; use a smaller batch, or "
                "policy='pad'"
            )
        for count in {self._count_of(0), self._count_of(self.batches_per_epoch - 1)}:
            for sharding, shape in zip(self._shardings, self._shapes(count), strict=True):
                check_divides(sharding, shape)
        in_lanes = isinstance(source, Files) and seed is not None
        self._in_lanes(lanes_of(self._shardings, self._shapes(batch_size)) if in_lanes else 1)
        self._next = (0, 0)
        self._reader: RowReader | None = None
        self._compared = False

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in an epoch; the same in every process."""
        whole, rest = divmod(self._rows, self._size)
        return whole + (rest > 0 and self._policy != "drop")

    @property
    def position(self) -> Position:
        """Position of the next batch; batches that were read ahead do not count."""
        return Position(*self._next, self._rows, self._size, self._seed, self._lanes)

    def seek(self, position: Position | Mapping[str, Any]) -> None:
        """Go to a position, given as a Position or its fields.

        Raises:
            DataError: it belongs to other data, another batch size or another order.
        """
        target = position_of(position, self.position)
        if target.epoch < 0 or not 0 <= target.batch < self.batches_per_epoch:
            raise DataError(
                f"the position is batch {target.batch} of epoch {target.epoch}; with policy "
                f"{self._policy!r} an epoch has {self.batches_per_epoch} batches here"
            )
        self.close()
        self._in_lanes(target.lanes)
        self._next = (target.epoch, target.batch)

    def compare(self) -> None:
        """Compare the data with that of the other processes, once; the first batch does this too.

        Raises:
            ProcessMismatchError: they differ; raised in all processes.
        """
        if not self._compared:
            self._compared = True
            options = {"policy": self._policy, "epochs": self._epochs}
            compare_data(self.position, options, self._shardings, self._source.content)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        self.compare()
        if self._epochs is not None and self._next[0] >= self._epochs:
            self.close()
            raise StopIteration
        if self._reader is None:
            self._reader = RowReader(self._made(self._next), self._ahead)
        batch = self._reader.take()
        epoch, number = self._next
        self._next = (epoch, number + 1) if number + 1 < self.batches_per_epoch else (epoch + 1, 0)
        return batch

    def _shapes(self, count: int) -> list[tuple[int, ...]]:
        return [(count, *leaf.shape[1:]) for leaf in self._source.leaves]

    def _in_lanes(self, lanes: int) -> None:
        if lanes < 1 or self._size % lanes:
            raise DataError(f"a batch of {self._size} rows can't be read in {lanes} lanes")
        self._lanes = lanes
        local_lanes = own_lanes(self._shardings, self._shapes(self._size), lanes)
        self._source.hold(len(local_lanes))

    def _made(self, start: tuple[int, int]) -> Iterator[Any]:
        epoch, number = start
        while self._epochs is None or epoch < self._epochs:
            order = side_by_side(self._source.order(self._seed, epoch), self._size, self._lanes)
            for k in range(number, self.batches_per_epoch):
                yield self._batch(order, k)
            epoch, number = epoch + 1, 0

    def _count_of(self, number: int) -> int:
        left = self._rows - number * self._size
        return min(left, self._size) if self._policy == "leave" else self._size

    def _batch(self, order: Order, number: int) -> Any:
        begin, count = number * self._size, self._count_of(number)
        rows = np.take(order, range(begin, begin + count), mode="wrap")
        source = self._source

        def leaf(k: int) -> jax.Array:
            like, sharding = source.leaves[k], self._shardings[k]
            shape = (count, *like.shape[1:])
            return global_array(shape, like.dtype, sharding, lambda i, j: source.read(k, rows[i:j]))

        leaves = [leaf(k) for k in range(len(source.leaves))]
        source.done()
        return jax.tree_util.tree_unflatten(source.tree, leaves)


def side_by_side(order: Order, size: int, lanes: int) -> Order:
    """Reorder rows so that every batch of ``size`` rows takes ``size / lanes`` rows from each of
    ``lanes`` equal runs of the given order; the rows left over stay at the end."""
    whole = len(order) // size * size
    runs = order[:whole].reshape(lanes, -1, size // lanes)
    return np.concatenate([runs.transpose(1, 0, 2).reshape(-1), order[whole:]])
