"""Predicts a step whose stages are separate programs: seconds and memory of each stage come from
the plan of the whole step on the devices of one stage, and are run through the schedule."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence

from costmodels import Cluster, ClusterError, parse_cluster
from costmodels.orders import Order, Simulated, Work, simulate
from costmodels.schedule import Overlap
from planner.cost.op_seconds import op_seconds
from planner.errors import MemoryLimitError, RequestError
from planner.graph.flat import Call, nbytes
from planner.graph.ir import Graph
from planner.graph.trace import Traced
from planner.plan.contents.rows import Constraint
from planner.plan.extract import Extraction
from planner.plan.plan import Plan
from planner.recipes import WORTH
from planner.recipes.wish import AUTO, IN_CHUNKS, SCHEDULES
from planner.report.units import bytes_text, time_text
from planner.spec import STAGE, MeshSpec, Recipe, Sharding
from planner.stages.errors import NoStagesError, refused
from planner.stages.programs.handed import Place, handed_places, result_place
from planner.stages.programs.homes import ALL
from planner.stages.programs.layered import Apart, chunk_count, order_of, stage_lines, taken_apart
from planner.stages.programs.split import BACKWARD, FORWARD, WEIGHTS

PASS_S = 5e-4
"""Least seconds of a host for each pass that it starts; two shared cores took up to 1.8e-3
(docs/explanation/measurements.md). Hosts run ahead of their devices, so a step takes the longer of
both times."""


def scheduled(plan: Plan, extraction: Extraction, traced: Traced, recipe: Recipe) -> Plan:
    """The plan of all stages, from the plan of the step on the devices of one stage.

    Args:
        plan: that plan; its memory limit is that of all stages together.
        extraction: what it was made from.
        traced: the step.
        recipe: a recipe with the name of a schedule, or ``"auto"`` for the one that is predicted
            fastest; a simpler one is preferred if it is slower by less than 1 %.

    Raises:
        MemoryLimitError: a stage needs more memory than a device has.
    """
    names = SCHEDULES if recipe.schedule == AUTO and not recipe.order else (recipe.schedule,)
    spent = _spent(extraction)
    cuts = _cuts(plan, traced, spent, dataclasses.replace(recipe, schedule=names[0]))
    plan = dataclasses.replace(plan, order=recipe.order)
    plans = [
        _through(dataclasses.replace(plan, schedule=n), extraction, traced, spent, cuts)
        for n in names
    ]
    if len(names) > 1 and not recipe.manual:
        with contextlib.suppress(NoStagesError):  # too few blocks, or the layers are one array
            more = _cuts(plan, traced, spent, dataclasses.replace(recipe, schedule=IN_CHUNKS[0]))
            for name in IN_CHUNKS:
                with contextlib.suppress(RequestError):  # not for this number of microbatches
                    plan = dataclasses.replace(plan, schedule=name)
                    plans.append(_through(plan, extraction, traced, spent, more))
    limit = plan.prediction.limit_bytes / plan.stages
    fit = [p for p in plans if p.prediction.peak_bytes <= limit]
    if not fit:
        least = min(plans, key=lambda p: p.prediction.peak_bytes)
        peak = least.prediction.peak_bytes
        raise MemoryLimitError(
            f"{plan.stages} stages run by {least.schedule} need {bytes_text(peak)} per device on "
            f"{plan.cluster} ({least.prediction.peak_holders[0]}), and {bytes_text(limit)} may be "
            'used; more stages, more microbatches or remat="full" take less',
            least_bytes=peak,
            lower_bytes=0.0,
            limit_bytes=limit,
        )
    best = fit[0]
    for other in fit[1:]:
        if other.prediction.step_s * WORTH < best.prediction.step_s:
            best = other
    if len(names) == 1:
        return best
    seen = ", ".join(
        f"{p.schedule} {time_text(p.prediction.step_s)}" + ("" if p in fit else " (does not fit)")
        for p in plans
    )
    return dataclasses.replace(best, notes=(*best.notes, f"schedules compared: {seen}"))


def _cuts(plan: Plan, traced: Traced, spent: Sequence[float], recipe: Recipe) -> tuple[int, ...]:
    """Where chunks begin: at manual places, or by the seconds of operations."""
    if recipe.cuts:
        return recipe.cuts
    manual, count = recipe.manual, chunk_count(recipe)
    first = taken_apart(traced, plan.microbatches, count, False, manual=manual)
    if manual:
        return first.cuts
    after = dict(itertools.pairwise(sorted({*first.starts.values(), len(spent)})))

    def seconds(op: int) -> float:
        return sum(spent[op : after[op]])

    return taken_apart(traced, plan.microbatches, count, False, seconds=seconds).cuts


def _through(
    plan: Plan,
    extraction: Extraction,
    traced: Traced,
    spent: Sequence[float],
    cuts: tuple[int, ...],
) -> Plan:
    """The plan under one schedule."""
    order = order_of(plan.recipe)
    apart = taken_apart(traced, plan.microbatches, len(order.place), order.splits_weights, cuts)
    if apart.homes.parted and len(order.place) > plan.stages:
        raise refused(
            f"{plan.schedule}: {len(apart.homes.parted)} arrays have the layers of all chunks in "
            "one; an interleaved schedule takes layers with arrays of their own"
        )
    late = _transfer_s(extraction, apart)
    ran, rest = _seconds(order, extraction, apart, spent, late)
    peaks = _peaks(plan, extraction, apart, order, ran)
    old = plan.prediction
    fixed = extraction.priced.model.step_latency_s
    passes = passes_of_host(_cluster(extraction), plan.stages, max(map(len, order.devices)))
    host_s = passes * PASS_S
    step = max(fixed + ran.step_s + max(rest), host_s)
    worst = max(range(plan.stages), key=peaks.__getitem__)
    share = old.compute_s / max(old.compute_s + old.communication_s, 1e-30)
    busy = max(ran.busy_s) + max(rest)
    limit = old.limit_bytes / plan.stages
    prediction = dataclasses.replace(
        old,
        compute_s=fixed + share * busy,
        communication_s=(1 - share) * busy,
        overlapped_s=0.0,
        step_s=step,
        peak_bytes=peaks[worst],
        limit_bytes=limit,
        device_bytes=old.device_bytes,
        peak_holders=(f"stage {worst}: state, sums, and what waits for the backward pass",),
    )
    stage_texts = stage_lines(apart)
    lines = [
        f"{line}; "
        + (f"{where}'s " if len(order.place) > plan.stages else "")
        + f"{time_text(ran.busy_s[d])} busy, {bytes_text(peaks[d])}"
        for line, d in zip(stage_texts, order.place, strict=False)
        for where in [f"device group {d}"]
    ]
    note = (
        f"stages run by {plan.schedule}: bubble {100 * ran.bubble:.1f} %, a transfer between "
        f"stages {time_text(late)}; memory is an estimate"
    )
    if step == host_s:
        note += (
            f"; the host takes longer than the devices: {passes} passes at {time_text(PASS_S)}; "
            "fewer microbatches or stages, or stages in one program, take less"
        )
    mesh = MeshSpec((STAGE, *plan.mesh.names), (plan.stages, *plan.mesh.sizes))
    return dataclasses.replace(
        plan,
        mesh=mesh,
        prediction=prediction,
        staged=(*lines, *stage_texts[len(lines) :]),
        cuts=apart.cuts,
        compute=(),
        strategy=f"pipeline parallel over {plan.stages} by {plan.schedule}; {plan.strategy}",
        constraints=_said(plan, extraction, apart),
        notes=(*plan.notes, note),
    )


def passes_of_host(cluster: Cluster, stages: int, each: int) -> int:
    """Number of passes that a host starts, with ``each`` passes per stage and one process per node
    of ``cluster``."""
    nodes = max(1, cluster.num_devices // cluster.devices_per_node)
    return -(-stages // nodes) * each


def _said(plan: Plan, extraction: Extraction, apart: Apart) -> tuple[Constraint, ...]:
    """The plan's constraints, and one for each value that leaves the place that computes it."""
    known = {(c.op, c.slot, c.position): c for c in plan.constraints}
    graph = extraction.graph
    for op, position in handed_places(apart):
        value = _value(graph, (op, position))
        if value is not None:
            spec = Sharding.of(extraction.value_sharding(value).entries)
            known.setdefault((op, "out", position), Constraint(op, "out", position, spec))
    return tuple(known[place] for place in sorted(known))


