"""``make_plan``: the door. trace -> rules -> groups -> price -> search -> Plan."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from costmodels import (
    AnalyticCostModel,
    Cluster,
    ClusterError,
    CostModel,
    parse_bytes,
    parse_cluster,
)
from planner.annotate import Pin, mark_entries, metadata_pins, rule_pins
from planner.errors import MemoryLimitError, PinError, RequestError
from planner.extract import Extraction
from planner.graph.blocks import repeated_blocks
from planner.graph.ir import Graph
from planner.graph.trace import Traced, trace
from planner.groups import MARKS, build_groups
from planner.modes import check_mode, get_parallel_mode
from planner.pins import Mask, axis_names, mode_pins, pin_masks, soft_masks
from planner.plan import MeshRow, Plan, SearchReport, rounded
from planner.pricing import Analysis, Priced, analyse, ideal_s, price
from planner.rules.borders import border_rule
from planner.rules.factor import FactorRule
from planner.rules.registry import rules_for
from planner.search import SEARCHES, lower_bound
from planner.search.problem import Problem, Solution, evaluate
from planner.spec import MeshSpec, enumerate_meshes, factorizations, parse_mesh

SAME = 1.03
"""Cost, relative to the best mesh's, up to which a simpler mesh is taken instead: a
difference that the cost model can't resolve is no reason for another mesh axis."""
SPREAD = 10.0
"""Surcharge for a change of layout outside AUTO_PARALLEL, in steps of one device."""
LEADERS = 3
"""Meshes on which the requested search is run at most, after scouting."""


@dataclass(frozen=True)
class Request:
    """What was asked for, parsed."""

    cluster: Cluster
    model: CostModel
    mode: str
    search: str
    mesh: MeshSpec | None
    limit_bytes: float
    time_limit_s: float


def make_plan(
    function: Callable[..., Any],
    *args: Any,
    cluster: str | Cluster,
    mode: str | None = None,
    search: str | None = None,
    mesh: str | Mapping[str, int] | MeshSpec | None = None,
    memory: str | float | None = None,
    shardings: Mapping[str, Any] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    time_limit_s: float = 60.0,
) -> Plan:
    """Plan a train step for a cluster; starts no backend.

    Args:
        function: the step, any jit-able function of pytrees.
        *args: arrays or ShapeDtypeStructs.
        cluster: ``"h100:8x4"``, ``"v5p:4x4x8"``, ``"cpu:8"``, a .toml path or a Cluster.
        mode: one of ``planner.modes.MODES``; None takes ``set_parallel_mode``'s.
        search: a name of ``planner.search.SEARCHES``; None likewise.
        mesh: a fixed logical mesh (``"data=4,model=2"``); None tries all up to three axes.
        memory: limit per device (``"80GB"`` or bytes); None takes the device's.
        shardings: ``{"regex over argument path": PartitionSpec(...)}``, kept or refused.
        donate_argnums: arguments whose memory the results may take; None means every
            argument that comes back as a result.
        time_limit_s: for the search, per mesh.

    Returns:
        The plan.

    Raises:
        ModelError: the step failed while traced.
        RequestError: the request can't be met (PinError, MemoryLimitError among them).
    """
    begun = time.perf_counter()
    request = parse_request(
        cluster, mode=mode, search=search, mesh=mesh, memory=memory, time_limit_s=time_limit_s
    )
    traced = trace(function, args)
    return plan_traced(traced, args, request, shardings or {}, donate_argnums, begun)


def plan_traced(
    traced: Traced,
    args: Sequence[Any],
    request: Request,
    shardings: Mapping[str, Any],
    donate_argnums: int | Sequence[int] | None,
    begun: float,
) -> Plan:
    """The part of ``make_plan`` after tracing."""
    graph = traced.graph
    rules = graph_rules(traced)
    donated = _donated(traced, donate_argnums)
    analysis = analyse(graph, rules, build_groups(graph, rules), donated)
    named = (
        *rule_pins(shardings, graph.input_paths, graph.inputs),
        *metadata_pins(args, graph.inputs, graph.input_paths),
    )
    pins = (*_marks(traced, {pin.value for pin in named}), *named)
    if request.mode in ("STAND_ALONE", "DATA_PARALLEL"):
        pins = ()  # these modes say everything themselves; marks wait for another mode
    tried = _search_meshes(analysis, pins, request)
    priced, solution = _choose(tried)
    if not solution.feasible:
        raise _infeasible(priced, solution, request)
    return _plan(priced, solution, tried, request, rules, begun)


Tried = tuple[Priced, Solution]


