"""Everything about a traced step that does not depend on the mesh: work, reductions, buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from costmodels import CostModel, Device
from costmodels.schedule import StageSeconds, step_seconds
from planner.annotate import SHIFT
from planner.graph.ir import Graph, Op
from planner.graph.labels.roles import sums_gradient
from planner.rules.factor import FactorRule
from planner.space.buffer import Buffer
from planner.space.decisions import DECISIONS, Chosen
from planner.space.factors import Layout
from planner.space.groups import GroupLink, Groups
from planner.space.sums import with_joined_sums
from planner.step.buffers import Lifetimes, find_buffers
from planner.step.facts import Facts, Reduction, Said
from planner.step.feeding import fed_of
from planner.step.kernels.absorbed import absorbing, product_kernels, seen_shares
from planner.step.kernels.costs import Work, Workload
from planner.step.kernels.fused import find_fused
from planner.step.kernels.operands import with_sent_bytes
from planner.step.kernels.starts import starts
from planner.step.kernels.vector import vector_bytes
from planner.step.memory.liveness import PASSES, materialised
from planner.step.memory.materialized import written
from planner.step.memory.updates import gradients_in_updates

PACKING = 1.05
"""Ratio of the bytes that temporaries take to those alive at the peak. A compiler gives every
buffer one address for its lifetime, so gaps remain; docs/explanation/memory.md has the details."""

TPU_RESERVE = 1.10
"""The same ratio in the search for TPU: includes a reserve for what predictions miss."""


LARGE = 64e6
"""Bytes of fast memory."""


def stores_softmax(device: Device) -> bool:
    """Whether a softmax, or its gradient, is written once for several products: as compiled for v5p
    and tpu7x. v5e and v6e, with more fast memory, mostly compute it in each."""
    return device.fuses_operands and device.fast_memory_bytes < LARGE


@dataclass(frozen=True)
class Scheduled:
    """The facts, besides the graph and its groups, that determine the buffers of a known plan.

    ``donated``: per input, whether results may take its memory; ``device``: the device whose
    compiler is modeled, None: no particular one; ``inside``: per value, whether it never leaves a
    hand-written kernel; ``chosen``: per decision, the values that have a choice.
    """

    donated: tuple[bool, ...]
    device: Device | None
    inside: tuple[bool, ...]
    chosen: Chosen = field(default_factory=dict)

    @property
    def fused_operands(self) -> bool:
        """See ``written``."""
        return self.device is not None and self.device.fuses_operands

    @property
    def stored(self) -> bool:
        """See ``written``."""
        return self.device is not None and stores_softmax(self.device)

    @property
    def puts_off(self) -> bool:
        """Whether operations that only the update needs come last (XLA:TPU follows the order of the
        trace)."""
        return not self.fused_operands

    @property
    def normalizes(self) -> bool:
        """See ``Written``."""
        device = self.device
        return device is not None and device.kind != "cpu" and not device.fuses_operands

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and lanes that arrays are padded to."""
        return (1, 1) if self.device is None else (self.device.tile_rows, self.device.tile_lanes)

    @property
    def room(self) -> float:
        """Ratio of the bytes that the search allots to temporaries to those alive."""
        return TPU_RESERVE if self.fused_operands else PACKING

    def buffers(
        self,
        graph: Graph,
        groups: Groups,
        moves: Callable[[GroupLink], bool],
        inside: frozenset[int] = frozenset(),
        *,
        late: bool = True,
    ) -> Lifetimes:
        """The buffers in the order in which compilers run a step.

        Args:
            graph: the step.
            groups: its groups.
            moves: see ``find_buffers``.
            inside: gradients that are not written; see ``find_buffers``.
            late: whether operations that only the update needs come last, if the compiler does so
                (``puts_off``).
        """
        live = graph.live_ops()
        late = late and self.puts_off
        written_values = written(
            graph, groups.fuses, live, self.fused_operands, late, self.normalizes, self.stored
        )
        return find_buffers(
            graph,
            groups,
            written_values.without(self.inside),
            live,
            self.donated,
            self.tile,
            moves=moves,
            chosen=self.chosen,
            inside=inside,
            packing=PACKING,
        )


