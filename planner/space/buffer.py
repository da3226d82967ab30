"""Buffers: bytes that a device holds for some time, under one decision."""

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
    """The sharding of its group that lays out a buffer."""

    USE = "use"
    STORE = "store"
    GATHERED = "gathered"
    """The sharding of use, only if it differs from that of the store: a copy made for use."""
    COPY = "copy"
    """The sharding of use, only if it does not split the value over all devices: a gathered copy of
    a value that is not written otherwise."""


class When(NamedTuple):
    """A condition: the group takes this option of a decision other than its sharding
    (``planner.space.decisions``)."""

    decision: str
    option: int


class Tiled(NamedTuple):
    """An array stored in tiles: a shard that does not fill its tiles takes as much as if it did.

    ``shape`` is the shape of the whole array; ``tile``: rows and lanes; ``lying``: the dimensions
    that may lie along the lanes, empty if any may.
    """

    shape: tuple[int, ...]
    tile: tuple[int, int]
    lying: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that a device holds for some time.

    Attributes:
        group: the decision that determines its sharding.
        start, end: the moments [start, end) at which it is in memory.
        nbytes: bytes of the elements of the whole array.
        layout: the factor of each dimension.
        port: the sharding of the group that splits it.
        when: the option under which it exists; None: always.
        pool: the memory that it occupies.
        value: the value, -1 if the buffer stands for several values.
        tiled: its tiles, if these may take more bytes than its elements.
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
        """Whether it is in memory at a moment."""
        return self.start <= moment < self.end


def in_pool(buffers: Iterable[Buffer], pool: Memory = Memory.DEVICE) -> tuple[Buffer, ...]:
    """The buffers in a pool of memory."""
    return tuple([b for b in buffers if b.pool is pool])