def _spent(extraction: Extraction) -> list[float]:
    """Seconds of each operation, including exposed communication."""
    spent = list(op_seconds(extraction))
    overlap = Overlap.of(extraction.priced.model)
    for s in extraction.sent():
        if s.op >= 0:
            spent[s.op] += (1 - overlap.share(s.place)) * s.time_s
    return spent


def _seconds(
    order: Order, extraction: Extraction, apart: Apart, spent: Sequence[float], late: float
) -> tuple[Simulated, list[float]]:
    """The simulated schedule, and per group of devices the seconds of work that runs once."""
    split, parts = apart.split, order.microbatches
    spent, sums_s = _without_sums(spent, apart)
    owner: dict[int, tuple[str, int]] = {}
    for key, task in split.tasks.items():
        owner.update((id(c), key) for c in task.own)
    once: dict[int, int] = {}
    for m in apart.homes.behind:
        if m.call is not None:
            once[id(m.call)] = m.place
    starts = sorted((at, ident) for ident, at in apart.starts.items())
    places = [at for at, _ in starts]
    tasks = {key: sums_s.get(key, 0.0) / parts for key in split.tasks}
    rest = [0.0] * split.count
    for op, seconds in enumerate(spent):
        if not seconds:
            continue
        ident = starts[max(bisect.bisect(places, op) - 1, 0)][1]
        if ident in owner:
            tasks[owner[ident]] += seconds / parts
        elif once.get(ident, ALL) == ALL:
            rest = [x + seconds / split.count for x in rest]
        else:
            rest[once[ident]] += seconds
    held = _held(extraction, apart)
    work = [
        Work(
            tasks[FORWARD, s],
            tasks[BACKWARD, s],
            tasks.get((WEIGHTS, s), 0.0),
            held[s],
            held[s] if (WEIGHTS, s) in tasks else 0.0,
        )
        for s in range(split.count)
    ]
    return simulate(order, work, late), _by_device(order, rest, sum)