@dataclass(frozen=True, eq=False)
class Analysis:
    """Everything about a traced step that does not depend on the mesh."""

    graph: Graph
    rules: tuple[FactorRule, ...]
    groups: Groups
    facts: tuple[Facts, ...]
    """Per group."""
    buffers: tuple[Buffer, ...]
    """The buffers if operations run in the order of the trace; moments are operation indices."""
    reads: tuple[tuple[int, ...], ...]
    """Per value that is written, the operations that read it."""
    scheduled: Scheduled
    scalar_bytes: float
    counts: tuple[int, ...]
    """Per group, the number of equal groups that it stands for: 1 except in a ``quotient``."""
    bundles: tuple[int, ...]
    """Per link, its edge, numbered in order of first appearance; parallel links share an edge."""
    parts: tuple[tuple[Work, ...], ...] = ()
    """Per operation of the step, its part of its group's work."""

    @property
    def stacks(self) -> bool:
        """Whether some work is that of loops that write stacks."""
        return any(w.stacks for facts in self.facts for w in facts.work)

    def without_stacks(self) -> Analysis:
        """The same, as if stacks took no time: no rematerialization of the step takes less."""
        if not self.stacks:
            return self
        facts = tuple(
            dataclasses.replace(x, work=tuple(w for w in x.work if not w.stacks))
            for x in self.facts
        )
        return dataclasses.replace(self, facts=facts)


def empty_workload(
    graph: Graph, rules: Sequence[FactorRule], groups: Groups, device: Device | None
) -> Workload:
    """A workload for a step, still without operations."""
    live = graph.live_ops()
    fused = find_fused(graph, rules)
    if device is None or not device.fuses_operands:
        is_written = materialised(graph, groups.fuses, live)
        is_written = tuple([k and not i for k, i in zip(is_written, fused.inside, strict=True)])
        begins = starts(graph, groups.fuses, is_written, live)
        shares = [1.0] * len(live)
        return Workload(graph, groups, is_written, fused, *begins, shares, device=device)
    written_values = written(graph, groups.fuses, live, True, stored=stores_softmax(device))
    written_values = written_values.without(fused.inside)
    begins = starts(graph, groups.fuses, written_values.kept, live)
    home = absorbing(graph, groups.fuses, written_values.kept, live)
    handed = gradients_in_updates(graph, groups, live, lambda _: False)
    return Workload(
        graph,
        groups,
        written_values.kept,
        fused,
        *begins,
        seen_shares(graph, rules, home, fused, device),
        product_kernels(graph, rules, groups, home, written_values, device, handed),
        vector_bytes(graph, rules, groups, home, written_values, device, handed, begins.depth),
        device,
    )


def does_nothing(op: Op) -> bool:
    """Whether an operation only renames a value: a border of a region, or a mark."""
    return op.kind.startswith(("loop_", "branch_")) or op.kind in PASSES


def analyse(
    graph: Graph,
    rules: Sequence[FactorRule],
    groups: Groups,
    donated: Sequence[bool],
    device: Device | None = None,
    chosen: Chosen | None = None,
) -> Analysis:
    """Work, reductions and memory of every group, before any mesh is chosen.

    ``device``: the device whose compiler is modeled; None: no particular one.
    ``chosen``: per decision, the values that have a choice (also recorded in ``groups``).
    """
    chosen = chosen or {}
    live = graph.live_ops()
    if device is not None and device.kind != "cpu":  # XLA:CPU reduces addends one by one
        links = with_joined_sums(graph, groups.links, live, tables=not device.fuses_operands)
        groups = dataclasses.replace(groups, links=links)
    groups = with_sent_bytes(graph, groups, live, device)
    workload = empty_workload(graph, rules, groups, device)
    fused = workload.fused
    reductions: list[list[Reduction]] = [[] for _ in groups.groups]
    said: list[list[Said]] = [[] for _ in groups.groups]
    parts: list[tuple[Work, ...]] = [()] * len(graph.ops)
    for op in graph.ops:
        entry = groups.op_layouts[op.index]
        if entry is None or not live[op.index]:
            continue
        if does_nothing(op) and not (op.kind == "loop_ys" and workload.moved):
            continue
        if graph.changes_memory(op):
            continue  # priced as a copy over the host link
        parts[op.index] = workload.add(op, rules[op.index])
        group, ins, outs = entry
        if rules[op.index].origin == "region":
            weight = graph.regions[op.region].weight
            for kind, axes, nbytes, times in op.sends:
                said[group].append(Said(kind, axes, nbytes, weight * times, op.index))  # type: ignore[arg-type]
        reductions[group].extend(_reductions(graph, groups, op, ins, outs))
    scheduled = Scheduled(tuple(donated), device, fused.inside, chosen)
    written_values = written(
        graph,
        groups.fuses,
        live,
        scheduled.fused_operands,
        normalizes=scheduled.normalizes,
        stored=scheduled.stored,
    ).without(fused.inside)
    tile, room = scheduled.tile, scheduled.room
    held = find_buffers(
        graph, groups, written_values, live, donated, tile, chosen=chosen, packing=room
    )
    facts = map(
        Facts.of,
        groups.groups,
        workload.done(),
        map(tuple, reductions),
        map(tuple, said),
        _stored(graph, groups),
        _decided(graph, groups, live, chosen),
        fed_of(graph, groups),
    )
    return Analysis(
        graph,
        tuple(rules),
        groups,
        tuple(facts),
        held.buffers,
        written_values.reads,
        scheduled,
        float(sum(graph.values[i].nbytes for i in graph.inputs if not graph.values[i].shape)),
        (1,) * len(groups.groups),
        _bundles(groups.links),
        tuple(parts),
    )


