"""What a server says: errors, counts and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from executor.parameter_server.placement.layout import Array
from planner.errors import RequestError


class WaitError(RequestError):
    """A deadline passed; says who waited, and for which workers."""


class LostError(RequestError):
    """A server, or all workers, were lost, with what they held."""


@dataclass
class Counts:
    """What a server did.

    Attributes:
        applied: pushes that are in the values.
        updates: how often the values changed.
        duplicates: pushes that came again, and were not applied again.
        discarded: pushes that were left out by the rule, by worker.
        lost: pushes that a server took before it was lost and that no copy had, by worker.
        lags: how many pushes had each lag, in updates between the read and the push.
    """

    applied: int = 0
    updates: int = 0
    duplicates: int = 0
    discarded: dict[int, int] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    lags: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Values:
    """What a read gives: the values (flat arrays, or rows of tables), and how many updates are in
    them."""

    version: int
    values: Mapping[str, Array]
