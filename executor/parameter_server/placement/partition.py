"""Partitioners: how many pieces an array is cut into, with TensorFlow's names.

They work like ``tf.distribute.experimental.partitioners``, except that pieces are runs of elements
of the flattened array, not of its first axis: an array with few rows is cut as evenly as any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol

from executor.parameter_server.server.clock import is_integer
from planner.errors import RequestError


class Partitioner(Protocol):
    """Gives the number of pieces of an array."""

    def pieces(self, elements: int, width: int) -> int:
        """The number of pieces of an array with ``elements`` elements of ``width`` bytes each."""


def _checked(partitioner: FixedShardsPartitioner | MinSizePartitioner | MaxSizePartitioner) -> None:
    """Check that all fields are whole numbers of at least 1; convert NumPy integers to Python's."""
    for field in fields(partitioner):
        got = getattr(partitioner, field.name)
        if got is None and field.default is None:
            continue
        if not is_integer(got) or got < 1:
            raise RequestError(
                f"{type(partitioner).__name__}: got {field.name}={got!r}, expected a whole number "
                "of at least 1"
            )
        object.__setattr__(partitioner, field.name, int(got))


@dataclass(frozen=True)
class FixedShardsPartitioner:
    """Cuts every array into the same number of pieces; one per element if it has fewer elements.

    Attributes:
        num_shards: number of pieces of an array.

    Raises:
        RequestError: no whole number of at least 1.
    """

    num_shards: int

    def __post_init__(self) -> None:
        _checked(self)

    def pieces(self, elements: int, width: int) -> int:
        """See ``Partitioner``."""
        return min(self.num_shards, elements)


@dataclass(frozen=True)
class MinSizePartitioner:
    """Cuts into the most pieces of at least a given size: for balanced servers, small arrays whole.

    Attributes:
        min_shard_bytes: no piece is smaller, unless the array is.
        max_shards: maximum number of pieces of an array, such as the number of servers.

    Raises:
        RequestError: no whole number of at least 1.

    >>> MinSizePartitioner(max_shards=4).pieces(200_000, 4)
    3
    """

    min_shard_bytes: int = 256 * 2**10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _checked(self)

    def pieces(self, elements: int, width: int) -> int:
        """See ``Partitioner``."""
        least = math.ceil(self.min_shard_bytes / width)
        return min(self.max_shards, max(1, elements // least))


@dataclass(frozen=True)
class MaxSizePartitioner:
    """Cuts into the fewest pieces of at most a given size: for messages that are not too large.

    Attributes:
        max_shard_bytes: no piece is larger, unless an element is, or ``max_shards`` requires it.
        max_shards: maximum number of pieces of an array; None for no bound.

    Raises:
        RequestError: no whole number of at least 1.

    >>> MaxSizePartitioner(256 * 2**10).pieces(200_000, 4)
    4
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _checked(self)

    def pieces(self, elements: int, width: int) -> int:
        """See ``Partitioner``."""
        count = math.ceil(elements / max(1, self.max_shard_bytes // width))
        return count if self.max_shards is None else min(self.max_shards, count)
