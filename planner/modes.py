"""The parallel modes and the process-wide setting.

==================  ==========================================================
STAND_ALONE         one device
DATA_PARALLEL       parameters replicated, batch split over all devices
HYBRID_PARALLEL     exactly what is marked; everything else replicated
SEMI_AUTO_PARALLEL  what is marked, completed with data parallelism
AUTO_PARALLEL       what is marked is kept, everything else is searched
==================  ==========================================================

By the names of ``SHORT``, in small letters too: ``dp`` and ``fsdp`` are DATA_PARALLEL with ZeRO
levels 0 and 3. ``tp`` and ``fsdp+tp`` are AUTO_PARALLEL with every matrix split over a mesh axis
``model`` and ZeRO levels 0 and 3 over the rest; ``pp`` is AUTO_PARALLEL with two pipeline stages or
more. How many devices each axis has is searched.

Marks don't apply in the first two modes. DATA_PARALLEL may also be done with parameter servers
(``executor.parameter_server``); ``update`` says how far its workers may then be apart.
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
"""The search where none is named; one of ``planner.search.SEARCHES``."""

PROPAGATION = "sharding_propagation"
"""The search that only completes what is marked, with the least resharding."""


COMPILERS = ("tpu", "gpu")
"""What a plan may be confirmed by."""

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
        staleness: for "ssp", updates that a worker may be ahead of the slowest.
        zero: the ZeRO level that the mode's name says; None where it says none.
        tensor: the mesh axis over which the mode's name says to split every matrix, or empty.
        staged: whether the mode's name says that there are pipeline stages.
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
"""Other names of modes, in capitals, and what they say besides."""

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
"""What other tools call them, in small letters, and what that is here."""


def nearest_mode(name: str) -> str:
    """The mode that a wrong name most likely stands for; empty if none is near."""
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
        mode: one of ``MODES``, or a name of ``SHORT``; or what this function returned, which
            sets all again.
        search: a name of ``planner.search.SEARCHES``, or ``sharding_propagation``.
        update: one of ``UPDATES``; other than "sync" in DATA_PARALLEL only. It is what
            ``executor.parameter_server.train`` does when no mode is given.
        staleness: for "ssp", updates that a worker may be ahead of the slowest.

    Returns:
        The mode that was in force before.

    Raises:
        RequestError: unknown mode, search or update (lists the known ones), or an update or a
            staleness that has no meaning there.

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
    """The mode in force (AUTO_PARALLEL with search ``auto`` until one is set)."""
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
