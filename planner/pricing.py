"""(Groups, mesh, CostModel) -> Problem: the only adapter between graph and cost model.

Seconds of a node: roofline time of the group's operations on their local shard, plus the
all-reduces of reductions inside the group, plus (inputs) the all-gather from store to
use. Seconds of an edge: the resharding of the value that flows. Communication counts
``1 - overlap`` of its time. Equal sub-problems share one array object, so a search can
see that layers repeat.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels import CostModel
from planner.graph.ir import Graph
from planner.graph.liveness import intervals, materialised
from planner.groups import Group, Groups, Link, gradient_shapes, is_fusable
from planner.reshard import COMBINED, reshard_table
from planner.rules.factor import FactorRule
from planner.search.problem import Edge, Problem, Usage
from planner.spec import MeshSpec
from planner.strategies import StrategySet, codes, enumerate_strategies, shards
from planner.unify import Layout

Array = NDArray[np.float64]
MATMULS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot"})
MOVES = frozenset(
    "reshape transpose broadcast_in_dim squeeze expand_dims iota slice concatenate pad copy "
    "convert_element_type dynamic_slice dynamic_update_slice gather rev".split()
)


@dataclass(frozen=True)
class Work:
    """Work of one group that spans one set of factors, summed over its operations."""

    factors: frozenset[int]
    flops: float
    nbytes: float
    dtype: str
    matmul: bool


@dataclass(frozen=True)
class Reduction:
    """An all-reduce inside a group: the result's bytes and factors, the summed factors."""

    over: frozenset[int]
    kept: frozenset[int]
    nbytes: float
    weight: float
    op: int
    gradient: bool = False


@dataclass(frozen=True, eq=False)
class Analysis:
    """Everything about a traced step that does not depend on the mesh."""

    graph: Graph
    rules: tuple[FactorRule, ...]
    groups: Groups
    work: tuple[tuple[Work, ...], ...]
    reductions: tuple[tuple[Reduction, ...], ...]
    usages: tuple[tuple[int, int, int, float, Layout, str], ...]
    """(group, start, end, bytes, layout, port): port is "use", "store" or "gathered"."""
    usage_values: tuple[int, ...]
    scalar_bytes: float


def analyse(
    graph: Graph, rules: Sequence[FactorRule], groups: Groups, donated: Sequence[bool]
) -> Analysis:
    """Work, reductions and memory of every group, before any mesh is chosen."""
    live = graph.live_ops()
    fusable = [is_fusable(op, rules[op.index]) for op in graph.ops]
    kept = materialised(graph, fusable, live)
    work: list[dict[tuple[frozenset[int], str, bool], list[float]]] = [{} for _ in groups.groups]
    reductions: list[list[Reduction]] = [[] for _ in groups.groups]
    carried = gradient_shapes(graph)
    seen: set[tuple[int, int]] = set()
    for op in graph.ops:
        entry = groups.op_layouts[op.index]
        if entry is None or not live[op.index] or op.kind.startswith(("loop_", "branch_")):
            continue
        group, ins, outs = entry
        rule = rules[op.index]
        weight = graph.regions[op.region].weight
        factors = frozenset(f for layout in (*ins, *outs) for f in layout if f >= 0)
        flops = _flops(
            op.kind,
            rule,
            [graph.values[o].shape for o in op.outputs],
            [graph.values[i].shape for i in op.inputs if i >= 0],
        )
        reads = {v for v in op.inputs if v >= 0 and kept[v] and (group, v) not in seen}
        if fusable[op.index]:  # a fused chain reads each array once
            seen.update((group, v) for v in reads)
        nbytes = float(sum(graph.values[v].nbytes for v in (*reads, *op.outputs) if kept[v]))
        if op.kind in ("gather", "dynamic_slice"):
            nbytes = 2.0 * sum(graph.values[v].nbytes for v in op.outputs)
        first = next((v for v in op.inputs if v >= 0), op.outputs[0] if op.outputs else -1)
        dtype = graph.values[first].dtype if first >= 0 else "float32"
        total = work[group].setdefault((factors, dtype, op.kind in MATMULS), [0.0, 0.0])
        total[0] += weight * flops
        total[1] += weight * nbytes
        if op.kind.startswith(("reduce_", "arg")):
            over = frozenset(f for f in ins[0] if f >= 0 and f not in outs[0])
            out = float(sum(graph.values[o].nbytes for o in op.outputs))
            if over:
                kept_factors = frozenset(f for f in outs[0] if f >= 0)
                gradient = any(tuple(sorted(graph.values[o].shape)) in carried for o in op.outputs)
                reductions[group].append(
                    Reduction(over, kept_factors, out, weight, op.index, gradient)
                )
    usages, values = _usages(graph, groups, kept, live, donated)
    return Analysis(
        graph,
        tuple(rules),
        groups,
        tuple(tuple(Work(k[0], v[0], v[1], k[1], k[2]) for k, v in w.items()) for w in work),
        tuple(map(tuple, reductions)),
        usages,
        values,
        float(sum(graph.values[i].nbytes for i in graph.inputs if not graph.values[i].shape)),
    )


