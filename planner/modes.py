"""The parallel modes and the process-wide setting.

==================  ==========================================================
STAND_ALONE         one device
DATA_PARALLEL       parameters replicated, batch split over all devices
HYBRID_PARALLEL     exactly what is marked; everything else replicated
SEMI_AUTO_PARALLEL  what is marked, completed with data parallelism
AUTO_PARALLEL       what is marked is kept, everything else is searched
==================  ==========================================================

Marks don't apply in the first two modes.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import RequestError

MODES = (
    "STAND_ALONE",
    "DATA_PARALLEL",
    "HYBRID_PARALLEL",
    "SEMI_AUTO_PARALLEL",
    "AUTO_PARALLEL",
)


PROPAGATION = "sharding_propagation"
"""The search that only completes what is marked, with the least resharding."""


@dataclass(frozen=True)
class ParallelMode:
    """A mode and the search it uses."""

    mode: str = "AUTO_PARALLEL"
    search: str = "auto"


_current = ParallelMode()


def set_parallel_mode(mode: str, *, search: str = "auto") -> ParallelMode:
    """Set the mode that ``parallelize`` and ``make_plan`` use when none is given.

    Args:
        mode: one of ``MODES``.
        search: a name of ``planner.search.SEARCHES``, or ``sharding_propagation``.

    Returns:
        The mode that was in force before.

    Raises:
        RequestError: unknown mode or search; lists the known ones.

    >>> before = set_parallel_mode("DATA_PARALLEL")
    >>> get_parallel_mode().mode
    'DATA_PARALLEL'
    >>> _ = set_parallel_mode(before.mode, search=before.search)
    """
    global _current
    before, _current = _current, check_mode(mode, search)
    return before


def get_parallel_mode() -> ParallelMode:
    """The mode in force (AUTO_PARALLEL with search ``auto`` until one is set)."""
    return _current


def check_mode(mode: str, search: str) -> ParallelMode:
    """Validate names; raises RequestError."""
    from planner.search import SEARCHES

    if mode not in MODES:
        raise RequestError(f"unknown parallel mode {mode!r}; expected one of {', '.join(MODES)}")
    known = sorted([*SEARCHES, PROPAGATION])
    if search not in known:
        raise RequestError(f"unknown search {search!r}; expected one of {', '.join(known)}")
    return ParallelMode(mode, search)