def _reductions(
    graph: Graph, groups: Groups, op: Op, ins: Sequence[Layout], outs: Sequence[Layout]
) -> Iterator[Reduction]:
    """The collectives of an operation if a dimension that it shifts or reduces is split."""
    weight = graph.regions[op.region].weight
    if op.kind == SHIFT and outs[0][0] >= 0:
        (value,) = op.outputs
        others = frozenset(f for f in outs[0][1:] if f >= 0)
        row = graph.values[value].nbytes / graph.values[value].shape[0]
        yield Reduction(frozenset(outs[0][:1]), others, row, weight, op.index, shifts=True)
    on_link = op.kind == "reduce_sum" and not groups.fusable[op.index]
    if op.kind.startswith(("reduce_", "arg")) and not on_link:
        over = frozenset(f for f in ins[0] if f >= 0 and f not in outs[0])
        if over:
            out = float(sum(graph.values[o].nbytes for o in op.outputs))
            result_factors = frozenset(f for f in outs[0] if f >= 0)
            gradient = any(sums_gradient(graph, o) for o in op.outputs)
            yield Reduction(over, result_factors, out, weight, op.index, gradient)


def _decided(
    graph: Graph, groups: Groups, live: Sequence[bool], chosen: Chosen
) -> list[tuple[tuple[str, Hashable], ...]]:
    """Per group, the facts that determine the seconds of its decisions."""
    out: list[list[tuple[str, Hashable]]] = [[] for _ in groups.groups]
    for name, decision in DECISIONS.items():
        values = chosen.get(name, frozenset())
        for group, facts in decision.facts(graph, groups, live, values).items():
            out[group].append((name, facts))
    return list(map(tuple, out))


def _stored(graph: Graph, groups: Groups) -> tuple[tuple[float, Layout] | None, ...]:
    out: list[tuple[float, Layout] | None] = [None] * len(groups.groups)
    used = {x.a: x for x in groups.links if x.a_use}
    for value, home in zip(graph.values, groups.home, strict=True):
        if value.op == -1 and home is not None and home[0] in used:
            out[home[0]] = (used[home[0]].nbytes, home[1])
    return tuple(out)


def _bundles(links: Sequence[GroupLink]) -> tuple[int, ...]:
    known: dict[tuple[int, int], int] = {}
    return tuple(known.setdefault((min(x.a, x.b), max(x.a, x.b)), len(known)) for x in links)


@lru_cache(maxsize=16)
def ideal_s(analysis: Analysis, model: CostModel, num_devices: int) -> float:
    """Seconds of a step whose work is split perfectly and that communicates nothing.

    No strategy on any mesh of ``num_devices`` devices can cost less, because it divides every count
    of a kernel by at most ``num_devices``.
    """
    tally: dict[Work, int] = {}
    for facts, count in zip(analysis.facts, analysis.counts, strict=True):
        for w in facts.work:
            tally[w] = tally.get(w, 0) + count
    compute_s = 0.0
    for w, times in tally.items():
        n = 1 if w.one_part else num_devices
        seconds = w.seconds(model, lambda _, n=n: np.full(1, float(n)))  # type: ignore[misc]
        compute_s += times * (w.kernels * model.op_overhead_s + float(seconds[0]))
    return step_seconds((StageSeconds(compute_s),)).step_s
