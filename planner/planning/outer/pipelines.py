"""Chooses the number of pipeline stages, in one program or as separate programs."""

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
"""Most stages that are tried."""


def over_stages(wish: Wish, door: Door) -> Planned:
    """The best plan with or without stages; with stages if the mode requires them.

    Raises:
        MemoryLimitError: no plan fits.
        RequestError: the mode requires stages, and the step or the devices can't be cut.
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
        tried = tried.removesuffix(f". {UNEQUAL}")  # its advice is followed below
    if door.request.staged:  # separate programs: unequal stages, no lockstep
        schedule = schedule or SCHEDULES[0]
    if schedule:
        best, more = _over_schedules(inner, schedule, door, best)
        tried = f"{tried}; {more}"
    if best is None:
        raise error or _no_pipeline(inner, door, seen, tried)
    return _noted(best, tried, door)


def where_hopeful(planned: Planned, wish: Wish, door: Door) -> Planned:
    """The plan, or a faster one with stages in one program, if the request does not set stages.

    Stages are tried on several nodes if all else is left to the planner as well, and the time that
    the plan spends on communication and on repeated work, less the bubble of two stages, exceeds
    the share ``HOPE`` of its step.
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
"""Share of a step that stages must be able to save to be tried without a request."""


def _inner(wish: Wish) -> Wish:
    """The wish without stages and their schedule."""
    recipe = dataclasses.replace(wish.recipe, schedule="")
    return dataclasses.replace(wish, recipe=recipe, open=wish.open - {"stages"})


def _noted(planned: Planned, tried: str, door: Door) -> Planned:
    """The same plan, with a note on what was tried."""
    planning_s = time.perf_counter() - door.begun
    notes = (*planned.plan.notes, tried)
    plan = dataclasses.replace(planned.plan, notes=notes, planning_s=planning_s)
    return dataclasses.replace(planned, plan=plan)


def _over_counts(
    inner: Wish, door: Door, best: Planned | None
) -> tuple[Planned | None, Mapping[Recipe, Outcome[Row | None]], str]:
    """The faster of ``best`` and the best plan with stages in one program; the outcomes of all
    recipes tried; and a text on them."""
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
        with contextlib.suppress(MemoryLimitError):  # a quick search may underestimate memory
            piped = best_planned(seen, door.begun, tried)
            if best is None or piped.plan.search.cost_s * WORTH < best.plan.search.cost_s:
                best = piped
    return best, seen, tried


def _no_pipeline(
    wish: Wish, door: Door, seen: Mapping[Recipe, Outcome[Row | None]], tried: str
) -> RequestError:
    """The error if the mode requires stages and no plan has them."""
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
"""Most recipes with a schedule that are planned in full."""
LEAST_IDLE = 1 / 3
"""Share of the idle time of 1F1B that remains with a schedule that splits weight gradients, if all
passes take equally long."""


def _over_schedules(
    wish: Wish, schedule: str, door: Door, best: Planned | None
) -> tuple[Planned | None, str]:
    """The faster of ``best`` and the best plan with stages as separate programs, and a text on what
    was tried. A quick search of the step on the devices of one stage bounds the time of a schedule.
    """
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
"""Default number of microbatches per stage: the bubble is at most a fifth of a step."""


def with_stages(wish: Wish, door: Door) -> Wish:
    """The wish with a number of microbatches for its stages.

    Raises:
        RequestError: the mode or the mesh has no such stages, or the devices or the batch can't be
            cut.
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
    """The request for the whole step on the devices of one stage, with the memory of all stages.

    Raises:
        RequestError: stages as separate programs do not support an option, or the cluster can't be
            divided.
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
