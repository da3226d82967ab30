"""Numbers of pipeline stages, in one program or as programs of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping

from costmodels import ClusterError, part_of
from planner.errors import MemoryLimitError, RequestError
from planner.microbatch.rewrite import batch_size
from planner.plan.contents.kinds import IDLE
from planner.planning.open_recipes import Door, best_planned
from planner.planning.outer.replicas import nodes_of, with_recipe, with_replicas
from planner.planning.row import Planned, Row
from planner.planning.through_stages import PASS_S, passes_of_host
from planner.recipes import AUTO, SCHEDULES, WORTH, Outcome, Recipe, Wish
from planner.remat.policy import FULL, NONE
from planner.report.units import time_text
from planner.request.parsed import Request
from planner.request.state import StateRequest
from planner.spec import STAGE, MeshSpec
from planner.stages.rewrite import UNEQUAL

MOST_STAGES = 16
"""Stages that are tried at most."""


def over_stages(wish: Wish, door: Door) -> Planned:
    """The best plan with stages or without; with stages where the mode says so.

    Raises:
        MemoryLimitError: no plan fits.
        RequestError: the mode wants stages, and the step or the devices can't be cut.
    """
    schedule = wish.recipe.schedule
    inner = _inner(wish)
    best: Planned | None = None
    error: RequestError | None = None
    if not door.request.staged:
        try:
            best = with_recipe(inner, door)
        except MemoryLimitError as failed:
            error = failed
    best, seen, tried = _over_counts(inner, door, best)
    if schedule or door.request.staged:
        tried = tried.removesuffix(f". {UNEQUAL}")  # that is tried
    if door.request.staged:  # stages need not be alike, nor in step, as programs of their own
        schedule = schedule or SCHEDULES[0]
    if schedule:
        best, more = _over_schedules(inner, schedule, door, best)
        tried = f"{tried}; {more}"
    if best is None:
        raise error or _no_pipeline(inner, door, seen, tried)
    return _noted(best, tried, door)


def where_hopeful(planned: Planned, wish: Wish, door: Door) -> Planned:
    """The plan, or a faster one with stages in one program, where nothing was said of stages.

    They are tried on several nodes where all else is left to the planner as well, and what a plan
    spends on communication and on work that devices repeat, less the bubble of two stages, is more
    than ``HOPE`` of its step.
    """
    request, prediction = door.request, planned.plan.prediction
    demands = (request.shardings, request.tensor, request.sequence, request.confirm)
    open_to = not any(demands) and request.mesh is None and not request.spreads
    open_to = open_to and request.search == AUTO and request.state == StateRequest()
    open_to = open_to and not wish.recipe.schedule
    open_to = open_to and ("microbatches" in wish.open or wish.recipe.microbatches > 1)
    if not open_to or nodes_of(planned) < 2 or planned.plan.stages > 1:
        return planned
    mesh = planned.plan.mesh
    again = math.prod(k for n, k in zip(mesh.names, mesh.sizes, strict=True) if n.startswith(IDLE))
    piped_s = prediction.compute_s / again * (1 + 1 / (2 * PER_STAGE))
    if piped_s > (1 - HOPE) * prediction.step_s:
        return planned
    best, seen, tried = _over_counts(_inner(wish), door, planned)
    return planned if best is None or not seen else _noted(best, tried, door)


HOPE = 0.1
"""Of a step, what stages must be able to save before they are tried unasked."""


def _inner(wish: Wish) -> Wish:
    """The wish without stages and their schedule."""
    recipe = dataclasses.replace(wish.recipe, schedule="")
    return dataclasses.replace(wish, recipe=recipe, open=wish.open - {"stages"})


def _noted(planned: Planned, tried: str, door: Door) -> Planned:
    """The same plan, which says what was tried."""
    planning_s = time.perf_counter() - door.begun
    notes = (*planned.plan.notes, tried)
    plan = dataclasses.replace(planned.plan, notes=notes, planning_s=planning_s)
    return dataclasses.replace(planned, plan=plan)


def _over_counts(
    inner: Wish, door: Door, best: Planned | None
) -> tuple[Planned | None, Mapping[Recipe, Outcome[Row | None]], str]:
    """The faster of a plan and of the best with stages in one program; what was seen, in words."""
    known_s = math.inf if best is None else best.plan.search.cost_s
    seen: dict[Recipe, Outcome[Row | None]] = {}
    refused = ""
    stages = 2
    while stages <= min(MOST_STAGES, door.request.cluster.num_devices):
        try:
            recipe = dataclasses.replace(inner.recipe, stages=stages)
            one = dataclasses.replace(inner, recipe=recipe)
            if recipe.microbatches == 1:
                one = dataclasses.replace(one, open=one.open | {"microbatches"})
            one = with_stages(one, door)
            door.rewriter(one.recipe)
        except RequestError as failed:
            refused = refused or str(failed)
            break
        for remat in (FULL, NONE) if "remat" in inner.open else (inner.recipe.remat,):
            recipe = dataclasses.replace(one.recipe, remat=remat)
            seen[recipe] = door.look(recipe, known_s / WORTH, {})
            known_s = min(known_s, seen[recipe].cost_s)
        stages *= 2
    tried = f"pipelines of up to {stages // 2} stages in one program: {len(seen)} recipes planned"
    if (least_s := min((o.cost_s for o in seen.values()), default=math.inf)) < math.inf:
        tried += f", {time_text(least_s)} or less"
    if refused:
        tried = f"{tried}; {refused}" if seen else f"no stages: {refused}"
    if any(o.cost_s < math.inf for o in seen.values()):
        with contextlib.suppress(MemoryLimitError):  # a quick look may take too little for enough
            piped = best_planned(seen, door.begun, tried)
            if best is None or piped.plan.search.cost_s * WORTH < best.plan.search.cost_s:
                best = piped
    return best, seen, tried


def _no_pipeline(
    wish: Wish, door: Door, seen: Mapping[Recipe, Outcome[Row | None]], tried: str
) -> RequestError:
    """Why a mode that wants stages gets none."""
    if seen:
        recipe = max(seen, key=lambda r: r.stages)
        try:
            with_recipe(dataclasses.replace(wish, recipe=recipe, open=frozenset()), door)
        except MemoryLimitError as error:
            return error
    one = door.request.cluster.num_devices == 1
    why = f"{door.request.cluster.text} has one device" if one else tried
    return RequestError(f"the mode pp wants two pipeline stages or more, and no plan has: {why}")


MOST_SCHEDULED = 4
"""Recipes with a schedule that are planned whole, at most."""
LEAST_IDLE = 1 / 3
"""Of the idle time of 1F1B, what a schedule that splits weight gradients leaves where all passes
take equally long."""


def _over_schedules(
    wish: Wish, schedule: str, door: Door, best: Planned | None
) -> tuple[Planned | None, str]:
    """The faster of a plan and of the best with stages that are programs of their own, and what was
    tried. A quick look at the step on the devices of one stage bounds what a schedule can reach."""
    rows: list[tuple[float, Recipe, Row, Door]] = []
    refused, stages = "", 2
    while stages <= min(MOST_STAGES, door.request.cluster.num_devices):
        try:
            recipe = dataclasses.replace(wish.recipe, stages=stages, schedule=schedule)
            one = dataclasses.replace(wish, recipe=recipe)
            if recipe.microbatches == 1:
                one = dataclasses.replace(one, open=one.open | {"microbatches"})
            one = with_stages(one, door)
            inside = dataclasses.replace(door, request=of_stage(door.request, stages))
            door.rewriter(one.recipe)
        except RequestError as failed:
            refused = refused or str(failed)
            break
        idle = 1 + LEAST_IDLE * (stages - 1) / one.recipe.microbatches
        each = 2 * one.recipe.microbatches
        passes = passes_of_host(door.request.cluster, stages, each)
        for remat in (FULL, NONE) if "remat" in wish.open else (wish.recipe.remat,):
            recipe = dataclasses.replace(one.recipe, remat=remat)
            look = inside.look(recipe, math.inf, {})
            if look.found is not None and look.cost_s < math.inf:
                bound_s = max(look.cost_s / stages * idle, passes * PASS_S)
                rows.append((bound_s, recipe, look.found, inside))
        stages *= 2
    rows.sort(key=lambda row: row[0])
    summaries = []
    for bound_s, recipe, row, inside in rows[:MOST_SCHEDULED]:
        known_s = math.inf if best is None else best.plan.prediction.step_s
        if bound_s * WORTH > known_s:
            continue
        try:
            planned = row.planned(door.begun)
            if "replicas" in wish.open:
                planned = with_replicas(planned, wish, inside)
        except MemoryLimitError:
            continue
        step_s = planned.plan.prediction.step_s
        summaries.append(f"{recipe.stages} stages by {planned.plan.schedule} {time_text(step_s)}")
        if step_s * WORTH < known_s:
            best = planned
    tried = f"stages by a schedule: {len(rows)} recipes tried"
    if summaries:
        tried += f", planned: {', '.join(summaries)}"
    return best, f"{tried}; {refused}" if refused else tried


PER_STAGE = 4
"""Microbatches for each stage where nothing is said: the bubble is a fifth of a step at most."""


def with_stages(wish: Wish, door: Door) -> Wish:
    """The wish with a number of microbatches for its stages.

    Raises:
        RequestError: the devices can't be cut into so many groups, or the batch can't be cut.
    """
    stages, request = wish.recipe.stages, door.request
    if request.mode in ("STAND_ALONE", "DATA_PARALLEL"):
        raise RequestError(f"stages={stages}: mode {request.mode} has no pipeline stages")
    devices = request.cluster.num_devices
    if devices % stages:
        raise RequestError(
            f"stages={stages}: {devices} devices can't be cut into {stages} equal groups"
        )
    mesh = request.mesh
    if mesh is not None and (STAGE not in mesh.names or mesh.size(STAGE) != stages):
        raise RequestError(
            f"stages={stages}: the mesh {mesh} has no axis {STAGE}={stages}; give it one, in front "
            "of the others, or leave mesh= out"
        )
    wish = dataclasses.replace(wish, open=wish.open - {"chunks"})
    if "microbatches" not in wish.open:
        return wish
    size = batch_size(door.rewriter.cut(1)[1])
    parts = [m for m in range(2, PER_STAGE * stages + 1) if size % m == 0]
    if not parts:
        raise RequestError(
            f"stages={stages}: a batch of {size} examples can't be cut into microbatches"
        )
    recipe = dataclasses.replace(wish.recipe, microbatches=parts[-1])
    return dataclasses.replace(wish, recipe=recipe, open=wish.open - {"microbatches"})


def of_stage(request: Request, stages: int) -> Request:
    """The request for the whole step on the devices of one stage, with the memory of all.

    Raises:
        RequestError: something that stages as programs of their own do not have.
    """
    if request.confirm:
        raise RequestError("confirm= compiles one program; stages with schedule= are several")
    offload = request.decided.get("offload")
    if offload is not None and (offload.patterns or offload.auto):
        raise RequestError("offload= with schedule=: stages keep their state on their devices")
    try:
        cluster = part_of(request.cluster, stages)
    except ClusterError as error:
        raise RequestError(f"stages={stages}: {error}") from None
    mesh = request.mesh
    if mesh is not None:
        inner = [(n, k) for n, k in zip(mesh.names, mesh.sizes, strict=True) if n != STAGE]
        names, sizes = zip(*inner, strict=True) if inner else (("data",), (1,))
        mesh = MeshSpec(tuple(names), tuple(sizes))
    model = dataclasses.replace(request.model, cluster=cluster)  # type: ignore[type-var]
    limit = request.limit_bytes * stages
    return dataclasses.replace(
        request, cluster=cluster, model=model, mesh=mesh, limit_bytes=limit, advice=False
    )
