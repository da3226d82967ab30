"""The parallel modes and the process-wide setting.

==================  ==========================================================
STAND_ALONE         one device
DATA_PARALLEL       parameters replicated, batch split over all devices
HYBRID_PARALLEL     exactly what is marked; everything else replicated
SEMI_AUTO_PARALLEL  what is marked, completed with data parallelism
AUTO_PARALLEL       what is marked is honored, everything else is searched
==================  ==========================================================

``SHORT`` has more names, in either case. ``dp`` and ``fsdp`` are DATA_PARALLEL with ZeRO levels 0
and 3. ``tp`` and ``fsdp+tp`` are AUTO_PARALLEL with every matrix split over a mesh axis ``model``
and ZeRO levels 0 and 3 over the rest. ``pp`` is AUTO_PARALLEL with two or more pipeline stages. The
search chooses the size of each axis.

Marks don't apply in the first two modes. DATA_PARALLEL can also use parameter servers
(``executor.parameter_server``); ``update`` then says how far apart workers may be.
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from dataclasses import dataclass

from planner.errors import RequestError

MODES = (
    "STAND_ALONE",
    "DATA_PARALLEL",
    "HYBRID_PARALLEL",
    "SEMI_AUTO_PARALLEL",
    "AUTO_PARALLEL",
)

TENSOR = "model"
"""The mesh axis of tensor parallelism."""

DEFAULT_SEARCH = "auto"
"""The search if none is given; one of ``planner.search.SEARCHES``."""

PROPAGATION = "sharding_propagation"
"""The search that only completes what is marked, with the least resharding."""


COMPILERS = ("tpu", "gpu")
"""Compilers that can confirm a plan."""

UPDATES = ("sync", "ssp", "async")
"""How the workers of a data-parallel run share updates."""


@dataclass(frozen=True)
class ParallelMode:
    """A mode and the search it uses.

    Attributes:
        mode: one of ``MODES``.
        search: a name of ``planner.search.SEARCHES``, or ``sharding_propagation``.
        update: "sync", gradients are summed over all devices in every step; or "ssp" or "async",
            workers push to parameter servers (``executor.parameter_server.train``).
        staleness: for "ssp", number of updates that a worker may be ahead of the slowest.
        zero: the ZeRO level that the mode's name implies, or None.
        tensor: the mesh axis over which the mode's name implies to split every matrix, or empty.
        staged: whether the mode's name implies pipeline stages.
    """

    mode: str = "AUTO_PARALLEL"
    search: str = DEFAULT_SEARCH
    update: str = "sync"
    staleness: int = 0
    zero: int | None = None
    tensor: str = ""
    staged: bool = False


SHORT = {
    "DP": ParallelMode("DATA_PARALLEL", zero=0),
    "FSDP": ParallelMode("DATA_PARALLEL", zero=3),
    "TP": ParallelMode(zero=0, tensor=TENSOR),
    "FSDP+TP": ParallelMode(zero=3, tensor=TENSOR),
    "PP": ParallelMode(staged=True),
}
"""Other names of modes, in capitals, with the options that they imply."""

ELSEWHERE = {
    "auto": "AUTO_PARALLEL",
    "ddp": "dp",
    "data": "dp",
    "hsdp": "fsdp with mesh='replica=...,data=...'",
    "hybrid": "HYBRID_PARALLEL",
    "none": "STAND_ALONE",
    "pipeline": "pp",
    "semi_auto": "SEMI_AUTO_PARALLEL",
    "single": "STAND_ALONE",
    "tensor": "tp",
    "tp+fsdp": "fsdp+tp",
    "zero": "fsdp",
    "zero1": "dp with zero=1",
    "zero2": "dp with zero=2",
    "zero3": "fsdp",
}
"""Names in other tools, in lowercase, and their equivalents here."""


def nearest_mode(name: str) -> str:
    """The mode that a wrong name most likely means; empty if no name is similar."""
    plain = name.lower().replace("-", "_").replace(" ", "")
    names = [known.lower() for known in (*SHORT, *MODES)]
    near = difflib.get_close_matches(plain, names, 1)
    nearest = ELSEWHERE.get(plain) or ELSEWHERE.get(plain.replace("_", "")) or (near or [""])[0]
    return nearest.upper() if nearest.upper() in MODES else nearest


_current = ParallelMode()


def set_parallel_mode(
    mode: str | ParallelMode,
    *,
    search: str = DEFAULT_SEARCH,
    update: str = "sync",
    staleness: int = 0,
) -> ParallelMode:
    """Set the mode that ``parallelize`` and ``make_plan`` use when none is given.

    Args:
        mode: one of ``MODES``, a name of ``SHORT``, or the return value of an earlier call, which
            restores all settings.
        search: a name of ``planner.search.SEARCHES``, or ``sharding_propagation``.
        update: one of ``UPDATES``; other than "sync" in DATA_PARALLEL only. It is also the default
            of ``executor.parameter_server.train``.
        staleness: for "ssp", number of updates that a worker may be ahead of the slowest.

    Returns:
        The previous mode.

    Raises:
        RequestError: unknown mode, search or update (lists the known ones), or an update or a
            staleness that does not apply to the mode.

    >>> before = set_parallel_mode("DATA_PARALLEL")
    >>> get_parallel_mode().mode
    'DATA_PARALLEL'
    >>> _ = set_parallel_mode(before)
    """
    global _current
    if isinstance(mode, ParallelMode):
        before, _current = _current, mode
        return before
    chosen = check_mode(mode, search)
    check_update(chosen.mode, update, staleness)
    before = _current
    _current = dataclasses.replace(chosen, update=update, staleness=int(staleness))
    return before


def get_parallel_mode() -> ParallelMode:
    """The current mode (AUTO_PARALLEL with search ``auto`` until one is set)."""
    return _current


def check_mode(mode: str, search: str) -> ParallelMode:
    """Validate names; raises RequestError."""
    from planner.search import SEARCHES

    known_as = [*MODES, *map(str.lower, SHORT)]
    named = SHORT.get(str(mode).upper(), ParallelMode(mode))
    if named.mode not in MODES:
        near = nearest_mode(str(mode))
        raise RequestError(
            f"unknown parallel mode {mode!r}; expected one of {', '.join(known_as)}"
            + (f"; did you mean {near}?" if near else "")
        )
    known = sorted([*SEARCHES, PROPAGATION])
    if search not in known:
        raise RequestError(f"unknown search {search!r}; expected one of {', '.join(known)}")
    return dataclasses.replace(named, search=search)


def check_update(mode: str, update: str, staleness: int) -> None:
    """Validate how updates are shared; raises RequestError."""
    if update not in UPDATES:
        raise RequestError(f"unknown update {update!r}; expected one of {', '.join(UPDATES)}")
    if update != "sync" and mode != "DATA_PARALLEL":
        raise RequestError(
            f"update={update!r} in mode {mode}: expected DATA_PARALLEL, the mode in which every "
            "worker has all parameters; or leave update out"
        )
    if not isinstance(staleness, numbers.Integral) or isinstance(staleness, bool):
        raise RequestError(
            f"staleness={staleness!r}: got {type(staleness).__name__}, expected a whole number"
        )
    if staleness < 0 or (staleness and update != "ssp"):
        raise RequestError(
            f"staleness={staleness} with update={update!r}: expected a number from 0 on, with "
            "update='ssp' only"
        )
