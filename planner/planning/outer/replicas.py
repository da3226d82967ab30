"""Reduces gradients once per step instead of in every iteration of a loop, if that is faster."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time

from planner.errors import MemoryLimitError
from planner.graph.ir import Role
from planner.planning.open_recipes import Door, best_planned, searched
from planner.planning.outer.unrolled import over_loops
from planner.planning.row import Planned, Row
from planner.recipes import WORTH, Outcome, Recipe, Wish
from planner.report.units import time_text

SUMS = frozenset({"all_reduce", "reduce_scatter"})


def with_recipe(wish: Wish, door: Door) -> Planned:
    """The plan under the best recipe of those that a wish leaves open, except for stages."""
    planned = over_loops(wish, door, _each)
    return _each(wish, door) if planned is None else planned


def _each(wish: Wish, door: Door) -> Planned:
    """Like ``with_recipe``, with every recipe tried on the step as written."""
    planned = searched(wish, door)
    return with_replicas(planned, wish, door) if "replicas" in wish.open else planned


def with_replicas(planned: Planned, wish: Wish, door: Door) -> Planned:
    """The plan, or a faster one that reduces gradients after the last microbatch, or after the
    loops of the step.

    Tries one replica per device of each mesh axis over which the plan reduces gradients in every
    microbatch, or more than once; one per device of several such axes together; and one per node.
    """
    plan = planned.plan
    if plan.microbatches == 1 and (plan.stages > 1 or "replicas" not in wish.open):
        return planned
    counts, gain_s = reduced_over(planned)
    known_s = plan.search.cost_s / WORTH  # replicas rewrite more
    if not counts or gain_s < plan.search.cost_s - known_s:
        return planned
    seen: dict[Recipe, Outcome[Row | None]] = {}
    for count in counts:
        recipe = dataclasses.replace(
            plan.recipe, replicas=count, manual=wish.recipe.manual, cuts=()
        )
        seen[recipe] = door.look(recipe, known_s, {})
    best = planned
    if any(o.found is not None and o.cost_s < known_s for o in seen.values()):
        with contextlib.suppress(MemoryLimitError):  # a quick search may underestimate memory
            candidate = best_planned(seen, door.begun, "")
            faster = candidate.plan.prediction.step_s < plan.prediction.step_s
            best = candidate if candidate.plan.search.cost_s < known_s and faster else planned
    note = f"gradients reduced once per step, in {' or '.join(map(str, counts))} replicas: "
    if all(o.refused for o in seen.values()):
        note += f"not possible, {next(iter(seen.values())).refused.partition(';')[0]}"
    elif best is planned:
        note += "not faster, or does not fit"
    else:
        steps = (best.plan.prediction.step_s, plan.prediction.step_s)
        note += " instead of ".join(map(time_text, steps))
    notes = best.plan.notes if best is planned else (*best.plan.notes, *planned.compared)
    seconds = time.perf_counter() - door.begun
    return dataclasses.replace(
        best,
        plan=dataclasses.replace(best.plan, notes=(*notes, note), planning_s=seconds),
        compared=(*planned.compared, note),
        hopeful=planned.hopeful,
    )


def nodes_of(planned: Planned) -> int:
    """The nodes, or slices, of the cluster."""
    cluster = planned.request.cluster
    return cluster.num_devices // cluster.devices_per_node


def reduced_over(planned: Planned) -> tuple[tuple[int, ...], float]:
    """Numbers of replicas worth trying, and the seconds per step that they may save.

    With microbatches, these are the seconds of reducing gradients in all microbatches but one.
    Without, they are the seconds of reducing gradients in loops, over axes that split examples,
    beyond once per parameter: layers in a loop are reduced once each.
    """
    plan, graph, mesh = planned.plan, planned.extraction.graph, planned.extraction.priced.mesh
    inputs = [graph.values[v] for v in graph.inputs]
    state = {tuple(sorted(v.shape)) for v in inputs if v.shape}
    split = _splitting_examples(planned)
    axes: set[int] = set()
    once = sum(v.nbytes for v in inputs if v.role is Role.PARAMETER)
    seconds = nbytes = 0.0
    for sent in planned.extraction.sent():
        if sent.step.kind not in SUMS:
            continue
        known = graph.values[sent.value]
        gradient = known.role is Role.GRADIENT or (
            known.role is Role.COTANGENT and tuple(sorted(known.shape)) in state
        )
        if plan.microbatches > 1:
            again = sent.count >= plan.microbatches
        else:  # the gradient of several parameters in one array has no parameter's shape
            again = sent.count > 1 and split.issuperset(sent.step.axes)
            gradient = gradient or (known.role is Role.COTANGENT and known.nbytes <= once)
        if gradient and again:
            axes.update(sent.step.axes)
            seconds += sent.time_s
            nbytes += sent.count * sent.step.payload_bytes
    gain_s = seconds * (
        1.0 - 1.0 / plan.microbatches
        if plan.microbatches > 1
        else max(1.0 - once / max(nbytes, 1.0), 0.0)
    )
    sizes = [mesh.sizes[k] for k in sorted(axes)]
    chosen = itertools.chain.from_iterable(
        itertools.combinations(sizes, n) for n in range(1, len(sizes) + 1)
    )
    counts = {math.prod(some) for some in chosen}
    nodes = nodes_of(planned)
    if nodes > 1 and math.prod(sizes) % nodes == 0:
        counts.add(nodes)
    return tuple(sorted(counts - {1})), gain_s


def _splitting_examples(planned: Planned) -> set[int]:
    """Positions of the mesh axes that split examples as they are fed."""
    graph, mesh = planned.extraction.graph, planned.extraction.priced.mesh
    fed = [v for v in graph.inputs if graph.values[v].role is Role.BATCH]
    inner = planned.quotient.example_dims
    rows = [(*planned.extraction.value_sharding(v).dims, ())[inner.get(v, 0)] for v in fed]
    names = {name for row in rows for name in row}
    return {k for k, name in enumerate(mesh.names) if name in names}