def ideal_s(analysis: Analysis, model: CostModel, num_devices: int) -> float:
    """Seconds of a step whose work is split perfectly and that communicates nothing.

    No strategy on any mesh of ``num_devices`` devices can cost less.
    """
    return sum(
        float(model.compute_s(w.flops / num_devices, w.nbytes / num_devices, w.dtype, w.matmul))
        for work in analysis.work
        for w in work
    )


def _flops(
    kind: str, rule: FactorRule, outs: list[tuple[int, ...]], ins: list[tuple[int, ...]]
) -> float:
    if kind in ("dot_general", "ragged_dot"):
        return 2.0 * math.prod(rule.sizes)
    if kind == "conv_general_dilated":
        # per output element, one multiply-add for each kernel element of its feature
        shared = {f for dim in rule.operands[1] for f in dim} & {
            f for dim in rule.results[0] for f in dim
        }
        features = math.prod(rule.sizes[f] for f in shared)
        return 2.0 * math.prod(outs[0]) * math.prod(ins[1]) / features
    if kind in MOVES:
        return 0.0
    size = max((math.prod(s) for s in (*outs, *ins)), default=0)
    return float(size)


def _usages(
    graph: Graph,
    groups: Groups,
    kept: Sequence[bool],
    live: Sequence[bool],
    donated: Sequence[bool],
) -> tuple[tuple[tuple[int, int, int, float, Layout, str], ...], tuple[int, ...]]:
    out: list[tuple[int, int, int, float, Layout, str]] = []
    values: list[int] = []
    readers: dict[int, list[int]] = {}
    for link in groups.links:
        if link.a_use and live[link.op]:
            readers.setdefault(link.value, []).append(link.op)
    for span in intervals(graph, kept, live, donated):
        home = groups.home[span.value]
        if home is None:
            continue
        group, layout = home
        nbytes = float(graph.values[span.value].nbytes)
        is_input = groups.groups[group].kind == "input"
        out.append((group, span.start, span.end, nbytes, layout, "store" if is_input else "use"))
        values.append(span.value)
        if is_input and span.value in readers:
            first, last = min(readers[span.value]), max(readers[span.value])
            out.append((group, first, last + 1, nbytes, layout, "gathered"))
            values.append(span.value)
    return tuple(out), tuple(values)


@dataclass(frozen=True, eq=False)
class Priced:
    """A Problem and what its numbers stand for."""

    analysis: Analysis
    mesh: MeshSpec
    model: CostModel
    sets: tuple[StrategySet, ...]
    problem: Problem
    weight_comm: float