def _solve(name: str, problem: Problem, request: Request) -> Solution:
    """Run a search; what it refuses (too many combinations for brute) is a RequestError."""
    if not problem.cost_s:
        return Solution((), 0.0, 0.0, 0.0, 0, True, name, "nothing to decide", 0.0)
    try:
        return SEARCHES[name](problem, time_limit_s=request.time_limit_s)
    except ValueError as error:
        raise RequestError(f"search {name}: {error}; choose another search") from error


def _rank(tried: Tried) -> tuple[bool, float, int]:
    """Feasible first, then cheapest (else least memory), then the fewest mesh axes."""
    priced, solution = tried
    value = solution.cost_s if solution.feasible else solution.peak_bytes
    return not solution.feasible, value, len(priced.mesh.sizes)


def _choose(tried: Sequence[Tried]) -> Tried:
    """The best mesh; of those within ``SAME`` of it the one with the fewest axes and the
    longest first one, so that a tie never costs readability."""
    best = min(tried, key=_rank)
    if not best[1].feasible:
        return best
    level = [t for t in tried if t[1].feasible and t[1].cost_s <= SAME * best[1].cost_s]
    return min(level, key=lambda t: (len(t[0].mesh.sizes), [-n for n in t[0].mesh.sizes]))


def _search_meshes(analysis: Analysis, pins: Sequence[Pin], request: Request) -> tuple[Tried, ...]:
    """Try meshes: all of one and two axes axis by axis, then the three-axis refinements of the
    best, then the requested search on the mesh that leads until it stays in the lead."""
    meshes = _meshes(request, pins)
    if len(meshes) == 1:
        return (_attempt(analysis, pins, request, meshes[0], request.search),)

    ideal = ideal_s(analysis, request.model, request.cluster.num_devices)
    tried: list[Tried] = []
    refused: list[PinError] = []
    for axes in (1, 2, 3):
        level = [m for m in meshes if sum(n > 1 for n in m.sizes) == axes]
        if axes == 3 and tried:
            lead = min(tried, key=_rank)[0].mesh
            level = [m for m in level if _refines(m, lead)]
        for mesh in level:
            try:
                tried.append(_attempt(analysis, pins, request, mesh, "recursive_programming"))
            except PinError as error:
                refused.append(error)
        if tried:
            first = min(tried, key=_rank)[1]
            if first.feasible and first.cost_s <= SAME * ideal:
                break
    if not tried:
        raise refused[0]
    if request.search == "recursive_programming":
        return tuple(tried)
    settled: set[MeshSpec] = set()
    while (pick := _choose(tried)) and pick[0].mesh not in settled and len(settled) < LEADERS:
        scouted = pick[1]
        settled.add(pick[0].mesh)
        found = _attempt(analysis, pins, request, pick[0].mesh, request.search)
        if _rank(found) > _rank(pick):
            better = max(found[1].lower_bound_s, scouted.lower_bound_s)
            found = (pick[0], dataclasses.replace(scouted, lower_bound_s=better))
        tried[tried.index(pick)] = found
    return tuple(tried)


def _attempt(
    analysis: Analysis, pins: Sequence[Pin], request: Request, mesh: MeshSpec, search: str
) -> Tried:
    """Price one mesh under the pins and the mode, and run one search on it.

    Outside AUTO_PARALLEL the given shardings are spread: every other change of layout costs
    more than the whole step, so that the search only completes what was given.
    """
    graph, groups, model = analysis.graph, analysis.groups, request.model
    hard = pin_masks(pins, graph, groups, mesh)
    masks: Mapping[int, Mask] = soft_masks(
        mode_pins(request.mode, graph, mesh, pins), graph, groups, mesh, hard
    )
    priced = price(analysis, mesh, model, request.limit_bytes, masks)
    if request.mode == "AUTO_PARALLEL":
        return priced, _solve(search, priced.problem, request)
    surcharge = SPREAD * ideal_s(analysis, model, 1) + 1e-9
    spread = price(analysis, mesh, model, request.limit_bytes, masks, surcharge)
    found = _solve(search, spread.problem, request)
    cost, peak, moment = evaluate(priced.problem, found.choice)
    lower = min(cost, lower_bound(priced.problem))
    return priced, dataclasses.replace(
        found,
        cost_s=cost,
        peak_bytes=peak,
        peak_moment=moment,
        lower_bound_s=lower,
        reason=f"mode {request.mode}: given shardings spread, nothing else resharded; "
        "the bound is that of any sharding with the same inputs",
    )


