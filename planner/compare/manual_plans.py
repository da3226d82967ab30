"""A step under the usual manual plans, beside the one that is chosen.

Every kind is planned, not imitated: what it is made of is required (mesh, batch, how the state is
stored) and the search completes it as cheaply as it can, with the same prices for all.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from jax.sharding import PartitionSpec

from costmodels import Cluster
from planner.arguments.calls import Indices, Names, bind
from planner.arguments.metadata import with_logical_axis_rules
from planner.compare.difference import Difference, Exchange, Figure, Moved, Setting, difference
from planner.errors import MemoryLimitError, PinError
from planner.graph.ir import Graph
from planner.graph.trace import Traced
from planner.plan.plan import Plan
from planner.planning import plan_step, plan_traced
from planner.recipes import Rewriter, parse_wish
from planner.remat.policy import DOTS, FULL, NONE
from planner.request.marks import marks, placed_mesh
from planner.request.options import (
    Options,
    Request,
    given_options,
    parse_request,
    takes_options,
)
from planner.request.pins import axis_names
from planner.request.sequence_parallel import batch_inputs, sequences
from planner.request.state import StateRequest, find_state
from planner.search.registry import FAST
from planner.spec import PLAIN, REWRITINGS, MeshSpec, Recipe

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
        what: the same in words.
        plan: None when the step can't be run so; ``refused`` says why.
        fits: whether ``plan`` keeps to the memory limit.
        refused: empty when there is a plan.
        note: how far the plan is from what it is called; empty when it is just that.
    """

    name: str
    what: str
    plan: Plan | None
    fits: bool
    refused: str = ""
    note: str = ""

    @property
    def collectives(self) -> tuple[Collectives, ...]:
        """What its devices say to each other, by kind, dearest first."""
        sums: dict[str, list[float]] = {}
        for row in self.plan.collectives if self.plan is not None else ():
            sums.setdefault(row.kind, [0.0, 0.0, 0.0])
            for k, part in enumerate((1.0, row.time_s, row.payload_bytes)):
                sums[row.kind][k] += row.count * part
        found = [Collectives(kind, *parts) for kind, parts in sums.items()]
        return tuple(sorted(found, key=lambda c: (-c.time_s, c.kind)))


@dataclass(frozen=True)
class Comparison:
    """The chosen plan and the others, in the order in which they are named in ``compare``."""

    cluster: str
    limit_bytes: float
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        """The plan that ``make_plan`` makes."""
        return self.candidates[0]


