"""Rematerialisation: what it would free at the peaks, and what the operations done again cost.

An activation that is idle at the peak, read before and again after it, can be dropped between and
made again from what is in memory then.  Per round, those that free most bytes for each second of
work done again are dropped, until the peak fits or nothing idle is left.  An estimate: memory that
is in use while operations are done again is not counted, nor is communication.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.analysis import MATMULS, UsageRow
from planner.extract import Extraction
from planner.graph.ir import SCALAR
from planner.meshes import Request
from planner.pricing import Priced, Pricer
from planner.report.shortage import Relief
from planner.search import recursive_programming
from planner.search.memory_limit import LeastMemory
from planner.search.problem import evaluate, profile_of

ROUNDS = 200
SEARCH_S = 3.0


@dataclass(frozen=True)
class Dropped:
    """An activation that is dropped from moment ``start`` up to moment ``end``."""

    usage: int
    start: int
    end: int


class _Recompute:
    """Seconds of doing operations again under a choice."""

    def __init__(self, extraction: Extraction) -> None:
        self.extraction, self.priced = extraction, extraction.priced
        self.graph, self.analysis = extraction.graph, extraction.priced.analysis
        self.pricer = Pricer(self.analysis, self.priced.mesh, self.priced.model)
        self.known: dict[int, float] = {}

    def op_s(self, index: int) -> float:
        """One operation on its local shards; a matrix product is a group of its own."""
        if index in self.known:
            return self.known[index]
        op = self.graph.ops[index]
        entry = self.analysis.groups.op_layouts[index]
        seconds = 0.0
        if op.kind in MATMULS and entry is not None:
            group = self.analysis.groups.groups[entry[0]]
            chosen, row = self.priced.sets[entry[0]], self.extraction.choice[entry[0]]
            seconds = self.pricer.parts_of(group, chosen, row)[0]
        elif not op.kind.startswith(("loop_", "branch_")):
            mesh, values = self.priced.mesh, self.graph.values
            moved = sum(
                values[v].nbytes / self.extraction.value_sharding(v, "use").shards(mesh)
                for v in (*op.inputs, *op.outputs)
                if v != SCALAR
            )
            dtype = values[op.outputs[0]].dtype if op.outputs else "float32"
            weight = self.graph.regions[op.region].weight
            seconds = weight * float(self.priced.model.compute_s(0.0, moved, dtype, False))
        self.known[index] = seconds
        return seconds

    def chain(self, value: int, there: frozenset[int]) -> frozenset[int]:
        """The operations that make a value from the values that are there."""
        ops, stack = set[int](), [value]
        while stack:
            made = self.graph.values[stack.pop()].op
            if made < 0 or made in ops:
                continue
            ops.add(made)
            stack += [v for v in self.graph.ops[made].inputs if v != SCALAR and v not in there]
        return frozenset(ops)


def remat(priced: Priced, least: LeastMemory, request: Request) -> Relief | None:
    """Drop idle activations at the peaks until a plan fits, if that is possible.

    Args:
        priced: the whole step.
        least: its plan with the least peak.
        request: what was asked for.

    Returns:
        What was reached, or None when no activation is idle at the peak.
    """
    extraction = Extraction(priced, least.choice)
    limit = request.limit_bytes - priced.analysis.scalar_bytes
    dropped, ops = _dropped(extraction, limit)
    if not dropped:
        return None
    work = _Recompute(extraction)
    again_s = sum(work.op_s(op) for op in sorted(ops))
    problem = cut_out(priced, dropped).problem
    step_s, peak, _ = evaluate(problem, least.choice)
    if request.mode == "AUTO_PARALLEL":  # what is cheap under the limit may be another choice now
        found = recursive_programming(problem, time_limit_s=SEARCH_S)
        if found.feasible:
            step_s, peak = found.cost_s, found.peak_bytes
    values = {priced.analysis.usage_values[d.usage] for d in dropped}
    many = "1 activation" if len(values) == 1 else f"{len(values)} activations"
    what = f"remat (jax.checkpoint) of {many}{_where(extraction, values)}"
    note = "an estimate; the step includes the operations done again"
    total = peak + priced.analysis.scalar_bytes
    return Relief(what, total, step_s + again_s, peak <= limit * (1 + 1e-12), note)


def cut_out(priced: Priced, dropped: Sequence[Dropped]) -> Priced:
    """The pricing without the memory of what is dropped, while it is dropped."""
    analysis, gone = priced.analysis, {d.usage: d for d in dropped}
    rows: list[UsageRow] = []
    values: list[int] = []
    for k, (usage, value) in enumerate(zip(analysis.usages, analysis.usage_values, strict=True)):
        gap = gone.get(k)
        spans = [(usage[1], usage[2])]
        if gap is not None:
            spans = [(usage[1], gap.start), (gap.end, usage[2])]
        for start, end in spans:
            rows.append((usage[0], start, end, *usage[3:]))
            values.append(value)
    changed = dataclasses.replace(analysis, usages=tuple(rows), usage_values=tuple(values))
    return dataclasses.replace(priced, analysis=changed)


def _dropped(extraction: Extraction, limit: float) -> tuple[list[Dropped], frozenset[int]]:
    """What to drop, and the operations to do again."""
    analysis = extraction.priced.analysis
    work, sizes = _Recompute(extraction), np.array(extraction.usage_bytes())
    reads = extraction.graph.consumers()
    starts, ends = [u[1] for u in analysis.usages], [u[2] for u in analysis.usages]
    taken: dict[int, Dropped] = {}
    ops: frozenset[int] = frozenset()
    for _ in range(ROUNDS):
        gaps = list(taken.values())
        moments, profile = profile_of(
            [*starts, *(d.start for d in gaps)],
            [*ends, *(d.end for d in gaps)],
            [*sizes, *(-sizes[d.usage] for d in gaps)],
        )
        at = int(np.argmax(profile))
        moment, excess = int(moments[at]), float(profile[at]) - limit
        if excess <= 0:
            break
        idle = [
            gap
            for k in range(len(starts))
            if k not in taken and sizes[k] > 0 and starts[k] < moment < ends[k]
            if (gap := _gap(k, analysis.usage_values[k], extraction, reads, moment)) is not None
        ]
        if not idle:
            break
        gone = {analysis.usage_values[k] for k in taken}
        there = frozenset(
            v
            for k, v in enumerate(analysis.usage_values)
            if starts[k] <= moment < ends[k] and v not in gone
        ) | frozenset(extraction.graph.inputs)
        rated = []
        for gap in idle:
            value = analysis.usage_values[gap.usage]
            chain = work.chain(value, there - {value})
            seconds = sum(work.op_s(op) for op in chain - ops)
            rated.append((-sizes[gap.usage] / max(seconds, 1e-12), gap.usage, gap, chain))
        _, usage, best, chain = min(rated, key=lambda r: r[:2])
        taken[usage] = best
        ops |= chain
    return list(taken.values()), ops


def _gap(
    usage: int, value: int, extraction: Extraction, reads: Sequence[Sequence[int]], moment: int
) -> Dropped | None:
    """From its last use before a moment to the next after it; None when in use, or no activation.

    Uses inside loops are left alone: their iterations share one place in the order.
    """
    graph = extraction.graph
    made = graph.values[value].op
    if made < 0 or graph.ops[made].region != 0:
        return None
    if any(graph.ops[r].region != 0 for r in reads[value]):
        return None
    uses = sorted({made, *reads[value]})
    after = bisect.bisect_right(uses, moment)
    if after == len(uses) or uses[after - 1] >= moment:
        return None
    return Dropped(usage, uses[after - 1] + 1, uses[after])


def _where(extraction: Extraction, values: set[int]) -> str:
    """The lines that most of them come from."""
    graph = extraction.graph
    lines: dict[str, int] = {}
    for value in values:
        source = graph.ops[graph.values[value].op].source
        if source:
            lines[source] = lines.get(source, 0) + graph.values[value].nbytes
    top = sorted(lines, key=lambda line: (-lines[line], line))[:3]
    return f" of {', '.join(top)}" if top else ""
