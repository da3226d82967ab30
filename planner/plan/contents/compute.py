"""Where a step's predicted compute goes: seconds by line of the user's code. No jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SHARE, MOST_LINES = 1e-3, 40
"""Lines with a smaller share of the compute are left out, and those after the first so many."""


@dataclass(frozen=True)
class ComputeRow:
    """The seconds per step that one device computes for a line, without collectives. The line is
    ``file.py:line``, or empty for operations without one."""

    source: str
    time_s: float


def compute_rows(sources: Sequence[str], seconds: Sequence[float]) -> tuple[ComputeRow, ...]:
    """The lines that take longest, in descending order.

    Args:
        sources: per operation, its line.
        seconds: per operation, seconds of all its runs in a step.
    """
    sums: dict[str, float] = {}
    for source, spent in zip(sources, seconds, strict=True):
        sums[source] = sums.get(source, 0.0) + spent
    least = LEAST_SHARE * sum(sums.values())
    order = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return tuple(ComputeRow(*item) for item in order[:MOST_LINES] if item[1] > least)
