"""The peak memory of a chosen plan: its usages in bytes per device, and when they are alive.

Every term is explained in docs/explanation/memory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.cost.pricing import Priced, Pricer
from planner.cost.reshard import ReshardStep
from planner.graph.ir import Graph
from planner.search.problem import profile_of
from planner.space.factors import Layout
from planner.space.groups import GroupLink
from planner.spec import Sharding
from planner.step.buffers import UsageRow, Usages, padding

PACKING = 1.05
"""Bytes that temporaries take over those alive at the peak: a reserve. A compiler gives every
buffer one place for all its life, so gaps stay; docs/explanation/memory.md says what is known."""


class Chosen(Protocol):
    """What is asked of a chosen plan; ``planner.plan.extract.Extraction`` has it."""

    @property
    def priced(self) -> Priced:
        """The priced mesh."""
        ...

    @property
    def choice(self) -> Sequence[int]:
        """The strategy of each group."""
        ...

    @property
    def graph(self) -> Graph:
        """The step."""
        ...

    def sharding(self, group: int, layout: Layout, port: str = "store") -> Sharding:
        """Sharding of a value with ``layout`` in ``group``."""
        ...

    def link_steps(self, link: GroupLink) -> tuple[ReshardStep, ...]:
        """The collectives of a link."""
        ...


def usage_bytes(plan: Chosen, rows: Sequence[UsageRow] | None = None) -> list[float]:
    """Bytes per device of the usages (or of these)."""
    priced = plan.priced
    pricer = Pricer(priced.analysis, priced.mesh, priced.model)
    groups = priced.analysis.groups.groups
    return [
        float(pricer.usage_bytes(groups[g], priced.sets[g], nbytes, layout, port)[plan.choice[g]])
        for g, _, _, nbytes, layout, port in (priced.analysis.usages if rows is None else rows)
    ]


def traced_peak(plan: Chosen) -> tuple[float, int]:
    """The most bytes in use at a moment in the order of the trace, and that moment."""
    return _peak(plan.priced.analysis.usages, usage_bytes(plan))


@dataclass(frozen=True, eq=False)
class Profile:
    """What a device holds over a step: ``nbytes[k]`` of the value of row k of ``usages``.

    ``moment`` is that of the peak. ``places`` is the number of moments per operation: 2 in a
    compiler's order, 1 in that of the trace.
    """

    usages: Usages
    nbytes: Sequence[float]
    peak_bytes: float
    moment: int
    places: int


def scheduled_peak(plan: Chosen, limit_bytes: float) -> tuple[float, tuple[str, ...]]:
    """The peak in the order in which a compiler runs the step, and what holds the most of it."""
    found = memory_over_time(plan, limit_bytes)
    return found.peak_bytes, _holders(plan.graph, found)


def memory_over_time(plan: Chosen, limit_bytes: float) -> Profile:
    """The usages of the chosen plan in the order in which a compiler runs the step.

    Gradients of parameters are computed last where memory suffices; a compiler that would run
    out of memory keeps closer to the order of the trace (``planner.graph.memory.schedule``).
    """
    analysis, late = plan.priced.analysis, _scheduled(plan)
    sizes = _padded(plan, late)
    peak, moment = _peak(late.rows, sizes)
    peak = _packed(plan.graph, late, sizes, peak, moment)
    if peak <= limit_bytes:
        return Profile(late, sizes, peak, moment, 2)
    sizes = usage_bytes(plan)
    least, moment = _peak(analysis.usages, sizes)
    traced = Usages(analysis.usages, analysis.usage_values, tuple(range(len(plan.graph.ops))))
    return Profile(traced, sizes, max(least, min(peak, limit_bytes)), moment, 1)


def _scheduled(plan: Chosen) -> Usages:
    """The usages of the chosen plan, with both ends of every move."""

    def moves(link: GroupLink) -> bool:
        return any(s.kind != "all_reduce" for s in plan.link_steps(link))  # in place

    analysis = plan.priced.analysis
    return analysis.scheduled.usages(plan.graph, analysis.groups, moves)


def _padded(plan: Chosen, late: Usages) -> list[float]:
    """Bytes per device of usages that know nothing of padding."""
    sizes, tile = usage_bytes(plan, late.rows), plan.priced.analysis.scheduled.tile
    if tile == (1, 1):
        return sizes
    out = []
    for (group, _, _, _, layout, port), value, nbytes in zip(
        late.rows, late.values, sizes, strict=True
    ):
        spec = plan.sharding(group, layout, "store" if port.startswith("store") else "use")
        local = spec.local_shape(plan.graph.values[value].shape, plan.priced.mesh)
        out.append(nbytes * padding(local, tile))
    return out


def has_gaps(graph: Graph, late: Usages) -> list[bool]:
    """Per usage, whether it is a temporary: arguments and results have no gaps around them; copies
    of what is kept in host memory do."""
    stays = {*graph.inputs, *graph.outputs}
    return [
        value not in stays or row[5] == "gathered" or row[5].endswith("@host")
        for row, value in zip(late.rows, late.values, strict=True)
    ]


def _packed(graph: Graph, late: Usages, sizes: Sequence[float], peak: float, moment: int) -> float:
    """A peak with the gaps between temporaries; arguments and results have none."""
    fixed = 0.0
    for row, gaps, size in zip(late.rows, has_gaps(graph, late), sizes, strict=True):
        if row[1] <= moment < row[2] and not gaps:
            fixed += size
    return fixed + PACKING * (peak - fixed)


def _holders(graph: Graph, found: Profile) -> tuple[str, ...]:
    """The values that hold the most memory at the peak."""
    held: dict[str, float] = {}
    rows = zip(found.usages.rows, found.usages.values, found.nbytes, strict=True)
    for row, value, nbytes in rows:
        if row[1] <= found.moment < row[2]:
            v = graph.values[value]
            source = graph.ops[v.op].source if v.op >= 0 else ""
            name = v.name or f"{graph.ops[v.op].kind} {v} ({source})"
            held[name] = held.get(name, 0.0) + nbytes
    top = sorted(held.items(), key=lambda kv: (-kv[1], kv[0]))[:5]
    return tuple(f"{name}: {size:.3g} bytes" for name, size in top)


def _peak(rows: Sequence[UsageRow], sizes: Sequence[float]) -> tuple[float, int]:
    moments, profile = profile_of([u[1] for u in rows], [u[2] for u in rows], list(sizes))
    at = int(np.argmax(profile))
    return float(profile[at]), int(moments[at])
