"""Searches a step under one recipe on all meshes and assembles the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.advice import Again, Case, Least, Shapes, advise, least_plan, rescued
from planner.annotate import Pin
from planner.arguments.metadata import metadata_notes, rules_of
from planner.choose.floors import Floor, floor_of
from planner.choose.meshes import (
    Led,
    lead_meshes,
    runners_up,
    search_meshes,
    search_others,
    tried_in_vain,
    unfold,
)
from planner.choose.quick import FIRST, free_bounds
from planner.choose.simplest import Tried, choose
from planner.choose.thrift import thrifty
from planner.cost.peak import traced_peak
from planner.cost.pricing import Priced
from planner.debug.stage import Stage
from planner.debug.stages import passed
from planner.errors import MemoryLimitError, RequestError
from planner.graph.jaxpr.inlined import inlined_notes
from planner.graph.trace import Traced, reshaped, trace
from planner.microbatch.rewrite import batch_size
from planner.plan.assemble import NOT_SPLIT, OVER, assembled
from planner.plan.compiled.confirmed import confirmer
from planner.plan.extract import Extraction
from planner.plan.plan import Plan
from planner.planning.prepare import Prepared, fallbacks, prepared
from planner.planning.through_stages import scheduled
from planner.recipes import (
    chunked_of,
    coupled_of,
    recipe_of,
    recomputed_of,
    staged_of,
)
from planner.remat.policy import FULL, OFFLOAD, parse_policy
from planner.remat.rewrite import recomputed
from planner.report.shortage import host_text, shortage_text
from planner.report.units import bytes_text
from planner.request.marks import WITHOUT_PINS, all_pins, ignored_marks, on_region_mesh
from planner.request.parsed import Request
from planner.search.iopddl import write_iopddl
from planner.search.pools import pool_peaks
from planner.search.problem import fits
from planner.space.buffer import Memory
from planner.spec import Recipe
from planner.step.classes import Quotient

MUCH = 0.5
"""Share of the memory; the choice of a plan that takes less hardly depended on memory."""
TIGHTER = 3
"""Most searches with a lower limit if a plan takes more as it runs than the search counted."""
SQUEEZED = 1.1
"""A plan that costs this many times its bound for lack of memory is compared with others that
recompute or run in microbatches."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, and the prices and choices that it was made from (for reports)."""

    plan: Plan
    extraction: Extraction
    quotient: Quotient
    pins: tuple[Pin, ...]
    request: Request
    others: tuple[tuple[Plan, Extraction], ...] = ()
    """The best plans of other meshes: ``request.candidates`` - 1."""
    compared: tuple[str, ...] = ()
    """The plan's notes on the recipes that it was compared with."""
    hopeful: tuple[Recipe, ...] = ()
    """Of these recipes, those that may be faster after a longer search, then the others that
    fit."""