def _refines(fine: MeshSpec, coarse: MeshSpec) -> bool:
    """Whether merging neighbouring axes of ``fine`` gives ``coarse``."""
    sizes, total = iter(coarse.sizes), 1
    wanted = next(sizes)
    for n in fine.sizes:
        total *= n
        if total == wanted:
            total, wanted = 1, next(sizes, 0)
        elif wanted and total > wanted:
            return False
    return total == 1


def graph_rules(traced: Traced) -> tuple[FactorRule, ...]:
    """One factor rule per operation: borders by hand, the rest from the registry."""
    graph = traced.graph
    keys = [e for e in traced.eqns if e is not None and e.name not in MARKS]
    known = iter(rules_for(keys))
    out = []
    for op, eqn in zip(graph.ops, traced.eqns, strict=True):
        if eqn is not None and op.kind not in MARKS:
            out.append(next(known))
            continue
        ins = [graph.values[i].shape if i >= 0 else () for i in op.inputs]
        out.append(border_rule(op.kind, ins, [graph.values[o].shape for o in op.outputs]))
    return tuple(out)


def parse_request(
    cluster: str | Cluster,
    *,
    mode: str | None = None,
    search: str | None = None,
    mesh: str | Mapping[str, int] | MeshSpec | None = None,
    memory: str | float | None = None,
    time_limit_s: float = 60.0,
) -> Request:
    """Check and parse what ``make_plan`` was asked for; raises RequestError."""
    current = get_parallel_mode()
    chosen = check_mode(mode or current.mode, search or current.search)
    try:
        parsed = parse_cluster(cluster) if isinstance(cluster, str) else cluster
        limit = float(parse_bytes(memory)) if isinstance(memory, str) else memory
    except ClusterError as error:
        raise RequestError(str(error)) from error
    if limit is not None and not limit > 0:
        raise RequestError(f"memory {memory!r}: expected a positive number of bytes per device")
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh)
    elif isinstance(mesh, Mapping):
        if not mesh or not all(isinstance(n, int) for n in mesh.values()):
            raise RequestError(f"mesh {dict(mesh)!r}: expected axis names with whole sizes")
        mesh = MeshSpec(tuple(mesh), tuple(mesh.values()))
    if chosen.mode == "STAND_ALONE":
        mesh = MeshSpec(("data",), (1,))
    elif mesh is not None and mesh.num_devices != parsed.num_devices:
        raise RequestError(
            f"mesh ({mesh}) needs {mesh.num_devices} devices, cluster {parsed.text} has "
            f"{parsed.num_devices}; change one of them"
        )
    model = AnalyticCostModel(parsed)
    return Request(
        parsed,
        model,
        chosen.mode,
        chosen.search,
        mesh,
        float(model.memory_limit_bytes if limit is None else limit),
        time_limit_s,
    )


def _meshes(request: Request, pins: Sequence[Pin]) -> tuple[MeshSpec, ...]:
    n = request.cluster.num_devices
    if request.mesh is not None:
        return (request.mesh,)
    names = axis_names(pins)
    if request.mode == "DATA_PARALLEL":
        return (MeshSpec(("data",), (n,)),)
    if not names:
        return enumerate_meshes(n)
    if "data" not in names and len(names) < 3:
        names = ("data", *names)
    splits = {sizes for k in range(1, len(names) + 1) for sizes in _spread(n, len(names), k)}
    pinned = [names.index(name) for name in axis_names(pins)]
    real = {s for s in splits if all(s[k] > 1 for k in pinned)}
    return tuple(MeshSpec(names, s) for s in sorted(real or splits, reverse=True))


def _spread(n: int, width: int, parts: int) -> list[tuple[int, ...]]:
    """Factorizations into ``parts`` factors, placed on ``width`` axes with ones elsewhere."""
    import itertools

    out = []
    for sizes in factorizations(n, parts):
        for places in itertools.combinations(range(width), parts):
            row = [1] * width
            for place, size in zip(places, sizes, strict=True):
                row[place] = size
            out.append(tuple(row))
    return out


def _marks(traced: Traced, taken: set[int]) -> tuple[Pin, ...]:
    """Pins of the marks in the model. A mark on an argument itself is how it is stored, too,
    unless that was asked for otherwise (``taken``)."""
    pins = []
    arguments = set(traced.graph.inputs) - taken
    for op, eqn in zip(traced.graph.ops, traced.eqns, strict=True):
        entries = None if eqn is None else mark_entries(op.kind, eqn.params)
        if entries is None:
            continue
        origin = f"{op.source or 'model'}: mark {entries}"
        pins.append(Pin(op.outputs[0], entries, origin))
        if op.inputs[0] in arguments:
            arguments.discard(op.inputs[0])
            pins.append(Pin(op.inputs[0], entries, origin))
    return tuple(pins)


