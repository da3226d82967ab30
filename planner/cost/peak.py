"""The peak memory of a chosen plan: its buffers in bytes per device, and when they are alive.

Every term is explained in docs/explanation/memory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.apart import Chosen, in_updates, kept_apart
from planner.cost.pricing import Pricer
from planner.graph.ir import Graph
from planner.search.problem import profile_of
from planner.space.buffer import Buffer, Port, When, in_pool
from planner.space.decisions.host_memory import OFFLOAD
from planner.space.groups import GroupLink
from planner.step.analysis import Analysis
from planner.step.buffers import Lifetimes
from planner.step.memory.lanes import image_lanes
from planner.step.memory.tiles import padding

PACKING = 1.05
"""Bytes that temporaries take over those alive at the peak: a reserve. A compiler gives every
buffer one place for all its life, so gaps stay; docs/explanation/memory.md says what is known."""

TPU_PACKING = 1.10
"""The same of XLA:TPU, of which less is known: 18 of 21 steps need no more than predicted so."""


def buffer_bytes(plan: Chosen, buffers: Sequence[Buffer]) -> list[float]:
    """Bytes per device of some buffers."""
    priced = plan.priced
    pricer = Pricer(priced.analysis, priced.mesh, priced.model)
    return [
        float(pricer.buffer_bytes(priced.sets[b.group], b)[plan.choice[b.group]]) for b in buffers
    ]


def traced_peak(plan: Chosen) -> tuple[float, int]:
    """The most bytes in use at a moment in the order of the trace, and that moment."""
    buffers = in_pool(plan.priced.analysis.buffers)
    return _peak(buffers, buffer_bytes(plan, buffers))


@dataclass(frozen=True, eq=False)
class Profile:
    """What a device holds over a step: ``nbytes[k]`` bytes of buffer k.

    ``moment`` is that of the peak. ``places`` is the number of moments per operation: 2 in a
    compiler's order, 1 in that of the trace.
    """

    held: Lifetimes
    nbytes: Sequence[float]
    peak_bytes: float
    moment: int
    places: int


def scheduled_peak(plan: Chosen, limit_bytes: float) -> tuple[float, tuple[str, ...]]:
    """The peak in the order in which a compiler runs the step, and what holds the most of it."""
    found = memory_over_time(plan, limit_bytes)
    return found.peak_bytes, _holders(plan.graph, found)


def memory_over_time(plan: Chosen, limit_bytes: float) -> Profile:
    """The buffers of the chosen plan in the order in which a compiler runs the step.

    Gradients of parameters are computed last where memory suffices; a compiler that would run
    out of memory keeps closer to the order of the trace (``planner.step.memory.schedule``).
    """
    analysis, late = plan.priced.analysis, _scheduled(plan)
    sizes = _padded(plan, late)
    peak, moment = _peak(late.buffers, sizes)
    peak = _packed(plan.graph, late, sizes, peak, moment, packing_of(analysis))
    if peak <= limit_bytes:
        return Profile(late, sizes, peak, moment, 2)
    traced = Lifetimes(in_pool(analysis.buffers), tuple(range(len(plan.graph.ops))))
    sizes = buffer_bytes(plan, traced.buffers)
    least, moment = _peak(traced.buffers, sizes)
    return Profile(traced, sizes, max(least, min(peak, limit_bytes)), moment, 1)


def _scheduled(plan: Chosen) -> Lifetimes:
    """The buffers of the chosen plan on a device, with both ends of every move."""

    def moves(link: GroupLink) -> bool:
        return any(s.kind != "all_reduce" for s in plan.link_steps(link))  # in place

    analysis = plan.priced.analysis
    apart = {plan.graph.ops[op].outputs[0] for op in kept_apart(plan)}
    inside = in_updates(plan) - apart
    found = analysis.scheduled.buffers(plan.graph, analysis.groups, moves, inside)
    return Lifetimes(in_pool(found.buffers), found.order)


def _padded(plan: Chosen, late: Lifetimes) -> list[float]:
    """Bytes per device of buffers that know nothing of padding."""
    sizes, tile = buffer_bytes(plan, late.buffers), plan.priced.analysis.scheduled.tile
    if tile == (1, 1):
        return sizes
    groups, graph = plan.priced.analysis.groups, plan.graph
    lanes = image_lanes(graph, groups.op_layouts, groups.fusable)
    out = []
    for b, nbytes in zip(late.buffers, sizes, strict=True):
        spec = plan.sharding(b.group, b.layout, "store" if b.port is Port.STORE else "use")
        local = spec.local_shape(graph.values[b.value].shape, plan.priced.mesh)
        out.append(nbytes * padding(local, tile, lanes.get(b.value, ())))
    return out


def packing_of(analysis: Analysis) -> float:
    """Bytes allocated for temporaries over those alive, of the device's compiler."""
    return TPU_PACKING if analysis.scheduled.fused_operands else PACKING


def has_gaps(graph: Graph, late: Lifetimes) -> list[bool]:
    """Per buffer, whether it is a temporary: arguments and results have no gaps around them; copies
    of what is kept in host memory do."""
    stays = {*graph.inputs, *graph.outputs}
    return [
        b.value not in stays or b.port is Port.GATHERED or b.when == When(OFFLOAD, 1)
        for b in late.buffers
    ]


def _packed(
    graph: Graph,
    late: Lifetimes,
    sizes: Sequence[float],
    peak: float,
    moment: int,
    packing: float,
) -> float:
    """A peak with the gaps between temporaries; arguments and results have none."""
    fixed = 0.0
    for b, gaps, size in zip(late.buffers, has_gaps(graph, late), sizes, strict=True):
        if b.at(moment) and not gaps:
            fixed += size
    return fixed + packing * (peak - fixed)


def _holders(graph: Graph, found: Profile) -> tuple[str, ...]:
    """The values that hold the most memory at the peak."""
    held: dict[str, float] = {}
    for b, nbytes in zip(found.held.buffers, found.nbytes, strict=True):
        if b.at(found.moment):
            v = graph.values[b.value]
            source = graph.ops[v.op].source if v.op >= 0 else ""
            name = v.name or f"{graph.ops[v.op].kind} {v} ({source})"
            held[name] = held.get(name, 0.0) + nbytes
    top = sorted(held.items(), key=lambda kv: (-kv[1], kv[0]))[:5]
    return tuple(f"{name}: {size:.3g} bytes" for name, size in top)


def _peak(buffers: Sequence[Buffer], sizes: Sequence[float]) -> tuple[float, int]:
    starts, ends = [b.start for b in buffers], [b.end for b in buffers]
    moments, profile = profile_of(starts, ends, list(sizes))
    at = int(np.argmax(profile))
    return float(profile[at]), int(moments[at])