class Row:
    """A step under one recipe, on all meshes."""

    def __init__(
        self,
        traced: Traced,
        args: Sequence[Any],
        request: Request,
        donate_argnums: int | Sequence[int] | None,
        function: Callable[..., Any] | None,
    ) -> None:
        self.traced, self.args = traced, args
        recipe = recipe_of(function)
        request = dataclasses.replace(request, stages=1 if recipe.schedule else recipe.stages)
        self.request = on_region_mesh(traced, request)
        self.donate_argnums, self.function = donate_argnums, function
        self.step = self.prepare(traced)

    @functools.cached_property
    def floor(self) -> Floor:
        """Memory that every plan takes."""
        return floor_of(self.step.quotient, self.step.pins, self.request)

    @functools.cached_property
    def led(self) -> Led:
        """The results on all meshes before the longest search."""
        return lead_meshes(self.step.quotient, self.step.pins, self.request)

    @functools.cached_property
    def near_s(self) -> float:
        """Seconds of the best plan before the longest search, or after it if nothing fits before;
        infinite if nothing fits."""
        best = choose(self.led.tried)[1]
        if not best.feasible:
            best = choose(self.searched[0])[1]
        return best.cost_s if best.feasible else math.inf

    @functools.cached_property
    def searched(self) -> tuple[tuple[Tried, ...], Least | None]:
        """The solutions on all meshes; and the plan of the least peak if none of them fits."""
        quotient, request = self.step.quotient, self.request
        if self.floor.peak_bytes > request.limit_bytes:
            tried = tried_in_vain(quotient, self.step.pins, request)
        else:
            tried = search_meshes(quotient, self.step.pins, request, self.led)
        if choose(tried)[1].feasible:
            return tried, None
        least = least_plan(quotient, tried, request)
        return rescued(least, tried, request), least

    @property
    def fits(self) -> bool:
        """Whether the search finds a plan that fits."""
        near = self.floor.peak_bytes <= self.request.limit_bytes
        return near and choose(self.searched[0])[1].feasible

    @functools.cached_property
    def squeeze(self) -> float:
        """Ratio of the best plan's cost to the lower bound of ``free_bounds``. 1 if the plan
        uses little memory and its loops store nothing that costs time, if it does not fit, or only
        completes what is given."""
        best = choose(self.searched[0])[1]
        little = best.peak_bytes < MUCH * self.request.limit_bytes
        little = little and not self.step.quotient.part.stacks
        if little or self.request.spreads or not best.feasible:
            return 1.0
        known = {} if self.step.quotient.part.stacks else self.led.bounds_s
        bounds = {mesh: s for mesh, s in known.items() if mesh.num_axes in FIRST} or free_bounds(
            self.step.quotient, self.step.pins, self.request
        )
        least_s = min(bounds.values(), default=0.0)
        return best.cost_s / least_s if least_s > 0 else 1.0

    @property
    def suffices(self) -> bool:
        """Whether the search finds a plan that fits, and memory costs that plan little."""
        return self.fits and self.squeeze <= SQUEEZED

    def prepare(self, traced: Traced, request: Request | None = None) -> Prepared:
        """Rules, groups and analysis of a trace."""
        request = self.request if request is None else request
        rules = rules_of(self.function)
        pins = all_pins(traced, self.args, request.shardings, rules, request.mode, request.mesh)
        return prepared(traced, pins, request, self.donate_argnums)

    def planned(self, begun: float, also: str = "") -> Planned:
        """The plan; raises MemoryLimitError, whose text ends with ``also``."""
        planned = self._searched_plan(begun, also)
        if not fits(planned.plan.prediction.peak_bytes, self.request.limit_bytes):
            planned = self._with_less(planned, begun)
        if self.request.confirm:
            return _confirmed(planned, self.traced, self.donate_argnums)
        return planned

    def _with_less(self, planned: Planned, begun: float) -> Planned:
        """A plan that fits as it runs, or the nearest.

        The search counts arrays in one layout at a time. If arrays that are in memory in two
        layouts exceed the limit, the search runs again with less memory than it counted, by the
        excess of the plan; by half of that if nothing fits.
        """
        limit = self.request.limit_bytes
        best, low = planned, 0.0
        for _ in range(TIGHTER):
            peak = planned.plan.prediction.peak_bytes
            counted = traced_peak(planned.extraction)[0]  # at most what it was searched with
            less = counted - (peak - limit)
            less = less if less > low else (low + counted) / 2
            request = dataclasses.replace(
                self.request, limit_bytes=less, advice=False, dump_problem=None
            )
            row = Row(self.traced, self.args, request, self.donate_argnums, self.function)
            try:
                planned = _limited(row._searched_plan(begun, ""), self.request)
            except MemoryLimitError:
                low = less
                continue
            if planned.plan.prediction.peak_bytes < best.plan.prediction.peak_bytes:
                best = planned
            if fits(best.plan.prediction.peak_bytes, limit):
                return best
        note = (
            f"{OVER} {bytes_text(best.plan.prediction.peak_bytes)}, of "
            f"{bytes_text(limit)}: some arrays are in memory in two layouts at once; {TIGHTER} "
            "searches with less memory found none that fits"
        )
        plan = dataclasses.replace(best.plan, notes=(note, *best.plan.notes))
        return dataclasses.replace(best, plan=plan)

    def _searched_plan(self, begun: float, also: str) -> Planned:
        """The plan that the search finds."""
        again = Again(
            self._retraced, lambda r: self.prepare(self.traced, r).quotient, self._recomputed
        )
        recipe = recipe_of(self.function)
        tried, least = self.searched
        if least is None:  # not in near_s: too long for every row that is tried
            step = self.step
            tried = search_others(step.quotient, step.pins, self.request, self.led, tried)
        planned = _planned(self.step, tried, least, self.request, begun, again, recipe, also)
        step_notes = metadata_notes(self.args, rules_of(self.function), self.request.mesh)
        if self.request.mode in WITHOUT_PINS:
            step_notes = ignored_marks(self.traced, self.request.mode)
        step_notes = (*step_notes, *inlined_notes((self.traced.origin or self.traced).inlined))
        plan = dataclasses.replace(
            planned.plan,
            notes=(*step_notes, *planned.plan.notes),
            microbatches=recipe.microbatches,
            replicas=recipe.replicas,
            pad_batch=recipe.pad_batch,
            remat=recipe.remat,
            statistics=recipe.statistics,
            coupled=coupled_of(self.function),
            recomputed=recomputed_of(self.function),
            chunks=recipe.chunks,
            chunked=chunked_of(self.function),
            stages=recipe.stages,
            staged=staged_of(self.function),
        )
        if recipe.pad_batch:  # then the batch is split inside the step
            notes = tuple(n for n in plan.notes if NOT_SPLIT not in n)
            idle = plan.idle and f"{plan.idle.partition(';')[0]}; the search has no faster split"
            examples = batch_size(self.traced.origin or self.traced)
            plan = dataclasses.replace(plan, notes=notes, idle=idle, examples=examples)
        elif plan.idle and recipe.microbatches > 1:
            plan = dataclasses.replace(plan, idle=_idle_in_parts(plan, self.traced.origin))
        if recipe.schedule:
            plan = scheduled(plan, planned.extraction, self.traced, recipe)
        return dataclasses.replace(planned, plan=plan)

    def _retraced(self, shapes: Shapes) -> tuple[Quotient, Sequence[Pin]]:
        if self.function is None:
            raise RequestError("only the trace is known")
        again = self.prepare(trace(self.function, reshaped(self.args, shapes)))
        return again.quotient, again.pins

    def _recomputed(self, on_host: bool) -> tuple[str, Quotient, Sequence[Pin]] | None:
        recomputation = recomputed(self.traced, parse_policy(OFFLOAD if on_host else FULL))
        if recomputation is None:
            return None
        again = self.prepare(trace(recomputation.function, self.args))
        return recomputation.what, again.quotient, again.pins


