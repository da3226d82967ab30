"""Into how many pieces an array is cut, by names that users of TensorFlow know.

As ``tf.distribute.experimental.partitioners``, except that pieces are runs of elements of the
flattened array, not of its first axis: an array with few rows is cut as evenly as any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol

from executor.parameter_server.server.clock import is_integer
from planner.errors import RequestError


class Partitioner(Protocol):
    """Says how many pieces an array becomes."""

    def pieces(self, elements: int, width: int) -> int:
        """The number of pieces of an array of so many elements, each ``width`` bytes."""


def _checked(partitioner: FixedShardsPartitioner | MinSizePartitioner | MaxSizePartitioner) -> None:
    """Refuse what is no number of pieces or bytes; NumPy's numbers become those of Python."""
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
    """Every array in equally many pieces, where it has as many elements.

    Attributes:
        num_shards: pieces of an array.

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
    """As many pieces as there can be of at least a size: for even servers, small arrays whole.

    Attributes:
        min_shard_bytes: no piece is smaller, unless the array is.
        max_shards: pieces of an array at most, such as the number of servers.

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
    """As few pieces as there can be of at most a size: for messages that are not too large.

    Attributes:
        max_shard_bytes: no piece is larger, unless an element is, or ``max_shards`` says so.
        max_shards: pieces of an array at most; None for no bound.

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
