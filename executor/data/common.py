"""Shared by all kinds of batches: positions, placing rows on devices, reading ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from planner.errors import RequestError

POLICIES = ("drop", "pad", "leave")


class DataError(RequestError):
    """Data that can't be split as requested; the message gives the actual and the expected value,
    and what to do."""


class RowLeaf(Protocol):
    """Shape and dtype of one leaf of a row, or of a whole source; arrays implement it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf, with rows first for a leaf of a source."""

    @property
    def dtype(self) -> Any:
        """Dtype of the elements."""


@dataclass(frozen=True)
class Position:
    """Position of a run in the data: the next batch.

    ``rows``, ``batch_size``, ``seed`` and ``lanes`` identify the data and its order (``rows`` is 0
    if unknown). ``states`` are the states of the iterators, one per lane, at the start of the block
    that the last batch came from. All are plain numbers and strings, for JSON.
    """

    epoch: int
    batch: int
    rows: int
    batch_size: int
    seed: int | None
    lanes: int = 1
    states: tuple[str, ...] = ()


def position_of(position: Position | Mapping[str, Any], here: Position) -> Position:
    """A position, or its fields, checked against the current position ``here`` of a run.

    Raises:
        DataError: it is not a position, or it belongs to other data, another batch size or another
            order.
    """
    if not isinstance(position, Position):
        fields = dict(position)
        try:
            position = Position(**fields)
        except TypeError as error:
            raise DataError(f"not a position: {fields}: {error}") from error
    for name in ("rows", "batch_size", "seed"):
        got, have = getattr(position, name), getattr(here, name)
        if got != have:
            raise DataError(
                f"the position is of data with {name} {got}, this has {name} {have}; the order "
                "would not go on where it stopped"
            )
    return position


def check_request(batch_size: int, policy: str, prefetch: int) -> None:
    """Raise DataError for an unknown policy or invalid sizes."""
    if policy not in POLICIES:
        raise DataError(f"policy {policy!r}: expected one of {', '.join(POLICIES)}")
    if batch_size < 1 or prefetch < 0:
        raise DataError(f"batch_size {batch_size}, prefetch {prefetch}: expected >= 1 and >= 0")


def sharding_list(shardings: Any, tree: Any) -> list[jax.sharding.Sharding]:
    """One sharding per leaf, from a pytree of the same form or of a part of it, or one for all.

    Raises:
        DataError: the forms differ.
    """

    def is_one(x: Any) -> bool:
        return isinstance(x, jax.sharding.Sharding)

    try:
        full = jax.tree_util.tree_broadcast(shardings, tree, is_leaf=is_one)
    except ValueError as error:
        raise DataError(f"shardings and rows have different forms: {error}") from error
    return list(jax.tree_util.tree_leaves(full, is_leaf=is_one))


def check_divides(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> None:
    """Raise DataError if a batch of this shape can't be split by the sharding."""
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise DataError(
            f"a batch of shape {shape} can't be split as {getattr(sharding, 'spec', sharding)}: "
            "the devices do not divide it; choose another batch_size, or policy='drop' or 'pad'"
        ) from error


def lanes_of(shardings: Sequence[jax.sharding.Sharding], shapes: Sequence[tuple[int, ...]]) -> int:
    """Into how many parts the rows of a batch are split: the largest number over its leaves."""
    return max(
        shape[0] // sharding.shard_shape(shape)[0]
        for sharding, shape in zip(shardings, shapes, strict=True)
    )


def own_lanes(
    shardings: Sequence[jax.sharding.Sharding], shapes: Sequence[tuple[int, ...]], lanes: int
) -> tuple[int, ...]:
    """The lanes, equal runs of a batch's rows, of which this process's devices hold rows."""
    local_lanes: set[int] = set()
    for sharding, shape in zip(shardings, shapes, strict=True):
        size = shape[0] // lanes
        for index in sharding.addressable_devices_indices_map(shape).values():
            begin, end, _ = (index or (slice(None),))[0].indices(shape[0])
            local_lanes.update(range(begin // size, -(-end // size)))
    return tuple(sorted(local_lanes))


def global_array(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: jax.sharding.Sharding,
    read: Callable[[int, int], Any],
) -> jax.Array:
    """One leaf of a batch as a global array.

    Args:
        shape: shape of the leaf in the whole batch, rows first.
        dtype: dtype of its elements.
        sharding: its sharding.
        read: (begin, end) -> those rows of the batch; called once per range, however many local
            devices hold it.
    """
    rows: dict[tuple[int, int], Any] = {}

    def part(index: tuple[slice, ...] | None) -> Any:
        index = index or (slice(None),)
        begin, end, _ = index[0].indices(shape[0])
        if (begin, end) not in rows:
            rows[begin, end] = np.asarray(read(begin, end))
        return rows[begin, end][(slice(None), *index[1:])]

    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)


class RowReader:
    """Makes items ahead in a thread; `take` raises the errors of the thread."""

    def __init__(self, items: Iterator[Any], ahead: int) -> None:
        self.items = items
        self.ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(max(1, ahead))
        self.failed: BaseException | None = None
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True) if ahead else None
        if self.thread is not None:
            self.thread.start()

    def take(self) -> Any:
        """The next item."""
        if self.thread is None:
            return next(self.items)
        if self.failed is None:
            item, self.failed = self.ready.get()
        if self.failed is not None:
            raise self.failed
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
            self._put((None, StopIteration()))
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
