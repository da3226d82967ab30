"""Combines the advice for a step for which no plan fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.advice.batch import Retrace, smaller_batch
from planner.advice.holders import holders, moment_text
from planner.advice.least import Least
from planner.advice.remat import remat
from planner.advice.trials import host_memory, more_devices, other_mode, relief, tried_out
from planner.annotate import Pin
from planner.choose.floors import floor_of
from planner.errors import MeshwrightError
from planner.plan.extract import Extraction
from planner.report.shortage import Relief, Shortage
from planner.request.parsed import Request
from planner.space.replicated import held_whole
from planner.spec import PLAIN, Recipe
from planner.step.classes import Quotient

ADVICE_S = 60.0
"""Seconds after which no further trial begins; a trial that has begun goes on."""
WHOLE_SHARE = 0.01
"""Share of the limit from which an operation that holds its arrays whole is named."""


@dataclass(frozen=True, eq=False)
class Again:
    """Other forms of the step.

    Attributes:
        retrace: the step with other shapes of its arguments.
        offloaded: the step for another request about host memory.
        recompute: the step with jax.checkpoint around its loop bodies and repeated blocks, with
            what is left for the backward pass in host memory or not, and a text that says what is
            recomputed; None if there are none.
    """

    retrace: Retrace
    offloaded: Callable[[Request], Quotient]
    recompute: Callable[[bool], tuple[str, Quotient, Sequence[Pin]] | None]


@dataclass(frozen=True, eq=False)
class Case:
    """A step for which no plan fits.

    Attributes:
        quotient: the step.
        pins: the user's pins.
        request: the user's request.
        least: the plan with the least peak.
        again: other forms of the step.
        recipe: how the step was rewritten.
    """

    quotient: Quotient
    pins: Sequence[Pin]
    request: Request
    least: Least
    again: Again
    recipe: Recipe = PLAIN


def advise(case: Case) -> Shortage:
    """How much memory is missing, what holds it, and what would help."""
    request, least, whole = case.request, case.least, case.quotient.whole
    extraction = Extraction(least.priced, least.memory.choice)
    moment = least.memory.peak_moment
    large = (
        w
        for w in held_whole(whole.graph, whole.rules)
        if w.nbytes >= WHOLE_SHARE * request.limit_bytes
    )
    return Shortage(
        cluster=request.cluster.text,
        limit_bytes=request.limit_bytes,
        least_bytes=least.memory.peak_bytes + whole.scalar_bytes,
        lower_bytes=least.lower_bytes + whole.scalar_bytes if least.lower_bytes else 0.0,
        mesh=str(least.priced.mesh),
        moment=moment_text(extraction, moment),
        holders=holders(extraction, moment),
        reliefs=tuple(_reliefs(case)),
        recipe=str(case.recipe),
        whole=tuple(sorted(large, key=lambda w: (-w.nbytes * w.count, w.name))),
    )


def _reliefs(case: Case) -> Iterator[Relief]:
    """What would help, tried in this order while there is time."""
    request, deadline = case.request, time.monotonic() + ADVICE_S
    again = case.again
    trials: tuple[tuple[str, Callable[[], Iterator[Relief] | Relief | None]], ...] = (
        ("", lambda: other_mode(case.quotient, case.pins, request)),
        ("remat", lambda: _computed_again(case)),
        ("host memory", lambda: host_memory(again.offloaded, case.pins, request)),
        ("a smaller batch", lambda: _smaller(case, deadline)),
        ("more devices", lambda: more_devices(case.quotient, case.pins, request)),
    )
    for what, trial in trials:
        if what and time.monotonic() >= deadline:
            yield Relief(what, 0.0, 0.0, False, "out of time", tried=False)
            continue
        outcome = trial()
        if isinstance(outcome, Relief):
            yield outcome
        elif outcome is not None:
            yield from outcome


def _computed_again(case: Case) -> Iterator[Relief]:
    """Loop bodies and repeated blocks computed again; then also with what they keep in host memory.
    If there are none, an estimate for single activations."""
    if case.recipe.remat != PLAIN.remat:
        return
    start = floor_of(case.quotient, case.pins, case.request).start_bytes
    if start > case.request.limit_bytes:
        note = "at least: that is taken before the step begins"
        yield Relief("remat, microbatches or chunks", start, math.inf, False, note)
        return
    last = None
    for on_host in (False, True):
        try:
            recomputed = case.again.recompute(on_host)
        except MeshwrightError:
            recomputed = None
        if recomputed is None:
            break
        what, quotient, pins = recomputed
        tried = tried_out(quotient, pins, case.request)
        if tried is None:
            break
        where = ", with what it keeps in host memory (an offload policy)" if on_host else ""
        last = relief(f"remat (jax.checkpoint) of {what}{where}", quotient.whole, tried)
        yield last
        if last.fits:
            return
    if last is None:
        guess = remat(case.least.priced, case.least.memory, case.request)
        if guess is not None:
            yield guess


def _smaller(case: Case, deadline: float) -> Relief | None:
    whole, least = case.quotient.whole, case.least
    return smaller_batch(whole, least.priced, case.pins, case.request, case.again.retrace, deadline)
