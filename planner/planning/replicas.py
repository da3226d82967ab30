"""Gradients of microbatches that are joined once per step: for which groups of devices it pays."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time

from planner.errors import MemoryLimitError
from planner.graph.ir import Role
from planner.planning.open_recipes import Door, best_planned, searched
from planner.planning.row import Planned, Row
from planner.recipes import WORTH, Outcome, Recipe, Wish
from planner.report.units import time_text

SUMS = frozenset({"all_reduce", "reduce_scatter"})


def with_recipe(wish: Wish, door: Door) -> Planned:
    """The plan under the best recipe of those that a wish leaves open, but for stages."""
    planned = searched(wish, door)
    return with_replicas(planned, wish, door) if "replicas" in wish.open else planned


def with_replicas(planned: Planned, wish: Wish, door: Door) -> Planned:
    """The plan, or a faster one that reduces gradients behind the last microbatch.

    Tries one replica per device of each mesh axis over which the plan reduces gradients in every
    microbatch, of several such axes together, and one per node.
    """
    plan = planned.plan
    counts, spent_s = reduced_over(planned)
    known_s = plan.search.cost_s
    if not counts or spent_s * (1.0 - 1.0 / plan.microbatches) < (1.0 - 1.0 / WORTH) * known_s:
        return planned  # nothing to gain
    seen: dict[Recipe, Outcome[Row | None]] = {}
    for count in counts:
        recipe = dataclasses.replace(
            plan.recipe, replicas=count, manual=wish.recipe.manual, cuts=()
        )
        seen[recipe] = door.look(recipe, known_s, {})
    best = planned
    if any(o.found is not None and o.cost_s < known_s for o in seen.values()):
        with contextlib.suppress(MemoryLimitError):  # a quick look may take too little for enough
            found = best_planned(seen, door.begun, "")
            best = found if found.plan.search.cost_s < known_s else planned
    note = f"gradients reduced once per step, in {' or '.join(map(str, counts))} replicas: "
    if best is planned:
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
    )


def _nodes(planned: Planned) -> int:
    """The nodes, or slices, of the cluster."""
    cluster = planned.request.cluster
    return cluster.num_devices // cluster.devices_per_node


def reduced_over(planned: Planned) -> tuple[tuple[int, ...], float]:
    """Numbers of replicas worth trying, and the seconds per step that a plan spends on reducing
    gradients in every microbatch."""
    plan, graph, mesh = planned.plan, planned.extraction.graph, planned.extraction.priced.mesh
    if plan.microbatches == 1:
        return (), 0.0
    state = {tuple(sorted(v.shape)) for v in map(graph.values.__getitem__, graph.inputs) if v.shape}
    axes: set[int] = set()
    seconds = 0.0
    for sent in planned.extraction.sent():
        known = graph.values[sent.value]
        inside = sent.step.kind in SUMS and sent.count >= plan.microbatches
        gradient = known.role is Role.GRADIENT or (
            known.role is Role.COTANGENT and tuple(sorted(known.shape)) in state
        )
        if inside and gradient:
            axes.update(sent.step.axes)
            seconds += sent.time_s
    sizes = [mesh.sizes[k] for k in sorted(axes)]
    chosen = itertools.chain.from_iterable(
        itertools.combinations(sizes, n) for n in range(1, len(sizes) + 1)
    )
    counts = {math.prod(some) for some in chosen}
    nodes = _nodes(planned)
    if nodes > 1 and math.prod(sizes) % nodes == 0:
        counts.add(nodes)
    return tuple(sorted(counts)), seconds
