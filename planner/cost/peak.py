"""The peak memory of a chosen plan: its buffers in bytes per device, and when they are alive.

Every term is explained in docs/explanation/memory.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.apart import Chosen, in_updates, kept_apart
from planner.cost.pricing import Pricer
from planner.search.problem import profile_of
from planner.space.buffer import Buffer, in_pool
from planner.space.groups import GroupLink
from planner.step.analysis import PACKING
from planner.step.buffers import Lifetimes, has_gaps


def buffer_bytes(plan: Chosen, buffers: Sequence[Buffer]) -> list[float]:
    """Bytes per device of each buffer."""
    priced = plan.priced
    pricer = Pricer(priced.analysis, priced.mesh, priced.model)
    return [
        float(pricer.buffer_bytes(priced.sets[b.group], b)[plan.choice[b.group]]) for b in buffers
    ]


def traced_peak(plan: Chosen) -> tuple[float, int]:
    """The peak in bytes in the order of the trace, and its moment."""
    buffers = in_pool(plan.priced.analysis.buffers)
    return _peak(buffers, buffer_bytes(plan, buffers))


@dataclass(frozen=True, eq=False)
class Profile:
    """What a device holds over a step: ``nbytes[k]`` bytes of buffer k.

    ``moment`` is the moment of the peak. Every operation has two moments: the operation, and the
    collectives after it. ``traced``: whether the order is the trace's instead of the compiler's.
    """

    held: Lifetimes
    nbytes: Sequence[float]
    peak_bytes: float
    moment: int
    traced: bool


def scheduled_peak(plan: Chosen, limit_bytes: float) -> tuple[float, tuple[str, ...]]:
    """The peak in the order in which a compiler runs the step, and the values that hold most."""
    profile = memory_over_time(plan, limit_bytes)
    return profile.peak_bytes, _holders(plan, profile)


def memory_over_time(plan: Chosen, limit_bytes: float) -> Profile:
    """The buffers of the chosen plan in the order in which a compiler runs the step.

    Some compilers compute gradients of parameters last if memory suffices. If it does not, they
    stay closer to the order of the trace (``planner.step.memory.schedule``).
    """
    free = _profile(plan, late=True)
    if free.peak_bytes <= limit_bytes or not plan.priced.analysis.scheduled.puts_off:
        return free
    least = _profile(plan, late=False)
    if least.peak_bytes >= free.peak_bytes:
        return free
    return dataclasses.replace(least, peak_bytes=max(least.peak_bytes, limit_bytes))


def _profile(plan: Chosen, *, late: bool) -> Profile:
    """The memory profile of one order, with both ends of every move."""

    def moves(link: GroupLink) -> bool:
        return any(s.kind != "all_reduce" for s in plan.link_steps(link))  # which is in place

    analysis = plan.priced.analysis
    apart = {plan.graph.ops[op].outputs[0] for op in kept_apart(plan)}
    inside = in_updates(plan) - apart
    lifetimes = analysis.scheduled.buffers(plan.graph, analysis.groups, moves, inside, late=late)
    held = Lifetimes(in_pool(lifetimes.buffers), lifetimes.order)
    sizes = buffer_bytes(plan, held.buffers)
    peak, moment = _peak(held.buffers, sizes)
    return Profile(held, sizes, peak, moment, not late)


def _holders(plan: Chosen, profile: Profile) -> tuple[str, ...]:
    """The values that hold the most memory at the peak, with their bytes, without packing."""
    held: dict[str, float] = {}
    graph = plan.graph
    stays = frozenset((*graph.inputs, *graph.outputs))
    for b, nbytes in zip(profile.held.buffers, profile.nbytes, strict=True):
        if b.at(profile.moment):
            v = graph.values[b.value]
            source = graph.ops[v.op].source if v.op >= 0 else ""
            name = v.name or f"{graph.ops[v.op].kind} {v} ({source})"
            net_bytes = nbytes / PACKING if has_gaps(b, stays) else nbytes
            held[name] = held.get(name, 0.0) + net_bytes
    top = sorted(held.items(), key=lambda kv: (-kv[1], kv[0]))[:5]
    return tuple(f"{name}: {size:.3g} bytes" for name, size in top)


def _peak(buffers: Sequence[Buffer], sizes: Sequence[float]) -> tuple[float, int]:
    starts, ends = [b.start for b in buffers], [b.end for b in buffers]
    moments, profile = profile_of(starts, ends, list(sizes))
    at = int(np.argmax(profile))
    return float(profile[at]), int(moments[at])