@dataclass(frozen=True)
class _Kind:
    """A kind of plan as a request."""

    name: str
    what: str
    batch: int
    """Devices that the batch is split over."""
    options: dict[str, Any]
    axes: tuple[str, ...] = ()
    """Mesh axes of the batch's dimensions, by position; nothing is said where it is empty."""
    tensor: str = ""
    sequence: str = ""


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
    """Plan a step as asked, and under the usual manual plans.

    All of them are of the step under the recipe of the chosen plan: its microbatches, and what it
    computes again. Where it computes something again, the chosen plan's rivals are also the
    searched plans that compute all of each block again, and all but products.

    The kinds are: data parallel; ZeRO-1; FSDP (ZeRO-3); tensor parallel over every degree that
    divides the devices, data parallel over the rest; the same with FSDP over the rest; and the
    second dimension of the batch split over every such degree (sequence).

    Args:
        function: the step.
        *args: its arguments, arrays or ShapeDtypeStructs.
        cluster, donate_argnums, static_argnums, static_argnames: as for ``make_plan``.
        progress: called with the name of every kind before it is planned.
        **options: of ``make_plan``: memory, time_limit_s and logical_axis_rules for all kinds, the
            others (mode, search, mesh, zero, shardings, ...) for the chosen plan alone.

    Raises:
        ModelError, RequestError: as ``make_plan``, but for memory and pins: what does not fit, or
            contradicts a mark, has a place in the result that says so.
    """
    given = given_options("compare", options)
    common: Any = {name: given[name] for name in ("memory", "time_limit_s") if name in given}
    bound = bind(function, args, static_argnums=static_argnums, static_argnames=static_argnames)
    function = with_logical_axis_rules(bound.function, given.pop("logical_axis_rules", None))
    args = bound.args
    given.setdefault("mesh", placed_mesh(args, cluster))
    progress(CHOSEN)
    recipe = _recipe(function, args, cluster, donate_argnums, given)
    asked = parse_request(cluster, **given)
    rewriter = Rewriter(function, args)
    step = _Step.under(rewriter, recipe, donate_argnums)
    traced = step.traced
    what = f"the plan of mode {asked.mode}{_recipe_text(recipe)}"
    out = [_candidate(step, CHOSEN, what, asked)]
    for policy in (FULL, DOTS) if recipe.remat != NONE and asked.mode == "AUTO_PARALLEL" else ():
        if policy != recipe.remat:
            progress(f"remat {policy}")
            other = dataclasses.replace(recipe, remat=policy)
            what = f"the plan of mode {asked.mode}{_recipe_text(other)}"
            again = _Step.under(rewriter, other, donate_argnums)
            out.append(_candidate(again, f"remat {policy}", what, asked))
    for kind in _kinds(traced.graph, asked.cluster.num_devices):
        if not _divides(traced.graph, kind.batch):
            why = f"no argument has a first dimension that {kind.batch} devices divide"
            out.append(Candidate(kind.name, kind.what, None, False, why))
            continue
        progress(kind.name)
        request = parse_request(cluster, **common, **kind.options)
        request = dataclasses.replace(request, mesh=_with_marked(request.mesh, traced))
        rules = _batch_rules(traced.graph, request.mesh, kind.axes)
        if kind.sequence:
            rules |= _whole_rules(traced.graph)
        request = dataclasses.replace(
            request, tensor=kind.tensor, sequence=kind.sequence, shardings=rules
        )
        made = _candidate(step, kind.name, kind.what, request)
        out.append(dataclasses.replace(made, note=_note(traced.graph, kind, made.plan)))
    return Comparison(asked.cluster.text, asked.limit_bytes, tuple(out))


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
    """The recipe of the chosen plan; the plain one where nothing fits. Takes what was asked about
    recipes out of ``given``."""
    asked = {name: given.pop(name) for name in REWRITINGS if name in given}
    try:
        plan = plan_step(
            function, *args, cluster=cluster, donate_argnums=donate_argnums, **asked, **given
        ).plan
    except (MemoryLimitError, PinError):
        wish = parse_wish(asked, function, False)
        return wish.recipe
    return plan.recipe


def _recipe_text(recipe: Recipe) -> str:
    return f" ({recipe})" if recipe != PLAIN else ""


def _candidate(step: _Step, name: str, what: str, request: Request) -> Candidate:
    """Plan one kind; where it does not fit, as if there were memory enough."""
    request = dataclasses.replace(request, advice=False)
    try:
        return Candidate(name, what, step.planned(request), True)
    except PinError as error:
        return Candidate(name, what, None, False, str(error))
    except MemoryLimitError:
        free = dataclasses.replace(request, limit_bytes=math.inf)
        plan = step.planned(free)
        told = dataclasses.replace(plan.prediction, limit_bytes=request.limit_bytes)
        return Candidate(name, what, dataclasses.replace(plan, prediction=told), False)


