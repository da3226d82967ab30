"""Answers of a server: errors, counts and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from executor.parameter_server.placement.layout import Array
from planner.errors import RequestError


class WaitError(RequestError):
    """A deadline passed; the message names what waited, and what it waited for."""


class LostError(RequestError):
    """A server, or all workers, were lost, together with the data that they held."""


@dataclass
class Counts:
    """Counters of a server.

    Attributes:
        applied: pushes that are in the values.
        updates: number of times that the values changed.
        duplicates: pushes that arrived again, and were not applied again.
        discarded: pushes that the rule dropped, by worker.
        lost: pushes that a server accepted before it was lost and that no copy had, by worker.
        lags: number of pushes by lag, which is the number of updates between the read and the push.
    """

    applied: int = 0
    updates: int = 0
    duplicates: int = 0
    discarded: dict[int, int] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    lags: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Values:
    """The result of a read: the values (flat arrays, or rows of tables), and the number of updates
    in them."""

    version: int
    values: Mapping[str, Array]