def _without_sums(
    spent: Sequence[float], apart: Apart
) -> tuple[list[float], dict[tuple[str, int], float]]:
    """Seconds per operation without those of accumulation, and the latter by the passes whose
    results are added. Layers in one array are neither sliced nor joined: each stage has its own."""
    out, split = list(spent), apart.split
    sum_seconds: dict[tuple[str, int], float] = {}

    def taken(call: Call) -> float:
        span = apart.ops[id(call)]
        seconds = sum(out[k] for k in span)
        for k in span:
            out[k] = 0.0
        return seconds

    for calls, pieces in zip(split.body.sums, split.pieces, strict=True):
        joins = [c for c in calls if c.kind == "concatenate"]
        for call in joins:
            taken(call)
        seconds = sum(taken(call) for call in calls if call not in joins)
        makers = [split.makers[p] for parts in pieces for p in parts if isinstance(p, int)]
        for key in makers:
            sum_seconds[key] = sum_seconds.get(key, 0.0) + seconds / len(makers)
    sliced = {v for stages in apart.homes.sliced.values() for values in stages for v in values}
    for call in split.body.flat.calls:
        if sliced.intersection(call.outs):
            taken(call)
    return out, sum_seconds


def _by_device(
    order: Order, chunks: Sequence[float], of: Callable[[list[float]], float]
) -> list[float]:
    """Per group of devices, ``of`` applied to the numbers of its chunks."""
    return [
        of([x for x, place in zip(chunks, order.place, strict=True) if place == d])
        for d in range(len(order.devices))
    ]