def _kinds(graph: Graph, devices: int) -> Iterator[_Kind]:
    """The manual plans that a number of devices allows."""
    data = {"mode": "DATA_PARALLEL", "search": FAST}
    search = {"mode": "AUTO_PARALLEL", "search": FAST}
    yield _Kind("data parallel", "batch split, everything else whole", devices, {**data, "zero": 0})
    if devices == 1:
        return
    for name, what, level in (
        ("ZeRO-1", "data parallel, optimizer state split", 1),
        ("FSDP", "data parallel, parameters and state split", 3),
    ):
        mesh = MeshSpec(("data",), (devices,))
        yield _Kind(name, what, devices, {**search, "mesh": mesh, "zero": level}, ("data",))
    degrees = [t for t in range(2, devices + 1) if devices % t == 0]
    for t in degrees:
        mesh = MeshSpec(("data", "model"), (devices // t, t))
        yield _Kind(
            f"tensor {t}",
            f"every matrix split over {t}, batch over {devices // t}",
            devices // t,
            {**search, "mesh": mesh, "zero": 0},
            ("data",),
            tensor="model",
        )
    for t in degrees[:-1]:
        mesh = MeshSpec(("data", "model"), (devices // t, t))
        yield _Kind(
            f"FSDP {devices // t} x tensor {t}",
            f"every matrix split over {t}, batch and state over {devices // t}",
            devices // t,
            {**search, "mesh": mesh, "zero": 3},
            ("data",),
            tensor="model",
        )
    shapes = [graph.values[v].shape for v in sequences(graph)]
    for t in degrees:
        if shapes and all(s[1] % t == 0 for s in shapes):
            yield _Kind(
                f"sequence {t}",
                f"second dimension of the batch over {t}, the first over {devices // t}",
                devices // t,
                {**search, "mesh": MeshSpec(("data", "sequence"), (devices // t, t))},
                ("data", "sequence"),
                sequence="sequence",
            )


MOST = 0.9
"""Share of the bytes that has to be as a kind says for it to have no note."""


def _with_marked(mesh: MeshSpec | None, traced: Traced) -> MeshSpec | None:
    """The mesh with the axes that marks in the model name besides its own, of one device each."""
    if mesh is None:
        return None
    more = [name for name in axis_names(marks(traced, set())) if name not in mesh.names]
    return MeshSpec((*mesh.names, *more), (*mesh.sizes, *[1] * len(more)))


def _note(graph: Graph, kind: _Kind, plan: Plan | None) -> str:
    """What is not as the kind says: how much of the parameters or the state is split otherwise."""
    if plan is None:
        return ""
    parameters = find_state(graph, StateRequest()).parameters
    leaves = dict(zip(graph.inputs, plan.inputs, strict=True))
    sizes = {v: graph.values[v].nbytes for v, leaf in leaves.items() if leaf.tied}

    def share(values: frozenset[int], axes: Sequence[str]) -> float:
        whole = sum(sizes[v] for v in values)
        split = sum(sizes[v] for v in values if set(leaves[v].spec.axes) & set(axes))
        return split / whole if whole else 1.0

    if kind.tensor and (part := share(parameters, (kind.tensor,))) < MOST:
        return f"{part:.0%} of the parameters' bytes are split over {kind.tensor}"
    level = kind.options.get("zero")
    if level == 1 and (part := share(parameters, ("data",))) > 1 - MOST:
        return f"{part:.0%} of the parameters' bytes are split, too: one decision with their state"
    if level == 3 and (part := share(frozenset(sizes), ("data",))) < MOST and kind.batch > 1:
        return f"{part:.0%} of the state's bytes are split over data"
    return ""


def _divides(graph: Graph, devices: int) -> bool:
    """Whether some of the batch can be split over so many devices."""
    shapes = [graph.values[v].shape for v in batch_inputs(graph)]
    return devices == 1 or any(shape[0] % devices == 0 for shape in shapes)


def _batch_rules(
    graph: Graph, mesh: MeshSpec | None, axes: Sequence[str]
) -> dict[str, PartitionSpec]:
    """Path rules that put the batch's dimensions on mesh axes, where they divide."""
    if mesh is None or not axes:
        return {}
    out = {}
    paths = dict(zip(graph.inputs, graph.input_paths, strict=True))
    for value in batch_inputs(graph):
        shape = graph.values[value].shape
        entries = [
            axis if n % mesh.size(axis) == 0 else None for n, axis in zip(shape, axes, strict=False)
        ]
        out[f"^{re.escape(paths[value])}$"] = PartitionSpec(*entries)
    return out


def _whole_rules(graph: Graph) -> dict[str, PartitionSpec]:
    """Path rules that leave the state whole."""
    paths = [graph.values[v].name for v in graph.state]
    return {f"^{re.escape(path)}$": PartitionSpec() for path in paths}
