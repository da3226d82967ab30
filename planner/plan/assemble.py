"""Assembles a Plan from the chosen mesh and strategies."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from costmodels import Cluster
from planner.annotate import Pin
from planner.choose.candidates import SPLITS, batch_axes
from planner.choose.meshes import SCOUTED
from planner.choose.simplest import Tried, devices_worth, idle_text, untried
from planner.cost.apart import kept_apart
from planner.cost.op_seconds import op_seconds
from planner.cost.pricing import Priced
from planner.frontend.inert import inert_notes
from planner.graph.ir import RAGGED, Graph, Op
from planner.plan.compiled.lowering import Lowering, default_lowering, on_named_axes
from planner.plan.compiled.option_sets import with_defaults
from planner.plan.contents.compute import compute_rows
from planner.plan.contents.constraints import constraints_of
from planner.plan.contents.honored import honored
from planner.plan.contents.json_text import rounded
from planner.plan.contents.kinds import WORDS
from planner.plan.contents.rows import Leaf, MeshRow, MeshVerdict, SearchReport
from planner.plan.extract import Extraction
from planner.plan.plan import EQUAL_BLOCKS, Plan
from planner.plan.roles import Roles, renamed, roles_of, strategy_text, with_names
from planner.request.parsed import Request
from planner.request.pins import axis_names
from planner.request.state import LEVELS, StateRequest, data_axes, find_state
from planner.rules.kernels.inside import MASKED, MASKED_GRADIENT
from planner.rules.kernels.regions import REGION
from planner.search.pools import pool_peaks
from planner.search.problem import Solution
from planner.space.buffer import Memory
from planner.spec import STAGE, MeshSpec
from planner.step.classes import Quotient
from planner.step.feeding import batch_of
from planner.step.kernels.flops import masked_operands, ragged_groups


def assembled(
    quotient: Quotient,
    pins: Sequence[Pin],
    whole: Tried,
    best: Tried,
    tried: Sequence[Tried],
    request: Request,
    fallbacks: tuple[str, ...],
    begun: float,
) -> tuple[Plan, Extraction]:
    """The plan of one of the meshes that were tried.

    Args:
        quotient: the step and its classes.
        pins: the pins of the step.
        whole: pricing and choice of the whole step; ``best`` is the same on the classes.
        tried: all meshes, including ``best``.
        request: the request.
        fallbacks: a line for each operation without a rule.
        begun: when planning began (``time.perf_counter``).
    """
    priced, solution = whole
    notes = _apart_note(quotient.apart(solution.choice), len(quotient.part.groups.groups))
    first = _whole_batch_notes(quotient, request, priced.mesh)
    extraction = Extraction(priced, solution.choice)
    roles = roles_of(extraction)
    if _names_are_ours(request):
        mesh = renamed(priced.mesh, roles, frozenset(axis_names(pins)))
        extraction = with_names(extraction, mesh)
    plan = _plan(extraction, roles, solution, best, tried, request, fallbacks, begun)
    worth, dims = devices_worth(priced, solution.choice), quotient.example_dims
    idle = idle_text(extraction.graph, priced.mesh.num_devices, worth, dims)
    pin_rows = honored(extraction, pins, quotient.uses, batch_axes(request, priced.mesh))
    pinned = frozenset(pin.value for pin in pins)
    notes = (*first, *_state_notes(extraction, plan.inputs, request, pinned), *plan.notes, *notes)
    return dataclasses.replace(plan, notes=notes, pins=pin_rows, idle=idle), extraction


def _names_are_ours(request: Request) -> bool:
    """Whether the planner, not the user, names the mesh axes."""
    return request.mesh is None and request.mode == "AUTO_PARALLEL" and request.state.zero is None


def _plan(
    extraction: Extraction,
    roles: Roles,
    solution: Solution,
    best: Tried,
    tried: Sequence[Tried],
    request: Request,
    fallbacks: tuple[str, ...],
    begun: float,
) -> Plan:
    priced, graph = extraction.priced, extraction.graph
    inputs, outputs = extraction.leaves()
    names = not _names_are_ours(request)
    plan = Plan(
        mode=request.mode,
        cluster=request.cluster.text,
        mesh=dataclasses.replace(priced.mesh, ones=()),
        inputs=inputs,
        outputs=outputs,
        constraints=constraints_of(extraction),
        collectives=extraction.collectives(),
        activations=extraction.activations(),
        fallbacks=fallbacks,
        notes=(
            *inert_notes(graph),
            *_ragged_notes(graph, request.cluster),
            *_tensor_notes(extraction, inputs, request),
            *_notes(graph),
            *untried(priced.analysis, tried, request),
            *_left_out(priced.mesh),
            *_stage_notes(priced.mesh, roles),
        ),
        meshes=tuple(
            _mesh_row(p, s, best[1], priced.mesh if s is best[1] else p.mesh, names)
            for p, s in tried
        ),
        prediction=dataclasses.replace(
            extraction.prediction(request.limit_bytes), device_bytes=request.device_bytes
        ),
        search=SearchReport(
            solution.search, solution.cost_s, solution.lower_bound_s, solution.gap, solution.reason
        ),
        op_table=tuple(graph.op_text(graph.ops[first]) for first in graph.firsts()),
        op_index=graph.codes,
        op_inputs=tuple(op.inputs for op in graph.ops),
        strategy=strategy_text(priced.mesh.sizes, roles),
        lowering=_lowering(graph, request.cluster),
        compiler_options=with_defaults(
            request.compiler_options,
            request.cluster.device.fuses_operands,
            {op.kind for op in graph.ops},
        ),
        decisions=extraction.decisions(),
        apart=kept_apart(extraction),
        compute=compute_rows([op.source for op in graph.ops], op_seconds(extraction)),
        planning_s=time.perf_counter() - begun,
        device=request.cluster.device.kind,
    )
    return rounded(plan)  # type: ignore[no-any-return]


def _lowering(graph: Graph, cluster: Cluster) -> Lowering:
    """The default lowering; with a ``shard_map``, its mesh axes stay as they are."""
    how = default_lowering(cluster)
    return on_named_axes(how) if any(op.kind == REGION for op in graph.ops) else how


def _mesh_row(
    priced: Priced, solution: Solution, best: Solution, mesh: MeshSpec, names: bool
) -> MeshRow:
    """The row of a mesh. Its axes have names if the user gave them, or if the plan uses it."""
    known, peak = math.isfinite(solution.cost_s), solution.peak_bytes
    first = bool(solution.choice) and not solution.feasible and solution.reason == SCOUTED
    if first and best.feasible and solution.lower_bound_s >= best.cost_s:
        solution = dataclasses.replace(solution, choice=())
        known, peak = False, math.inf
    if solution.choice and priced.analysis.scheduled.chosen and priced.problem.pools:
        peak = pool_peaks(priced.problem, solution.choice)[Memory.DEVICE]
    if solution is best:
        verdict = MeshVerdict.CHOSEN
    elif not solution.choice:
        verdict = MeshVerdict.PRUNED
    elif first:
        verdict = MeshVerdict.UNSEARCHED
    elif not solution.feasible:
        verdict = MeshVerdict.UNFIT
    else:
        verdict = MeshVerdict.SLOWER
    return MeshRow(
        str(mesh) if names or solution is best else "x".join(map(str, mesh.sizes)),
        solution.cost_s if known else -1.0,
        solution.lower_bound_s,
        peak if math.isfinite(peak) else -1.0,
        verdict,
    )


def _stage_notes(mesh: MeshSpec, roles: Roles) -> tuple[str, ...]:
    """A note if an axis has the name of pipeline stages but another role."""
    if STAGE not in mesh.names or mesh.size(STAGE) == 1:
        return ()
    role = roles.of[mesh.names.index(STAGE)]
    if role == STAGE:
        return ()
    used = WORDS.get(role, "nothing")
    return (
        f"the mesh axis {STAGE} is used for {used}: the step has no pipeline stages; "
        f"stages={mesh.size(STAGE)} makes some",
    )


def _left_out(mesh: MeshSpec) -> tuple[str, ...]:
    """A note on axes of the user's mesh that the plan's mesh leaves out."""
    axes = ", ".join(mesh.ones)
    return (f"mesh axes of one device are left out: {axes}",) if axes else ()


def _apart_note(apart: int, kinds: int) -> tuple[str, ...]:
    """A note if equal parts of the step have different plans."""
    if not apart:
        return ()
    return (
        f"equal parts of the step get different plans in {apart} of {kinds} decisions: equal plans "
        "do not fit, or cost more",
    )


OVER = "as it runs the plan takes"
"""Text in the note of a plan that exceeds its memory."""
NOT_SPLIT = "not split over"
"""Text in the note on a batch that a mode could not split."""
PADS = ", or pad_batch='auto' fills them up"
"""Advice at the end of that note."""


def _whole_batch_notes(quotient: Quotient, request: Request, mesh: MeshSpec) -> tuple[str, ...]:
    """A note if a mode splits the batch, but there is none or the devices do not divide it."""
    if request.mode not in SPLITS and not request.tensor:
        return ()
    axes = data_axes(mesh)
    parts = math.prod(mesh.size(name) for name in axes)
    graph, dims = quotient.whole.graph, quotient.example_dims
    rows = [graph.values[v] for v in graph.inputs if graph.values[v].has_examples]
    sizes = {
        v.name: v.shape[dims.get(v.index, 0)] for v in rows if v.shape and max(v.shape) >= parts
    }
    wrong = {name: n for name, n in sizes.items() if n % parts}
    if not batch_of(graph) and parts > 1:
        return (
            f"mode {request.mode}: no argument holds a batch (all come back as results, or stand "
            "beside such); what the step makes is split where that pays",
        )
    if not wrong:
        return ()
    name, size = next(iter(wrong.items()))
    more = f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
    what, verb = (f"the {size} examples", "are") if size > 1 else ("the only example", "is")
    near = [n for n in (size // parts * parts, -(-size // parts) * parts) if n]
    return (
        f"mode {request.mode}: {what} of {name} {verb} {NOT_SPLIT} "
        f"{parts} devices ({', '.join(axes)}), which do not divide them{more}; "
        f"{' or '.join(map(str, near))} examples would be{PADS}",
    )


MOST = 0.9
"""If a mode splits less than this share of the parameters' bytes, a note says how much is split."""


