"""Where a step's predicted compute goes: seconds by line of the user's code. No jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SHARE, MOST_LINES = 1e-3, 40
"""Lines with less of the compute are left out, and all behind so many."""


@dataclass(frozen=True)
class ComputeRow:
    """A line, ``file.py:line`` or empty where operations have none, and the seconds that one device
    computes there in a step; collectives are no part of them."""

    source: str
    time_s: float


def compute_rows(sources: Sequence[str], seconds: Sequence[float]) -> tuple[ComputeRow, ...]:
    """The lines that take longest, the longest first.

    Args:
        sources: per operation, its line.
        seconds: per operation, of all its runs in a step.
    """
    sums: dict[str, float] = {}
    for source, spent in zip(sources, seconds, strict=True):
        sums[source] = sums.get(source, 0.0) + spent
    least = LEAST_SHARE * sum(sums.values())
    order = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return tuple(ComputeRow(*item) for item in order[:MOST_LINES] if item[1] > least)