def _transfer_s(extraction: Extraction, apart: Apart) -> float:
    """Seconds of the largest transfer between stages; over the network if there is one."""
    size = _sizes(extraction, apart)
    borders: dict[tuple[tuple[str, int], int], float] = {}
    seen: set[tuple[int, int]] = set()
    for v, source, (_, reader) in apart.split.moves:
        if (v, reader) not in seen:
            seen.add((v, reader))
            borders[source, reader] = borders.get((source, reader), 0.0) + size(v)
    whole = _cluster(extraction)
    apart_nodes = whole.num_devices > whole.devices_per_node
    link = whole.network if apart_nodes and whole.network is not None else whole.link
    return link.latency_s + max(borders.values(), default=0.0) / link.bytes_per_s


def _cluster(extraction: Extraction) -> Cluster:
    """The cluster that holds all stages."""
    part = extraction.priced.model.cluster
    with contextlib.suppress(ClusterError):
        return parse_cluster(part.text)
    return part


def _held(extraction: Extraction, apart: Apart) -> list[float]:
    """Per stage, bytes per device that the forward pass of a microbatch leaves for other passes."""
    size = _sizes(extraction, apart)
    return [
        sum(size(v) for v in apart.split.tasks[FORWARD, s].outs) for s in range(apart.split.count)
    ]


def _peaks(
    plan: Plan, extraction: Extraction, apart: Apart, order: Order, ran: Simulated
) -> list[float]:
    """Per group of devices, the most bytes on a device."""
    size, split = _sizes(extraction, apart), apart.split
    state = [0.0] * split.count
    for v, leaf, place in zip(apart.flat.inputs, plan.inputs, apart.homes.home, strict=True):
        everywhere = range(len(order.devices))
        parted = len(everywhere) if v in apart.homes.parted else 1
        for s in everywhere if place == ALL else (place,):
            state[s] += leaf.nbytes_per_device / parted
    held, most = [], []
    for s in range(split.count):
        tasks = [t for (_, stage), t in split.tasks.items() if stage == s]
        sums = sum(size(v) for t in tasks for v in t.sums)
        inside = max(sum(size(v) for c in t.own for v in c.outs) for t in tasks)
        held.append(state[s] + 2 * sums)
        most.append(inside)
    parts = (_by_device(order, held, sum), _by_device(order, most, max), ran.peak_bytes)
    return [sum(bytes_) for bytes_ in zip(*parts, strict=True)]


def _sizes(extraction: Extraction, apart: Apart) -> Callable[[int], float]:
    """A function that returns the bytes per device of a value of a microbatch."""
    graph, mesh = extraction.graph, extraction.priced.mesh
    sizes: dict[int, float] = {}
    for call in apart.split.body.flat.calls:
        for k, (v, var) in enumerate(zip(call.outs, call.eqn.outvars, strict=False)):
            value = _value(graph, result_place(call, k, apart.ops))
            shards = 1.0 if value is None else extraction.value_sharding(value).shards(mesh)
            if call.made and call.ins and call.ins[0] in sizes:  # a conversion of a stage's part
                shards = nbytes(call.eqn.invars[0].aval) / sizes[call.ins[0]]
            sizes[v] = nbytes(var.aval) / shards
    return lambda v: sizes.get(v, 0.0)


def _value(graph: Graph, place: Place | None) -> int | None:
    """The graph's value at a place; None where that is not known."""
    if place is None or place[0] >= len(graph.ops):
        return None
    outs = graph.ops[place[0]].outputs
    return outs[place[1]] if place[1] < len(outs) and outs[place[1]] >= 0 else None
