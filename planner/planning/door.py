"""``make_plan``: the door. Recipes around meshes around shardings."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Unpack

from costmodels import Cluster, ClusterError, part_of
from planner.arguments.calls import Indices, Names, bind
from planner.arguments.metadata import with_logical_axis_rules
from planner.choose.quick import free_bounds, memory_floor, scout_meshes
from planner.chunks.rewrite import chunks_worth, scores
from planner.collector import paused
from planner.errors import MemoryLimitError, RequestError
from planner.graph.trace import Traced
from planner.microbatch.rewrite import batch_size
from planner.plan.plan import Plan
from planner.planning.row import Planned, Row
from planner.recipes import (
    WORTH,
    Outcome,
    Recipe,
    Rewriter,
    Wish,
    parse_wish,
    search_recipes,
)
from planner.remat.policy import FULL, NONE, OFFLOAD
from planner.remat.rewrite import policies
from planner.report.units import bytes_text
from planner.request.marks import placed_mesh
from planner.request.options import (
    Options,
    Request,
    given_options,
    parse_request,
    takes_options,
)
from planner.spec import REWRITINGS, STAGE, MeshSpec

_Asked = ParamSpec("_Asked")


@takes_options
def plan_step(
    function: Callable[..., Any],
    *args: Any,
    cluster: str | Cluster,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: Indices = (),
    static_argnames: Names = (),
    **options: Unpack[Options],
) -> Planned:
    """Plan a train step for a cluster; starts no backend.

    Args:
        function: the step, any jit-able function of pytrees, Flax NNX objects and Equinox modules.
        *args: arrays or ShapeDtypeStructs, and NNX objects that hold such (``nnx.eval_shape``
            makes them); other leaves than arrays and numbers are static.
        cluster: ``"h100:8x4"``, ``"v5p:4x4x8"``, ``"cpu:8"``, a .toml path or a Cluster.
        donate_argnums: arguments whose memory the results may take; None means every
            argument that comes back as a result.
        static_argnums, static_argnames: as for ``jax.jit``.
        **options: see ``planner.request.options.Options``.

    Returns:
        The plan (all that ``make_plan`` returns), and what it was made from.

    Raises:
        ModelError: the step failed while traced.
        RequestError: the request can't be met (PinError, MemoryLimitError among them).

    >>> import jax, jax.numpy as jnp
    >>> w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 4096), (65536, 4096)))
    >>> plan = plan_step(lambda w, x: jnp.tanh(x @ w), w, x, cluster="h100:8").plan
    >>> tuple(plan.as_partition_specs()["[1]"])
    ('data',)
    """
    begun = time.perf_counter()
    asked = given_options("make_plan", options)
    rewriting = {name: asked.pop(name, None) for name in REWRITINGS}
    bound = bind(function, args, static_argnums=static_argnums, static_argnames=static_argnames)
    rules = asked.pop("logical_axis_rules", None)
    function, args = with_logical_axis_rules(bound.function, rules), bound.args
    asked.setdefault("mesh", placed_mesh(args, cluster))
    request = parse_request(cluster, **asked)
    wish = parse_wish(rewriting, function, request.mode == "AUTO_PARALLEL")
    with paused():
        return _under(wish, function, args, request, donate_argnums, begun)


def _plan_alone(plan: Callable[_Asked, Planned]) -> Callable[_Asked, Plan]:
    """The same function, which returns the plan and lets go of what it was made from."""

    @functools.wraps(plan)
    def make_plan(*args: _Asked.args, **options: _Asked.kwargs) -> Plan:
        return plan(*args, **options).plan

    make_plan.__name__ = make_plan.__qualname__ = "make_plan"
    return make_plan


make_plan = _plan_alone(plan_step)


def plan_traced(
    traced: Traced,
    args: Sequence[Any],
    request: Request,
    donate_argnums: int | Sequence[int] | None,
    begun: float,
    *,
    function: Callable[..., Any] | None = None,
) -> Planned:
    """The part of ``plan_step`` after tracing; ``function`` is traced again if no plan fits."""
    with paused():
        return Row(traced, args, request, donate_argnums, function).planned(begun)


MOST_PARTS = 64
"""Microbatches that are tried at most."""
MOST_PLANNED = 2
"""Recipes that are planned whole, at most."""
NEAR = 1.01
"""A quick look this close to a plan may have missed the better one."""


def _under(
    wish: Wish,
    function: Callable[..., Any],
    args: Sequence[Any],
    request: Request,
    donate_argnums: int | Sequence[int] | None,
    begun: float,
) -> Planned:
    """The plan under the recipe that was asked for, or under the best of those left open."""
    rewriter = Rewriter(function, args)
    door = _Door(rewriter, args, request, donate_argnums, begun)
    if "stages" in wish.open:
        return _over_stages(wish, door)
    if wish.recipe.stages > 1:
        wish = _with_stages(wish, door)
    if wish.recipe.schedule:
        door = dataclasses.replace(door, request=_of_stage(request, wish.recipe.stages))
    return _searched(wish, door)


@dataclass(frozen=True, eq=False)
class _Door:
    """What all recipes of a step have in common."""

    rewriter: Rewriter
    args: Sequence[Any]
    request: Request
    donate_argnums: int | Sequence[int] | None
    begun: float

    def row_of(self, recipe: Recipe) -> Row:
        """The step under a recipe."""
        made, traced = self.rewriter(recipe)
        return Row(traced, self.args, self.request, self.donate_argnums, made)

    def look(
        self, recipe: Recipe, known_s: float, bounds_s: Mapping[MeshSpec, float]
    ) -> Outcome[Row | None]:
        """A quick look at a recipe; see ``scout_meshes``."""
        try:
            row = self.row_of(recipe)
            seen = scout_meshes(row.step.quotient, row.step.pins, row.request, known_s, bounds_s)
        except RequestError:  # such as a microbatch that traces to another program
            return Outcome(math.inf, False, None)
        return Outcome(seen.cost_s, seen.fits, row, seen.bound_s)


def _searched(wish: Wish, door: _Door) -> Planned:
    """The plan under the best recipe of those that a wish leaves open, but for stages."""
    rewriter, request, begun = door.rewriter, door.request, door.begun
    first = door.row_of(wish.recipe)
    if not wish.open or (not wish.always and first.fits):
        return first.planned(begun)
    bounds_s = free_bounds(first.step.quotient, first.step.pins, first.request)

    def look(recipe: Recipe, known_s: float) -> Outcome[Row | None]:
        return door.look(recipe, known_s, bounds_s)

    counts, why = _counts(wish, rewriter)
    plain = rewriter.cut(wish.recipe.microbatches, wish.recipe.stages > 1)[1]
    chunks = [1, chunks_worth(plain)] if "chunks" in wish.open else [wish.recipe.chunks]
    kept = {n: _policies(wish, plain, n) for n in chunks}
    total = len(counts) * sum(map(len, kept.values()))
    if total == 1:
        return first.planned(begun)
    best, seen = search_recipes(counts, kept, look, wish.recipe)
    on_host = best is None and "remat" in wish.open and request.cluster.host_memory_bytes > 0
    on_host = on_host and not wish.recipe.schedule
    if on_host:
        best, more = search_recipes(counts, dict.fromkeys(kept, (OFFLOAD,)), look, wish.recipe)
        total, seen = total + len(counts) * len(kept), seen | more
    names = dict.fromkeys(p for mine in kept.values() for p in mine)
    tried = (
        f"{len(seen)} of {total} recipes planned: {' or '.join(map(str, counts))} microbatches, "
        f"remat {', '.join([*names, *[OFFLOAD] * on_host])}"
        + (f", {' or '.join(map(str, kept))} chunks" if len(kept) > 1 else "")
    )
    if why:
        tried += f"; no microbatches: {why}"
    if best is not None:
        planned = _best_planned(seen, begun, tried)
    else:
        nearest = _nearest(seen, request) or first
        floor = memory_floor(nearest.step.quotient, request)
        tried += f"; the least of them needs {bytes_text(floor)} or more"
        planned = nearest.planned(begun, tried)
    note = tried if wish.always else f"the step does not fit as written; {tried}"
    plan = dataclasses.replace(planned.plan, notes=(*planned.plan.notes, note))
    return dataclasses.replace(planned, plan=plan)


MOST_STAGES = 16
"""Stages that are tried at most."""


def _over_stages(wish: Wish, door: _Door) -> Planned:
    """The best plan with stages or without."""
    inner = dataclasses.replace(wish, open=wish.open - {"stages"})
    found: Planned | None = None
    error: MemoryLimitError | None = None
    try:
        found = _searched(inner, door)
    except MemoryLimitError as failed:
        error = failed
    known_s = math.inf if found is None else found.plan.search.cost_s
    seen: dict[Recipe, Outcome[Row | None]] = {}
    refused = ""
    stages = 2
    while stages <= min(MOST_STAGES, door.request.cluster.num_devices):
        try:
            recipe = dataclasses.replace(wish.recipe, stages=stages)
            one = dataclasses.replace(inner, recipe=recipe)
            if recipe.microbatches == 1:
                one = dataclasses.replace(one, open=one.open | {"microbatches"})
            one = _with_stages(one, door)
            door.rewriter(one.recipe)
        except RequestError as failed:
            refused = refused or str(failed)
            break
        for remat in (FULL, NONE) if "remat" in wish.open else (wish.recipe.remat,):
            recipe = dataclasses.replace(one.recipe, remat=remat)
            seen[recipe] = door.look(recipe, known_s / WORTH, {})
            known_s = min(known_s, seen[recipe].cost_s)
        stages *= 2
    tried = f"pipelines of up to {stages // 2} stages: {len(seen)} recipes planned"
    if refused:
        tried = f"{tried}; {refused}" if seen else f"no stages: {refused}"
    if any(o.cost_s < math.inf for o in seen.values()):
        piped = _best_planned(seen, door.begun, tried)
        if found is None or piped.plan.search.cost_s * WORTH < found.plan.search.cost_s:
            found = piped
    if found is None:
        assert error is not None
        raise error
    planning_s = time.perf_counter() - door.begun
    notes = (*found.plan.notes, tried)
    plan = dataclasses.replace(found.plan, notes=notes, planning_s=planning_s)
    return dataclasses.replace(found, plan=plan)


def _nearest(seen: Mapping[Recipe, Outcome[Row | None]], request: Request) -> Row | None:
    """The recipe whose plans need the least memory."""
    rows = [outcome.found for outcome in seen.values() if outcome.found is not None]
    return min(rows, key=lambda r: memory_floor(r.step.quotient, request), default=None)


def _best_planned(seen: Mapping[Recipe, Outcome[Row | None]], begun: float, tried: str) -> Planned:
    """The fastest of the plans of recipes that a quick look found to fit, the most promising
    planned first, and others while the look found something faster for them (up to ``NEAR``)."""
    best: Planned | None = None
    rows = [(o.found, o) for o in seen.values() if o.found is not None and o.cost_s < math.inf]
    rows.sort(key=lambda row: row[1].cost_s)
    for row, look in rows[:MOST_PLANNED]:
        known_s = math.inf if best is None else best.plan.search.cost_s
        if look.cost_s > NEAR * known_s or look.bound_s * WORTH > known_s:
            continue
        try:
            found = row.planned(begun, tried)
        except MemoryLimitError:
            continue
        if best is None or found.plan.search.cost_s * WORTH < known_s:
            best = found
    return rows[0][0].planned(begun, tried) if best is None else best


def _policies(wish: Wish, traced: Traced, chunks: int) -> tuple[str, ...]:
    """Policies of rematerialization to try with a number of chunks."""
    if "remat" not in wish.open:
        return (wish.recipe.remat,)
    return (NONE, *policies(traced, scores if chunks > 1 else None))


PER_STAGE = 4
"""Microbatches for each stage where nothing is said: the bubble is a fifth of a step at most."""


def _with_stages(wish: Wish, door: _Door) -> Wish:
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


def _of_stage(request: Request, stages: int) -> Request:
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


def _counts(wish: Wish, rewriter: Rewriter) -> tuple[tuple[int, ...], str]:
    """Numbers of microbatches to try, and why there are no more than one."""
    given = wish.recipe.microbatches
    if "microbatches" not in wish.open:
        return (given,), ""
    try:
        size = batch_size(rewriter.cut(1)[1])
    except RequestError as error:
        return (1,), str(error)
    counts = [m for m in range(1, min(size, MOST_PARTS) + 1) if size % m == 0]
    twos = [m for m in counts if m & (m - 1) == 0]
    counts = twos if len(twos) > 1 else counts
    try:
        rewriter.cut(counts[min(1, len(counts) - 1)])
    except RequestError as error:
        return (1,), str(error)
    return tuple(counts), ""