class Pricer:
    """Builds the arrays of one Problem; equal inputs give the same array object."""

    def __init__(
        self, analysis: Analysis, mesh: MeshSpec, model: CostModel, change_s: float = 0.0
    ) -> None:
        self.analysis, self.mesh, self.model = analysis, mesh, model
        self.change_s = change_s
        self.sizes = mesh.sizes
        self.comm = 1.0 - model.overlap
        self.cache: dict[Any, Any] = {}

    def strategies(self, group: Group, allowed: NDArray[np.bool_] | None) -> StrategySet:
        """The strategies of a group that pins and modes allow."""
        full = enumerate_strategies(group.sizes, group.shardable, self.sizes, group.kind)
        if allowed is None or allowed.all():
            return full
        key = ("set", id(full), allowed.tobytes())
        if key not in self.cache:
            self.cache[key] = StrategySet(full.use[allowed], full.store[allowed])
        return self.cache[key]  # type: ignore[no-any-return]

    def all_reduce_s(self, assign: NDArray[np.int64], r: Reduction, local: Array) -> Array:
        """Seconds of all-reducing ``local`` bytes along the axes that split ``r.over``."""
        hit = np.isin(assign, list(r.over))
        masks = hit @ (1 << np.arange(len(self.sizes)))
        out = np.zeros(len(local))
        for mask in np.unique(masks):
            if mask:
                axes = tuple(k for k in range(len(self.sizes)) if mask >> k & 1)
                alpha, beta = self.model.collective_coefficients("all_reduce", self.sizes, axes)
                rows = masks == mask
                out[rows] = (COMBINED if r.gradient else 1.0) * alpha + beta * local[rows]
        return out

    def node_cost(self, group: Group, chosen: StrategySet) -> Array:
        """Seconds per strategy, communication weighted by what does not overlap."""
        work = self.analysis.work[group.index]
        reductions = self.analysis.reductions[group.index]
        signature = tuple((r.over, r.kept, r.nbytes, r.weight, r.gradient) for r in reductions)
        shape = (group.kind, group.sizes, self._stored_bytes(group))
        key = ("node", id(chosen), work, signature, shape)
        if key in self.cache:
            return self.cache[key]  # type: ignore[no-any-return]
        compute, comm = self.node_parts(group, chosen)
        cost = compute + self.comm * comm
        self.cache[key] = cost
        return cost

    def _stored_bytes(self, group: Group) -> float:
        if group.kind != "input":
            return 0.0
        value = self._input_value(group)
        used = any(x.a_use and x.a == group.index for x in self.analysis.groups.links)
        return float(self.analysis.graph.values[value].nbytes) if used else 0.0

    def _input_value(self, group: Group) -> int:
        if not hasattr(self, "_of_group"):
            self._of_group = {
                home[0]: v.index
                for v, home in zip(
                    self.analysis.graph.values, self.analysis.groups.home, strict=True
                )
                if home is not None and v.op == -1
            }
        return self._of_group[group.index]

    def node_parts(self, group: Group, chosen: StrategySet) -> tuple[Array, Array]:
        """(compute seconds, communication seconds) per strategy."""
        compute = np.zeros(chosen.count)
        comm = np.zeros(chosen.count)
        for item in self.analysis.work[group.index]:
            parts = shards(chosen.use, item.factors, self.sizes)
            compute = compute + self.model.compute_s(
                item.flops / parts, item.nbytes / parts, item.dtype, item.matmul
            )
        for r in self.analysis.reductions[group.index]:
            local = r.nbytes / shards(chosen.use, r.kept, self.sizes)
            comm = comm + r.weight * self.all_reduce_s(chosen.use, r, local)
        if group.kind == "input" and self._stored_bytes(group):
            value = self._input_value(group)
            layout = self.analysis.groups.home[value][1]  # type: ignore[index]
            rank = len(layout)
            table = reshard_table(rank, self.sizes, self.model)
            src = codes(chosen.store, layout, frozenset(), rank)
            dst = codes(chosen.use, layout, frozenset(), rank)
            nbytes = self.analysis.graph.values[value].nbytes
            comm = comm + table.alpha_s[src, dst] + nbytes * table.beta_s_per_byte[src, dst]
            comm = comm + self.change_s * table.changes[src, dst]
        return compute, comm

    def link_ends(self, link: Link, sets: Sequence[StrategySet]) -> tuple[Any, Any]:
        """Codes of the value at both ends, per strategy."""
        groups = self.analysis.groups.groups
        rank = len(link.src)
        partial = groups[link.a].reduction if link.partial else frozenset()
        a, b = sets[link.a], sets[link.b]
        source = a.use if link.a_use or groups[link.a].kind != "input" else a.store
        target = b.use if groups[link.b].kind != "input" else b.store
        none: frozenset[int] = frozenset()
        key_a = ("codes", id(source), link.src, partial)
        key_b = ("codes", id(target), link.dst, none)
        for key, assign, layout, part in (
            (key_a, source, link.src, partial),
            (key_b, target, link.dst, none),
        ):
            if key not in self.cache:
                self.cache[key] = (codes(assign, layout, part, rank), assign)
        return self.cache[key_a][0], self.cache[key_b][0]

    def link_cost(self, link: Link, sets: Sequence[StrategySet]) -> Array:
        """[S_a, S_b] seconds (communication weight included)."""
        src, dst = self.link_ends(link, sets)
        nbytes = self.analysis.graph.values[link.value].nbytes
        rank = len(link.src)
        key = ("edge", id(src), id(dst), nbytes, link.weight, rank, link.gradient)
        if key not in self.cache:
            table = reshard_table(rank, self.sizes, self.model)
            pick = np.ix_(src, dst)
            alpha = table.combined_alpha_s if link.gradient else table.alpha_s
            seconds = alpha[pick] + nbytes * table.beta_s_per_byte[pick]
            if self.change_s:
                seconds = seconds + self.change_s * table.changes[pick]
            self.cache[key] = (self.comm * link.weight * seconds, src, dst)
        return self.cache[key][0]  # type: ignore[no-any-return]

    def flipped(self, matrix: Array) -> Array:
        """The transpose, one array object per matrix."""
        key = ("flipped", id(matrix))
        if key not in self.cache:
            self.cache[key] = (np.ascontiguousarray(matrix.T), matrix)
        return self.cache[key][0]  # type: ignore[no-any-return]

    def usage_bytes(
        self, group: Group, chosen: StrategySet, nbytes: float, layout: Layout, port: str
    ) -> Array:
        """Bytes per device under every strategy; "gathered": of a copy made for use."""
        key = ("bytes", id(chosen), nbytes, layout, port)
        if key not in self.cache:
            factors = frozenset(f for f in layout if f >= 0)
            assign = chosen.store if port == "store" else chosen.use
            local = nbytes / shards(assign, factors, self.sizes)
            if port == "gathered":
                local = np.where((chosen.store == chosen.use).all(axis=1), 0.0, local)
            self.cache[key] = (local, chosen)
        return self.cache[key][0]  # type: ignore[no-any-return]