def _state_notes(
    extraction: Extraction, inputs: Sequence[Leaf], request: Request, pinned: frozenset[int]
) -> tuple[str, ...]:
    """A note on state that is replicated although the mode is FSDP or a ZeRO level."""
    graph, mesh = extraction.graph, extraction.priced.mesh
    level, axes = request.state.zero, set(data_axes(mesh))
    if not level or math.prod(mesh.size(name) for name in axes) == 1:
        return ()
    state = find_state(graph, request.state)
    targets = (
        state.parameters | state.others if level == LEVELS[-1] else state.others
    ) - state.bound
    least = max(request.state.whole_below, 1.0)
    targets = frozenset(v for v in targets - pinned if graph.values[v].nbytes >= least)
    leaves = dict(zip(graph.inputs, inputs, strict=True))
    whole = sum(graph.values[v].nbytes for v in targets)
    split = sum(graph.values[v].nbytes for v in targets if axes.intersection(leaves[v].spec.axes))
    if split >= MOST * whole:
        return ()
    held = [v for v in sorted(targets) if axes.isdisjoint(leaves[v].spec.axes)]
    named = leaves[max(held, key=lambda v: graph.values[v].nbytes)].path
    name = "FSDP" if level == LEVELS[-1] else f"ZeRO-{level}"
    return (
        f"{name}: {100 * split / whole:.0f} % of the bytes of the state are split over "
        f"{', '.join(sorted(axes))}; others, such as {named}, share their sharding with "
        "activations, or have no dimension that the devices divide, and every device holds them "
        "whole",
    )


