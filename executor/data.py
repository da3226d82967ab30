"""Batches for a plan: every process reads only the rows that its devices hold.

All processes walk the same order of rows, drawn from a seed and the epoch: nothing has to be sent
to agree on it, all make the same number of batches, and a position (epoch and batch) is all that a
restart needs. Which rows, and which part of them, a process reads follows from the batch's
sharding: split over several axes, along the sequence as well, or replicated over a tensor axis.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from planner.errors import RequestError

POLICIES = ("drop", "pad", "leave")


class DataError(RequestError):
    """Data that can't be split as asked; says what was got, expected, and what to do."""


class Rows(Protocol):
    """One leaf of a source: rows in the first dimension, as arrays and memory maps have."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""

    @property
    def dtype(self) -> Any:
        """Of the elements."""

    def __getitem__(self, rows: Any) -> Any:
        """The rows at these indices."""


@dataclass(frozen=True)
class Position:
    """Where in the data a run is: the batch that comes next.

    ``rows``, ``batch_size`` and ``seed`` say of which data and order; plain numbers, for JSON.
    """

    epoch: int
    batch: int
    rows: int
    batch_size: int
    seed: int | None


class Batches:
    """Batches of a source, placed as a plan wants them, epoch after epoch; an iterator.

    Args:
        source: a pytree whose leaves have rows in their first dimension (arrays, memory maps).
        shardings: of one batch, a pytree of the same form or one for all: those of the plan, as
            ``step.prepare(state, batch).in_shardings[1]``.
        batch_size: rows of a batch, over all processes.
        seed: of the order of rows; None keeps the order of the source.
        policy: for the rows that do not fill a last batch: "drop" them, "pad" with the first rows
            of the epoch, or "leave" them as a smaller batch.
        epochs: how many; None goes on for ever.
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
        self._leaves, self._tree = jax.tree_util.tree_flatten(source)
        self._shardings = _broadcast(shardings, source)
        self._rows = _common_rows(source)
        self._size, self._seed, self._epochs, self._ahead = batch_size, seed, epochs, prefetch
        self._policy = policy
        _check(self._rows, batch_size, policy, prefetch)
        for count in {self._count_of(0), self._count_of(self.batches_per_epoch - 1)}:
            for leaf, sharding in zip(self._leaves, self._shardings, strict=True):
                _check_divides(sharding, (count, *leaf.shape[1:]))
        self._next = (0, 0)
        self._reader: _Reader | None = None

    @property
    def batches_per_epoch(self) -> int:
        """The same in every process."""
        whole, rest = divmod(self._rows, self._size)
        return whole + (rest > 0 and self._policy != "drop")

    @property
    def position(self) -> Position:
        """Of the batch that comes next; what was read ahead does not count."""
        return Position(*self._next, self._rows, self._size, self._seed)

    def seek(self, position: Position | Mapping[str, Any]) -> None:
        """Go to a position, as a Position or its fields.

        Raises:
            DataError: it is of other data, another batch size or another order.
        """
        if isinstance(position, Mapping):
            position = Position(**position)
        for name in ("rows", "batch_size", "seed"):
            got, here = getattr(position, name), getattr(self.position, name)
            if got != here:
                raise DataError(
                    f"the position is of data with {name} {got}, this has {name} {here}; the order "
                    "would not go on where it stopped"
                )
        self.close()
        self._next = (position.epoch, position.batch)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._epochs is not None and self._next[0] >= self._epochs:
            self.close()
            raise StopIteration
        if self._reader is None:
            self._reader = _Reader(self._made(self._next), self._ahead)
        batch = self._reader.take()
        epoch, number = self._next
        self._next = (epoch, number + 1) if number + 1 < self.batches_per_epoch else (epoch + 1, 0)
        return batch

    def _made(self, start: tuple[int, int]) -> Iterator[Any]:
        epoch, number = start
        while self._epochs is None or epoch < self._epochs:
            order = self._order(epoch)
            for k in range(number, self.batches_per_epoch):
                yield self._batch(order, k)
            epoch, number = epoch + 1, 0

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._seed is None:
            return np.arange(self._rows)
        return np.random.default_rng([self._seed, epoch]).permutation(self._rows)

    def _count_of(self, number: int) -> int:
        left = self._rows - number * self._size
        return min(left, self._size) if self._policy == "leave" else self._size

    def _batch(self, order: NDArray[np.int64], number: int) -> Any:
        begin, count = number * self._size, self._count_of(number)
        rows = np.take(order, range(begin, begin + count), mode="wrap")
        made = [
            _placed(leaf, rows, sharding)
            for leaf, sharding in zip(self._leaves, self._shardings, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self._tree, made)


def own_files(files: Sequence[Any]) -> tuple[Any, ...]:
    """This process's files: every n-th of a list that is the same in all n processes.

    Raises:
        DataError: fewer files than processes.
    """
    count, index = jax.process_count(), jax.process_index()
    if len(files) < count:
        raise DataError(
            f"{len(files)} files for {count} processes: every process needs one; split them further"
        )
    return tuple(files[index::count])


def agreed_steps(mine: int, policy: str = "drop") -> int:
    """How many steps all processes make when each has its own number: with "drop" the least, with
    "pad" the most (who has fewer repeats some). Ask once an epoch: who went on alone would hang.

    Raises:
        DataError: "leave", or an unknown policy: steps of a program over all processes can't
            differ.
    """
    if policy not in ("drop", "pad"):
        raise DataError(f"policy {policy!r}: processes can't make different numbers of steps")
    if jax.process_count() == 1:
        return mine
    from jax.experimental import multihost_utils

    counts = np.asarray(multihost_utils.process_allgather(np.asarray(mine)))
    return int(counts.min() if policy == "drop" else counts.max())


def _placed(leaf: Rows, rows: NDArray[np.int64], sharding: jax.sharding.Sharding) -> jax.Array:
    """One leaf of a batch as a global array; rows that several devices here hold are read once."""
    read: dict[tuple[int, int], Any] = {}

    def part(index: tuple[slice, ...] | None) -> Any:
        index = index or ()
        first = index[0] if index else slice(None)
        begin, end, _ = first.indices(len(rows))
        if (begin, end) not in read:
            read[begin, end] = np.asarray(leaf[rows[begin:end]])
        return read[begin, end][(slice(None), *index[1:])]

    return jax.make_array_from_callback((len(rows), *leaf.shape[1:]), sharding, part)


def _broadcast(shardings: Any, source: Any) -> list[jax.sharding.Sharding]:
    def is_one(x: Any) -> bool:
        return isinstance(x, jax.sharding.Sharding)

    full = jax.tree_util.tree_broadcast(shardings, source, is_leaf=is_one)
    return list(jax.tree_util.tree_leaves(full, is_leaf=is_one))


def _common_rows(source: Any) -> int:
    lengths = {
        jax.tree_util.keystr(path): int(leaf.shape[0])
        for path, leaf in jax.tree_util.tree_leaves_with_path(source)
    }
    if len(set(lengths.values())) != 1:
        told = ", ".join(f"{path or 'the source'} has {n}" for path, n in lengths.items())
        raise DataError(f"leaves must have equally many rows: {told or 'there are none'}")
    return next(iter(lengths.values()))


def _check(rows: int, batch_size: int, policy: str, prefetch: int) -> None:
    if policy not in POLICIES:
        raise DataError(f"policy {policy!r}: expected one of {', '.join(POLICIES)}")
    if batch_size < 1 or prefetch < 0:
        raise DataError(f"batch_size {batch_size}, prefetch {prefetch}: expected >= 1 and >= 0")
    if rows < 1 or (rows < batch_size and policy == "drop"):
        raise DataError(
            f"{rows} rows do not fill a batch of {batch_size}; use a smaller batch, or policy='pad'"
        )


def _check_divides(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> None:
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise DataError(
            f"a batch of shape {shape} can't be split as {getattr(sharding, 'spec', sharding)}: "
            "the devices do not divide it; choose another batch_size, or policy='drop' or 'pad'"
        ) from error


class _Reader:
    """Makes items ahead in a thread; an error there is raised where the item is taken."""

    def __init__(self, items: Iterator[Any], ahead: int) -> None:
        self.items = items
        self.ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(max(1, ahead))
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True) if ahead else None
        if self.thread is not None:
            self.thread.start()

    def take(self) -> Any:
        """The next item."""
        if self.thread is None:
            return next(self.items)
        item, error = self.ready.get()
        if error is not None:
            raise error
        return item

    def stop(self) -> None:
        """End the thread."""
        self.stopped.set()
        if self.thread is not None:
            self.thread.join()

    def _run(self) -> None:
        try:
            for item in self.items:
                if not self._put((item, None)):
                    return
        except BaseException as error:
            self._put((None, error))

    def _put(self, item: tuple[Any, BaseException | None]) -> bool:
        while not self.stopped.is_set():
            try:
                self.ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