def price(
    analysis: Analysis,
    mesh: MeshSpec,
    model: CostModel,
    limit_bytes: float,
    allowed: Mapping[int, NDArray[np.bool_]] | None = None,
    change_s: float = 0.0,
) -> Priced:
    """Build the Problem of ``analysis`` on ``mesh``.

    Args:
        analysis: the mesh-free facts.
        mesh: logical mesh; its device count is the cluster's.
        model: prices compute and collectives.
        limit_bytes: memory per device.
        allowed: per group, a mask over its full strategy set (pins and modes).
        change_s: surcharge for every change of layout along a mesh axis that is not an
            all-reduce; a large one makes any search spread the given shardings
            instead of looking for better ones.

    Returns:
        The Problem with one node per group and one edge per linked pair.
    """
    pricer = Pricer(analysis, mesh, model, change_s)
    groups = analysis.groups.groups
    masks = allowed or {}
    sets = [pricer.strategies(g, masks.get(g.index)) for g in groups]
    cost = [pricer.node_cost(g, s) for g, s in zip(groups, sets, strict=True)]
    edges: list[Edge] = []
    for link in analysis.groups.links:
        matrix = pricer.link_cost(link, sets)
        if link.a == link.b:
            cost[link.a] = cost[link.a] + np.diagonal(matrix)
        elif link.a < link.b:
            edges.append(Edge(link.a, link.b, matrix))
        else:
            edges.append(Edge(link.b, link.a, pricer.flipped(matrix)))
    usages = [
        Usage(g, start, end, pricer.usage_bytes(groups[g], sets[g], nbytes, layout, port))
        for g, start, end, nbytes, layout, port in analysis.usages
    ]
    problem = Problem(
        names=tuple(f"{g.index}:{g.name}" for g in groups),
        cost_s=tuple(cost),
        edges=tuple(edges),
        usages=tuple(usages),
        limit_bytes=limit_bytes - analysis.scalar_bytes,
        levels=tuple(s.store + 1 for s in sets),
    )
    return Priced(analysis, mesh, model, tuple(sets), problem, pricer.comm)
