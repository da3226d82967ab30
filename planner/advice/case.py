"""Put the advice together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.advice.batch import Retrace, smaller_batch
from planner.advice.holders import holders, moment_text
from planner.advice.least import Least
from planner.advice.remat import remat
from planner.advice.trials import host_memory, more_devices, other_mode
from planner.annotate import Pin
from planner.extract import Extraction
from planner.quotient import Quotient
from planner.report.shortage import Shortage
from planner.request import Request


@dataclass(frozen=True, eq=False)
class Case:
    """A step for which no plan fits.

    Attributes:
        quotient: the step.
        pins: what was pinned.
        request: what was asked for.
        least: the plan with the least peak.
        retrace: traces the step again with other shapes of its arguments.
        offloaded: the step as it is for another request about host memory.
    """

    quotient: Quotient
    pins: Sequence[Pin]
    request: Request
    least: Least
    retrace: Retrace
    offloaded: Callable[[Request], Quotient]


def advise(case: Case) -> Shortage:
    """What is missing, who holds it, and what would help."""
    request, least, whole = case.request, case.least, case.quotient.whole
    extraction = Extraction(least.priced, least.memory.choice)
    moment = least.memory.peak_moment
    tried = (
        other_mode(case.quotient, case.pins, request),
        host_memory(case.offloaded, case.pins, request),
        more_devices(case.quotient, case.pins, request),
        smaller_batch(whole, least.priced, request, case.retrace),
        remat(least.priced, least.memory, request),
    )
    return Shortage(
        cluster=request.cluster.text,
        limit_bytes=request.limit_bytes,
        least_bytes=least.memory.peak_bytes + whole.scalar_bytes,
        lower_bytes=least.lower_bytes + whole.scalar_bytes if least.lower_bytes else 0.0,
        mesh=str(least.priced.mesh),
        moment=moment_text(extraction, moment),
        holders=holders(extraction, moment),
        reliefs=tuple(relief for relief in tried if relief is not None),
    )