def _donated(traced: Traced, donate_argnums: int | Sequence[int] | None) -> tuple[bool, ...]:
    count = len(traced.graph.inputs)
    if donate_argnums is None:
        carried = {i for i, _ in traced.graph.ties}
        return tuple(k in carried for k in range(count))
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    return tuple(
        any(path.startswith(f"[{n}]") for n in numbers) for path in traced.graph.input_paths
    )


def _infeasible(priced: Priced, solution: Solution, request: Request) -> MemoryLimitError:
    extraction = Extraction(priced, solution.choice)
    least = solution.peak_bytes + priced.analysis.scalar_bytes
    holders = "; ".join(extraction.peak_holders(solution.peak_moment))
    return MemoryLimitError(
        f"no plan fits in {request.limit_bytes:.4g} bytes per device on {request.cluster.text}: "
        f"the least peak found is {least:.4g} bytes (mesh {priced.mesh}), "
        f"{least - request.limit_bytes:.4g} too many; most of it is held by {holders}. "
        "Use more devices, a smaller batch, remat, or a larger limit",
        least_bytes=least,
        limit_bytes=request.limit_bytes,
    )


def _plan(
    priced: Priced,
    solution: Solution,
    tried: Sequence[Tried],
    request: Request,
    rules: Sequence[FactorRule],
    begun: float,
) -> Plan:
    extraction = Extraction(priced, solution.choice)
    graph = priced.analysis.graph
    inputs, outputs = extraction.leaves()
    table: dict[str, int] = {}
    index = tuple(table.setdefault(text, len(table)) for text in graph.texts())
    plan = Plan(
        mode=request.mode,
        cluster=request.cluster.text,
        mesh=priced.mesh,
        inputs=inputs,
        outputs=outputs,
        constraints=extraction.constraints(),
        collectives=extraction.collectives(),
        activations=extraction.activations(),
        fallbacks=_fallbacks(priced.analysis, rules),
        notes=(*_notes(graph), *_untried(priced.analysis, tried, request)),
        meshes=tuple(_mesh_row(p, s, solution) for p, s in tried),
        prediction=extraction.prediction(solution, request.limit_bytes),
        search=SearchReport(
            solution.search, solution.cost_s, solution.lower_bound_s, solution.gap, solution.reason
        ),
        op_table=tuple(table),
        op_index=index,
        op_inputs=tuple(op.inputs for op in graph.ops),
        planning_s=time.perf_counter() - begun,
    )
    return rounded(plan)  # type: ignore[no-any-return]


def _mesh_row(priced: Priced, solution: Solution, best: Solution) -> MeshRow:
    if solution is best:
        verdict = "chosen"
    elif not solution.feasible:
        verdict = "does not fit"
    else:
        verdict = f"{solution.cost_s / max(best.cost_s, 1e-300):.2f}x the chosen one's time"
    return MeshRow(
        str(priced.mesh),
        solution.cost_s if math.isfinite(solution.cost_s) else -1.0,
        solution.lower_bound_s,
        solution.peak_bytes,
        verdict,
    )


def _fallbacks(analysis: Analysis, rules: Sequence[FactorRule]) -> tuple[str, ...]:
    live = analysis.graph.live_ops()
    seen: dict[str, int] = {}
    for op in analysis.graph.ops:
        if live[op.index] and rules[op.index].origin == "opaque":
            text = f"{op.kind} ({op.source or 'no line'}): no rule, replicated"
            seen[text] = seen.get(text, 0) + 1
    return tuple(f"{text} x{n}" if n > 1 else text for text, n in seen.items())


def _untried(analysis: Analysis, tried: Sequence[Tried], request: Request) -> tuple[str, ...]:
    """A line when meshes were left out because none of them can be much better."""
    ideal = ideal_s(analysis, request.model, request.cluster.num_devices)
    best = min(tried, key=_rank)[1].cost_s
    if best <= 0 or (len(tried) == 1 and request.mesh is not None) or best > SAME * ideal:
        return ()
    return (
        f"other meshes can't be more than {100 * (1 - ideal / best):.2g} % faster: "
        f"a perfect split of the work would take {ideal:.4g} s",
    )


def _notes(graph: Graph) -> tuple[str, ...]:
    blocks = tuple(
        f"operations {b.start} to {b.start + b.length * b.count - 1}: {b.count} equal blocks of "
        f"{b.length}"
        for b in repeated_blocks(graph)
    )
    return blocks + tuple(
        f"region {r.index} ({r.kind}): trip count unknown, priced as one"
        for r in graph.regions
        if not r.known
    )