def _limited(planned: Planned, request: Request) -> Planned:
    """A plan that was searched with less memory, with the limit of a request."""
    limit = request.limit_bytes

    def with_limit(plan: Plan) -> Plan:
        return dataclasses.replace(
            plan, prediction=dataclasses.replace(plan.prediction, limit_bytes=limit)
        )

    def priced(one: Extraction) -> Extraction:
        return Extraction(dataclasses.replace(one.priced, limit_bytes=limit), one.choice)

    return dataclasses.replace(
        planned,
        plan=with_limit(planned.plan),
        extraction=priced(planned.extraction),
        request=request,
        others=tuple((with_limit(plan), priced(one)) for plan, one in planned.others),
    )


def _planned(
    step: Prepared,
    tried: tuple[Tried, ...],
    least: Least | None,
    request: Request,
    begun: float,
    again: Again,
    recipe: Recipe,
    also: str,
) -> Planned:
    picked = choose(tried)
    best = thrifty(step.quotient, picked, request)
    tried = tuple(best if t is picked else t for t in tried)
    priced, solution = unfold(step.quotient, best)
    passed(Stage.PROBLEM, best[0], priced)
    passed(Stage.SOLUTION, best, (priced, solution))
    if request.dump_problem is not None:
        write_problem(priced, request.dump_problem)
    if least is not None and not solution.feasible:
        raise _shortage(Case(step.quotient, step.pins, request, least, again, recipe), also)
    lines = fallbacks(priced.analysis, step.rules, request.limit_bytes)
    plan, extraction = assembled(
        step.quotient, step.pins, (priced, solution), best, tried, request, lines, begun
    )
    passed(Stage.PLAN, plan, extraction.graph)
    others = tuple(
        assembled(
            step.quotient,
            step.pins,
            unfold(step.quotient, t),
            t,
            tuple(t if x[0].mesh == t[0].mesh else x for x in tried),
            request,
            lines,
            begun,
        )
        for t in runners_up(step.quotient, step.pins, request, best, tried)
    )
    return Planned(plan, extraction, step.quotient, step.pins, request, others)


