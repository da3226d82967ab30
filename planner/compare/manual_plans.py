"""A step under the usual manual plans, compared with the chosen plan.

Every kind is planned, not imitated: its defining properties are required (mesh, sharding of the
batch, sharding of the state), and the search completes them at the lowest cost. All kinds use the
same cost model.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from costmodels import Cluster
from planner.arguments.calls import Indices, Names, bind
from planner.arguments.metadata import with_logical_axis_rules
from planner.compare.difference import Difference, Exchange, Figure, Moved, Setting, difference
from planner.compare.kinds import (
    batch_rules,
    divides,
    kinds,
    note,
    whole_rules,
    with_marked,
)
from planner.errors import MemoryLimitError, PinError, RequestError
from planner.graph.trace import Traced
from planner.microbatch.rewrite import batch_size
from planner.plan.plan import Plan
from planner.planning import of_stage, plan_step, plan_traced
from planner.recipes import Rewriter, parse_wish
from planner.remat.policy import DOTS, FULL, NONE
from planner.request.marks import placed_mesh
from planner.request.options import Options, given_options, takes_options
from planner.request.parsed import Request, parse_request
from planner.search.registry import FAST
from planner.spec import PLAIN, REWRITINGS, STAGE, MeshSpec, Recipe

__all__ = [
    "Candidate",
    "Collectives",
    "Comparison",
    "Difference",
    "Exchange",
    "Figure",
    "Moved",
    "Setting",
    "compare",
    "difference",
]

CHOSEN = "chosen"


@dataclass(frozen=True)
class Collectives:
    """All collectives of one kind in a step: runs, seconds and payload bytes of one device."""

    kind: str
    count: float
    time_s: float
    payload_bytes: float


@dataclass(frozen=True)
class Candidate:
    """One way to run the step.

    Attributes:
        name: such as ``"FSDP"`` or ``"tensor 4"``; the first is ``CHOSEN``.
        what: a description in words.
        plan: None when the step can't run like this; ``refused`` says why.
        fits: whether ``plan`` stays within the memory limit.
        refused: empty when there is a plan.
        note: how the plan differs from its name; empty when it does not.
    """

    name: str
    what: str
    plan: Plan | None
    fits: bool
    refused: str = ""
    note: str = ""

    @property
    def collectives(self) -> tuple[Collectives, ...]:
        """The collectives of its plan by kind, most expensive first."""
        sums: dict[str, list[float]] = {}
        for row in self.plan.collectives if self.plan is not None else ():
            sums.setdefault(row.kind, [0.0, 0.0, 0.0])
            for k, part in enumerate((1.0, row.time_s, row.payload_bytes)):
                sums[row.kind][k] += row.count * part
        totals = [Collectives(kind, *parts) for kind, parts in sums.items()]
        return tuple(sorted(totals, key=lambda c: (-c.time_s, c.kind)))


@dataclass(frozen=True)
class Comparison:
    """The chosen plan and the others, in the order that ``compare`` lists them in."""

    cluster: str
    limit_bytes: float
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        """The plan that ``make_plan`` makes."""
        return self.candidates[0]


@takes_options
def compare(
    function: Callable[..., Any],
    *args: Any,
    cluster: str | Cluster,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: Indices = (),
    static_argnames: Names = (),
    progress: Callable[[str], None] = lambda name: None,
    **options: Unpack[Options],
) -> Comparison:
    """Plan a step as requested, and under the usual manual plans.

    All manual plans use the recipe of the chosen plan without its stages: its microbatches and its
    rematerialization. If the chosen plan rematerializes, it is also compared with the searched
    plans that rematerialize all of each block, and all of each block but products.

    The kinds are: data parallel; ZeRO-1; FSDP (ZeRO-3); tensor parallel over every degree that
    divides the devices, data parallel over the rest; the same with FSDP over the rest; and the
    second dimension of the batch split over every such degree (sequence). On two nodes or more
    also 2, 4 and 8 pipeline stages by 1F1B, alone and with tensor parallelism inside a node.

    Args:
        function: the step.
        *args: its arguments, arrays or ShapeDtypeStructs.
        cluster, donate_argnums, static_argnums, static_argnames: as for ``make_plan``.
        progress: called with the name of every kind before it is planned.
        **options: of ``make_plan``: memory, time_limit_s and logical_axis_rules for all kinds, the
            others (mode, search, mesh, zero, shardings, ...) for the chosen plan alone.

    Raises:
        ModelError, RequestError: as ``make_plan``, except for memory and pins: a plan that does not
            fit, or contradicts a mark, is part of the result, with the reason.
    """
    given = given_options("compare", options)
    common: Any = {name: given[name] for name in ("memory", "time_limit_s") if name in given}
    bound = bind(function, args, static_argnums=static_argnums, static_argnames=static_argnames)
    function = with_logical_axis_rules(bound.function, given.pop("logical_axis_rules", None))
    args = bound.args
    given.setdefault("mesh", placed_mesh(args, cluster))
    progress(CHOSEN)
    recipe = _recipe(function, args, cluster, donate_argnums, given)
    request = parse_request(cluster, **given)
    rewriter = Rewriter(function, args)
    step = _Step.under(rewriter, recipe, donate_argnums)
    what = f"the plan of mode {request.mode}{_recipe_text(recipe)}"
    whole = of_stage(request, recipe.stages) if recipe.schedule else request
    out = [_candidate(step, CHOSEN, what, whole)]
    for policy in (FULL, DOTS) if recipe.remat != NONE and request.mode == "AUTO_PARALLEL" else ():
        if policy != recipe.remat:
            progress(f"remat {policy}")
            other = dataclasses.replace(recipe, remat=policy, cuts=())
            what = f"the plan of mode {request.mode}{_recipe_text(other)}"
            again = _Step.under(rewriter, other, donate_argnums)
            out.append(_candidate(again, f"remat {policy}", what, whole))
    alone = dataclasses.replace(recipe, stages=1, schedule="", cuts=())
    step = step if alone == recipe else _Step.under(rewriter, alone, donate_argnums)
    out += _usual(step, cluster, common, progress)
    if request.cluster.num_devices > request.cluster.devices_per_node or alone != recipe:
        for stages in STAGES:
            progress(f"{stages} stages")
            rows = _piped(rewriter, recipe, stages, donate_argnums, cluster, common)
            out += rows
            if any(row.refused for row in rows):
                break  # more stages are refused too
    return Comparison(request.cluster.text, request.limit_bytes, tuple(out))


def _usual(
    step: _Step, cluster: str | Cluster, common: dict[str, Any], progress: Callable[[str], None]
) -> list[Candidate]:
    """The manual plans without stages."""
    traced, out = step.traced, []
    for kind in kinds(traced.graph, parse_request(cluster, **common).cluster.num_devices):
        if not divides(traced.graph, kind.batch):
            why = f"no argument has a first dimension that {kind.batch} devices divide"
            out.append(Candidate(kind.name, kind.what, None, False, why))
            continue
        progress(kind.name)
        request = parse_request(cluster, **common, **kind.options)
        request = dataclasses.replace(request, mesh=with_marked(request.mesh, traced))
        rules = batch_rules(traced.graph, request.mesh, kind.axes)
        if kind.sequence:
            rules |= whole_rules(traced.graph)
        request = dataclasses.replace(
            request, tensor=kind.tensor, sequence=kind.sequence, shardings=rules
        )
        candidate = _candidate(step, kind.name, kind.what, request)
        out.append(dataclasses.replace(candidate, note=note(traced.graph, kind, candidate.plan)))
    return out


STAGES = (2, 4, 8)
"""Numbers of pipeline stages to compare."""


def _piped(
    rewriter: Rewriter,
    recipe: Recipe,
    stages: int,
    donated: int | Sequence[int] | None,
    cluster: str | Cluster,
    common: dict[str, Any],
) -> list[Candidate]:
    """Stages by 1F1B, alone and with tensor parallelism inside a node, data parallelism and ZeRO-1
    over the rest; one row without a plan if the step can't be cut into these stages."""
    plain = parse_request(cluster, **common)
    devices = plain.cluster.num_devices
    if devices % stages:
        return []
    name = f"{stages} stages"
    try:
        size = batch_size(rewriter.cut(1)[1])
        parts = max((m for m in range(2, 4 * stages + 1) if size % m == 0), default=1)
        piped = dataclasses.replace(
            recipe,
            stages=stages,
            schedule="1f1b",
            microbatches=parts,
            chunks=1,
            pad_batch=0,
            cuts=(),
        )
        _Step.under(rewriter, dataclasses.replace(piped, replicas=1), donated)
        of_stage(plain, stages)
    except RequestError as error:
        return [Candidate(name, "layers in groups, by 1F1B", None, False, str(error))]
    rest = devices // stages
    within = math.gcd(rest, plain.cluster.devices_per_node)
    out = []
    for t in dict.fromkeys((1, within)):
        mesh = MeshSpec((STAGE, "data", "model"), (stages, rest // t, t))
        step = _reduced_once(rewriter, piped, rest // t, donated)
        options: dict[str, Any] = {"mode": "AUTO_PARALLEL", "search": FAST, "mesh": mesh, "zero": 1}
        request = of_stage(parse_request(cluster, **common, **options), stages)
        rules = batch_rules(step.traced.graph, request.mesh, ("data",))
        request = dataclasses.replace(
            request,
            mesh=with_marked(request.mesh, step.traced),
            tensor="model" if t > 1 else "",
            shardings=rules,
        )
        what = f"{parts} microbatches by 1F1B, matrices over {t}, batch over {rest // t}"
        candidate = _candidate(step, f"{name} x tensor {t} x data {rest // t}", what, request)
        if candidate.plan is not None and not candidate.fits:
            prediction = dataclasses.replace(
                candidate.plan.prediction, limit_bytes=plain.limit_bytes
            )
            candidate = dataclasses.replace(
                candidate, plan=dataclasses.replace(candidate.plan, prediction=prediction)
            )
        out.append(candidate)
    return out


def _reduced_once(
    rewriter: Rewriter, recipe: Recipe, data: int, donated: int | Sequence[int] | None
) -> _Step:
    """The step under a recipe; its gradients are reduced once per step over ``data`` devices, if
    the batch allows it."""
    if recipe.microbatches == 1:
        return _Step.under(rewriter, dataclasses.replace(recipe, replicas=1), donated)
    try:
        return _Step.under(rewriter, dataclasses.replace(recipe, replicas=data), donated)
    except RequestError:
        return _Step.under(rewriter, dataclasses.replace(recipe, replicas=1), donated)


@dataclass(frozen=True)
class _Step:
    function: Callable[..., Any]
    args: Sequence[Any]
    traced: Traced
    donate_argnums: int | Sequence[int] | None

    @staticmethod
    def under(rewriter: Rewriter, recipe: Recipe, donated: int | Sequence[int] | None) -> _Step:
        """The step under a recipe."""
        function, traced = rewriter(recipe)
        return _Step(function, rewriter.args, traced, donated)

    def planned(self, request: Request) -> Plan:
        """The plan; if stages are separate programs, ``request`` is that of one stage."""
        begun, donated = time.perf_counter(), self.donate_argnums
        return plan_traced(
            self.traced, self.args, request, donated, begun, function=self.function
        ).plan


def _recipe(
    function: Callable[..., Any],
    args: Sequence[Any],
    cluster: str | Cluster,
    donate_argnums: int | Sequence[int] | None,
    given: dict[str, Any],
) -> Recipe:
    """The recipe of the chosen plan; the requested one, plain by default, if nothing fits. Removes
    the options of recipes from ``given``."""
    rewritings = {name: given.pop(name) for name in REWRITINGS if name in given}
    try:
        plan = plan_step(
            function, *args, cluster=cluster, donate_argnums=donate_argnums, **rewritings, **given
        ).plan
    except (MemoryLimitError, PinError):
        wish = parse_wish(rewritings, function, False)
        return wish.recipe
    return plan.recipe


def _recipe_text(recipe: Recipe) -> str:
    return f" ({recipe})" if recipe != PLAIN else ""


def _candidate(step: _Step, name: str, what: str, request: Request) -> Candidate:
    """Plan one kind; if it does not fit, without a memory limit."""
    request = dataclasses.replace(request, advice=False)
    try:
        return Candidate(name, what, step.planned(request), True)
    except PinError as error:
        return Candidate(name, what, None, False, str(error))
    except MemoryLimitError:
        free = dataclasses.replace(request, limit_bytes=math.inf)
        plan = step.planned(free)
        prediction = dataclasses.replace(plan.prediction, limit_bytes=request.limit_bytes)
        return Candidate(name, what, dataclasses.replace(plan, prediction=prediction), False)