def _tensor_notes(
    extraction: Extraction, inputs: Sequence[Leaf], request: Request
) -> tuple[str, ...]:
    """A note on parameters that are not split although the mode has tensor parallelism."""
    graph, axis = extraction.graph, request.tensor
    if not axis or extraction.priced.mesh.size(axis) == 1:
        return ()
    leaves = dict(zip(graph.inputs, inputs, strict=True))
    parameters = find_state(graph, StateRequest()).parameters
    whole = sum(graph.values[v].nbytes for v in parameters)
    split = sum(graph.values[v].nbytes for v in parameters if axis in leaves[v].spec.axes)
    if split >= MOST * whole:
        return ()
    named = next(leaves[v].path for v in sorted(parameters) if axis not in leaves[v].spec.axes)
    return (
        f"tensor parallel: {100 * split / whole:.0f} % of the parameters' bytes are split over "
        f"{axis}; others, such as {named}, have no dimension that {axis} divides where they are "
        "read, or no product reads them",
    )


def _flops_once(op: Op) -> float:
    return sum(flops for kind, flops, _ in op.work if kind not in (MASKED, MASKED_GRADIENT))


def _ragged_notes(graph: Graph, cluster: Cluster) -> tuple[str, ...]:
    """Notes on how compilers lower grouped products (docs/explanation/compute.md)."""
    tpu = cluster.device.fuses_operands
    what = "gradients of ragged_dot" if tpu else "ragged_dot"
    rows = [op for op in graph.ops if op.kind in RAGGED]
    rows = [op for op in rows if not tpu or masked_operands(graph, op) > 1]
    kinds = {MASKED_GRADIENT} if tpu else {MASKED, MASKED_GRADIENT}
    inside = [op for op in graph.ops if kinds.intersection(kind for kind, _, _ in op.work)]
    notes = []
    if rows:
        times = ragged_groups(graph, rows[0])
        where = f"({rows[0].source or 'no line'})"
        notes.append((f"{what} {where}", f"all {times} groups, {times} times the flop"))
    if inside:
        more = sum(flops for _, flops, _ in inside[0].work) / _flops_once(inside[0])
        where = f"in shard_map ({inside[0].source or 'no line'})"
        notes.append((f"{what} {where}", f"all groups, there {more:.3g} times the flop"))
    return tuple(
        f"{which}: the compiler multiplies all rows by the matrices of {groups}; grouped products "
        "in Pallas do not"
        for which, groups in notes
    )


BLOCKS_SHOWN = 3
"""A plan's notes list this many runs of equal blocks, the longest ones."""


def _notes(graph: Graph) -> tuple[str, ...]:
    shown = sorted(graph.blocks, key=lambda b: -b.length * b.count)[:BLOCKS_SHOWN]
    blocks = tuple(
        f"operations {b.start} to {b.start + b.length * b.count - 1}: {b.count} {EQUAL_BLOCKS} of "
        f"{b.length}"
        for b in sorted(shown, key=lambda b: b.start)
    )
    if more := len(graph.blocks) - len(shown):
        blocks += (f"{more} more runs of {EQUAL_BLOCKS}, shorter than these",)
    shards = [op.source for op in graph.ops if op.kind == REGION]
    mesh = (f"mesh: that of shard_map ({shards[0] or 'no line'})",) if shards else ()
    return (
        mesh
        + blocks
        + tuple(
            f"{r.kind} ({_line_of(graph, r.index)}): trip count unknown, priced as one"
            for r in graph.regions
            if not r.known
        )
    )


def _line_of(graph: Graph, region: int) -> str:
    """The first source line among the operations of a region."""
    lines = (op.source for op in graph.ops if op.region == region and op.source)
    return next(lines, f"region {region}, no line")
