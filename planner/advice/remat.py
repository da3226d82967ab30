"""Rematerialization: the memory that it would free at the peaks, and what the recomputation costs.

An activation (a value that grows with the batch) that is idle at the peak, and read before and
after it, can be dropped in between and recomputed from what is in memory then. At each peak, the
activations that free the most bytes per second of recomputation are dropped, until the step fits or
nothing idle is left. This is an estimate: memory that is in use during recomputation is not
counted, nor is communication.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from planner.advice.batch import batch_leaves, growing
from planner.cost.peak import buffer_bytes
from planner.cost.pricing import Priced, Pricer
from planner.graph.ir import PRODUCTS, SCALAR
from planner.plan.extract import Extraction
from planner.report.shortage import Relief
from planner.request.parsed import Request
from planner.search.local.memory_limit import LeastMemory
from planner.search.problem import evaluate, profile_of
from planner.search.registry import FAST, SEARCHES
from planner.space.buffer import Buffer, in_pool

SEARCH_S = 3.0
"""Seconds for the search for a plan without the dropped memory."""
DROP_S = 10.0
"""Seconds after which no further peak is processed."""


@dataclass(frozen=True)
class Dropped:
    """An activation that is dropped from moment ``start`` up to moment ``end``."""

    buffer: int
    start: int
    end: int


class _Recompute:
    """Seconds of recomputing operations under a choice."""

    def __init__(self, extraction: Extraction) -> None:
        self.extraction, self.priced = extraction, extraction.priced
        self.graph, self.analysis = extraction.graph, extraction.priced.analysis
        self.pricer = Pricer(self.analysis, self.priced.mesh, self.priced.model)
        self.known: dict[int, float] = {}

    def op_s(self, index: int) -> float:
        """Seconds of one operation on its local shards; a matrix product forms its own group."""
        if index in self.known:
            return self.known[index]
        op = self.graph.ops[index]
        entry = self.analysis.groups.op_layouts[index]
        seconds = 0.0
        if op.kind in PRODUCTS and entry is not None:
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
            seconds = weight * float(self.priced.model.compute_s(0.0, moved, dtype))
        self.known[index] = seconds
        return seconds

    def chain(self, value: int, there: Set[int]) -> frozenset[int]:
        """The operations that compute a value from the available values."""
        ops, stack = set[int](), [value]
        while stack:
            maker = self.graph.values[stack.pop()].op
            if maker < 0 or maker in ops:
                continue
            ops.add(maker)
            stack += [v for v in self.graph.ops[maker].inputs if v != SCALAR and v not in there]
        return frozenset(ops)


def remat(priced: Priced, least: LeastMemory, request: Request) -> Relief | None:
    """Drop idle activations at the peaks until a plan fits, if that is possible.

    Args:
        priced: the pricing of the whole step.
        least: its plan with the least peak.
        request: the user's request.

    Returns:
        The result, or None if no activation is idle at the peak.
    """
    extraction = Extraction(priced, least.choice)
    scalars = priced.analysis.scalar_bytes
    limit = request.limit_bytes - scalars
    dropped = _Dropping(extraction).until(limit)
    if not dropped.taken:
        return None
    held = in_pool(priced.analysis.buffers)
    values = {held[d.buffer].value for d in dropped.taken}
    many = "1 activation" if len(values) == 1 else f"{len(values)} activations"
    what = f"remat (jax.checkpoint) of {many}{_where(extraction, values)}"
    if dropped.peak_bytes > limit:
        why = "out of time" if dropped.cut_short else "nothing more is idle at that peak"
        note = f"an estimate; {why}"
        return Relief(what, dropped.peak_bytes + scalars, math.inf, False, note)
    problem = cut_out(priced, dropped.taken).problem
    step_s, peak, _ = evaluate(problem, least.choice)
    if request.mode == "AUTO_PARALLEL":  # another choice may be the cheapest now
        solution = SEARCHES[FAST](problem, time_limit_s=SEARCH_S)
        if solution.feasible:
            step_s, peak = solution.cost_s, solution.peak_bytes
    note = "an estimate; the step includes the operations done again"
    return Relief(what, peak + scalars, step_s + dropped.again_s, True, note)


def cut_out(priced: Priced, dropped: Sequence[Dropped]) -> Priced:
    """The pricing without the memory of dropped activations, while they are dropped."""
    analysis, gone = priced.analysis, {d.buffer: d for d in dropped}
    out: list[Buffer] = []
    for k, b in enumerate(in_pool(analysis.buffers)):
        gap = gone.get(k)
        spans = [(b.start, b.end)]
        if gap is not None:
            spans = [(b.start, gap.start), (gap.end, b.end)]
        out += [dataclasses.replace(b, start=start, end=end) for start, end in spans]
    changed = dataclasses.replace(analysis, buffers=tuple(out))
    return dataclasses.replace(priced, analysis=changed)


@dataclass(frozen=True)
class _State:
    """The dropped activations, the remaining peak, and the seconds of recomputation.

    ``cut_short``: time ran out before all peaks were processed.
    """

    taken: tuple[Dropped, ...]
    peak_bytes: float
    again_s: float
    cut_short: bool


class _Dropping:
    """Drops idle activations, peak by peak."""

    def __init__(self, extraction: Extraction) -> None:
        analysis = extraction.priced.analysis
        held = in_pool(analysis.buffers)
        self.extraction, self.values = extraction, [b.value for b in held]
        self.work, self.reads = _Recompute(extraction), analysis.reads
        self.sizes = np.array(buffer_bytes(extraction, held))
        self.starts = np.array([b.start for b in held], dtype=np.int64)
        self.ends = np.array([b.end for b in held], dtype=np.int64)
        graph, rules = extraction.graph, analysis.rules
        wanted = growing(graph, rules, batch_leaves(graph))
        self.activation = np.array([v in wanted for v in self.values])
        self.taken: dict[int, Dropped] = {}
        self.ops: frozenset[int] = frozenset()

    def until(self, limit: float) -> _State:
        """Drop activations until no moment exceeds the limit, or a peak has nothing idle left."""
        deadline = time.monotonic() + DROP_S
        late = False
        while True:
            moment, peak = self._peak()
            excess = peak - limit
            late = time.monotonic() >= deadline
            if excess <= 0 or late:
                break
            idle = self._idle(moment)
            if float(sum(self.sizes[gap.buffer] for gap in idle)) < excess:
                # dropping all of them is not enough
                self.taken.update({gap.buffer: gap for gap in idle})
                peak -= float(sum(self.sizes[gap.buffer] for gap in idle))
                break
            self._drop(idle, moment, excess)
        again_s = sum(self.work.op_s(op) for op in sorted(self.ops))
        return _State(tuple(self.taken.values()), peak, again_s, late)

    def _peak(self) -> tuple[int, float]:
        gaps = list(self.taken.values())
        moments, profile = profile_of(
            [*self.starts, *(d.start for d in gaps)],
            [*self.ends, *(d.end for d in gaps)],
            [*self.sizes, *(-self.sizes[d.buffer] for d in gaps)],
        )
        at = int(np.argmax(profile))
        return int(moments[at]), float(profile[at])

    def _idle(self, moment: int) -> list[Dropped]:
        across = (self.starts < moment) & (moment < self.ends) & (self.sizes > 0)
        across &= self.activation
        gaps = (
            _gap(int(k), self.values[k], self.extraction, self.reads, moment)
            for k in np.flatnonzero(across)
            if k not in self.taken
        )
        return [gap for gap in gaps if gap is not None]

    def _drop(self, idle: Sequence[Dropped], moment: int, excess: float) -> None:
        """Drop at least ``excess`` bytes, the most bytes per second of recomputation first."""
        there = {v for v, now in zip(self.values, self._kept(moment), strict=True) if now}
        there.update(self.extraction.graph.inputs)
        gone = {self.values[k] for k in self.taken}

        def price(gap: Dropped) -> tuple[float, frozenset[int]]:
            value = self.values[gap.buffer]
            chain = self.work.chain(value, there - gone - {value})
            return sum(self.work.op_s(op) for op in chain - self.ops), chain

        prices = {gap.buffer: price(gap)[0] for gap in idle}
        order = sorted(idle, key=lambda g: (prices[g.buffer] / self.sizes[g.buffer], g.buffer))
        for gap in order:
            self.ops |= price(gap)[1]  # again: what was dropped since is no longer available
            self.taken[gap.buffer] = gap
            gone.add(self.values[gap.buffer])
            excess -= float(self.sizes[gap.buffer])
            if excess <= 0:
                return

    def _kept(self, moment: int) -> list[bool]:
        live: list[bool] = ((self.starts <= moment) & (moment < self.ends)).tolist()
        return live


def _gap(
    buffer: int, value: int, extraction: Extraction, reads: Sequence[Sequence[int]], moment: int
) -> Dropped | None:
    """The gap from a value's last use before a moment to the next after it; None if there is none.

    There is none if the value is in use, or is not an activation. Values that are used inside loops
    are excluded: the iterations share one place in the order.
    """
    graph = extraction.graph
    maker = graph.values[value].op
    if maker < 0 or graph.ops[maker].region != 0:
        return None
    if any(graph.ops[r].region != 0 for r in reads[value] if r < len(graph.ops)):
        return None
    uses = sorted({maker, *reads[value]})
    after = bisect.bisect_right(uses, moment)
    if after == len(uses) or uses[after - 1] >= moment:
        return None
    return Dropped(buffer, uses[after - 1] + 1, uses[after])


def _where(extraction: Extraction, values: set[int]) -> str:
    """The source lines that most of the values' bytes come from, as text."""
    graph = extraction.graph
    lines: dict[str, int] = {}
    for value in values:
        source = graph.ops[graph.values[value].op].source
        if source:
            lines[source] = lines.get(source, 0) + graph.values[value].nbytes
    top = sorted(lines, key=lambda line: (-lines[line], line))[:3]
    return f" of {', '.join(top)}" if top else ""