def _idle_in_parts(plan: Plan, whole: Traced | None) -> str:
    """Why devices repeat each other's work in microbatches of a step."""
    devices = plan.mesh.num_devices
    with contextlib.suppress(RequestError):
        share = batch_size(whole) // plan.microbatches if whole is not None else devices
        if share % devices:
            return (
                f"{plan.idle.partition(';')[0]}; the {share} examples of a microbatch do not "
                f"divide by {devices}: fewer microbatches may help"
            )
    return plan.idle


def _confirmed(
    planned: Planned, traced: Traced, donate_argnums: int | Sequence[int] | None
) -> Planned:
    """The best of the candidate plans according to the compiler."""
    request = planned.request
    candidates = [(planned.plan, planned.extraction), *planned.others]
    number, plan = confirmer()(
        [plan for plan, _ in candidates],
        traced,
        request.cluster,
        donate_argnums=donate_argnums,
        seconds=request.confirm_limit_s,
    )
    return dataclasses.replace(planned, plan=plan, extraction=candidates[number][1])


def _shortage(case: Case, also: str) -> MemoryLimitError:
    """The error if no plan fits. It is about host memory if that is the fullest memory of the plan
    whose fullest memory is the least full; otherwise about device memory, with what would help."""
    request, least = case.request, case.least
    peaks, limit = pool_peaks(least.priced.problem, least.memory.choice), request.limit_bytes
    for pool in least.priced.problem.pools[1:]:
        over = peaks[pool.name] / pool.limit_bytes
        if over > 1.0 and over >= peaks[Memory.DEVICE] / limit:
            return MemoryLimitError(
                host_text(request.cluster.text, peaks[pool.name], pool.limit_bytes),
                least_bytes=peaks[pool.name],
                lower_bytes=0.0,
                limit_bytes=pool.limit_bytes,
            )
    scalars = least.priced.analysis.scalar_bytes
    if not request.advice:
        return MemoryLimitError(
            f"no plan fits in {bytes_text(request.limit_bytes)} per device on "
            f"{request.cluster.text}: the lowest peak tried is "
            f"{bytes_text(least.memory.peak_bytes + scalars)}",
            least_bytes=least.memory.peak_bytes + scalars,
            lower_bytes=least.lower_bytes,
            limit_bytes=request.limit_bytes,
        )
    shortage = advise(case)
    return MemoryLimitError(
        shortage_text(shortage) + (f"\n  also tried: {also}" if also else ""),
        least_bytes=shortage.least_bytes,
        lower_bytes=shortage.lower_bytes,
        limit_bytes=shortage.limit_bytes,
    )


def write_problem(priced: Priced, path: str | Path) -> None:
    """Write the problem of a mesh, in seconds and bytes; memory excludes scalar inputs."""
    try:
        write_iopddl(priced.problem, path)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from error
