"""Buffers: bytes that a device holds for a while, under one decision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from planner.space.factors import Layout


class Memory(StrEnum):
    """A pool of memory."""

    DEVICE = "device"
    HOST = "host"


class Port(StrEnum):
    """Which of a group's shardings lays a buffer out."""

    USE = "use"
    STORE = "store"
    GATHERED = "gathered"
    """That of use, and only where it is another than that of the store: a copy made for use."""
    COPY = "copy"
    """That of use, and only where it is not split over all devices: a copy that is gathered. Of
    values that are written nowhere else."""


class When(NamedTuple):
    """A condition: the option that a group takes of a decision besides its sharding
    (``planner.space.decisions``)."""

    decision: str
    option: int


class Tiled(NamedTuple):
    """An array that lies in tiles: shards that do not fill theirs take as much as if they did.

    ``shape`` is that of the whole array; ``tile``: rows and lanes; ``lying``: the dimensions that
    may lie along the lanes, empty where any may.
    """

    shape: tuple[int, ...]
    tile: tuple[int, int]
    lying: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that a device holds for a while.

    Attributes:
        group: the decision that they follow from.
        start, end: the moments [start, end) at which they are there.
        nbytes: those of the elements of the whole array.
        layout: the factor of each dimension.
        port: which sharding of the group cuts them.
        when: only under this option; None: always.
        pool: the memory that they take room in.
        value: the value, -1 where one buffer stands for those of several.
        tiled: how it lies in memory, where that takes more than its elements do.
    """

    group: int
    start: int
    end: int
    nbytes: float
    layout: Layout
    port: Port
    when: When | None = None
    pool: Memory = Memory.DEVICE
    value: int = -1
    tiled: Tiled | None = None

    def at(self, moment: int) -> bool:
        """Whether it is there at a moment."""
        return self.start <= moment < self.end


def in_pool(buffers: Iterable[Buffer], pool: Memory = Memory.DEVICE) -> tuple[Buffer, ...]:
    """The buffers that take room in a pool of memory."""
    return tuple([b for b in buffers if b.pool is pool])
