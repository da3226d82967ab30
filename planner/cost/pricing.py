"""(Groups, mesh, CostModel) -> Problem: the only adapter between graph and cost model.

Seconds of a node: roofline time of the group's operations on their local shard, plus the
all-reduces of reductions inside the group, plus (inputs) the all-gather from store to
use, plus copies of state in host memory, plus the cost of feeding the batch (``feeding``).
Seconds of an edge: the resharding of the value that flows. Communication counts the share
of its time that does not hide under compute (``rates.exposed``). Equal sub-problems share
one array object, so a search can see that layers repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels import CostModel
from planner.cost.rates import Rates, exposed, weighted
from planner.cost.reshard import reshard_table
from planner.graph.ir import Phase
from planner.search.pools import side_by_side
from planner.search.problem import Edge, Problem, Usage
from planner.space.buffer import Buffer, Memory
from planner.space.groups import Group, GroupLink
from planner.space.strategies import StrategySet, codes, strategies_of
from planner.spec import MeshSpec
from planner.step.analysis import Analysis
from planner.step.classes import Quotient

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Priced:
    """The legal strategies of every group on one mesh, and the Problem of choosing among them.

    ``change_s``: surcharge in seconds for a change of layout (see ``price``); ``free``: groups of
    parameters; if there are any, their gathers and the scatters of gradients have no surcharge.
    """

    analysis: Analysis
    mesh: MeshSpec
    model: CostModel
    sets: tuple[StrategySet, ...]
    limit_bytes: float
    change_s: float = 0.0
    free: frozenset[int] = frozenset()

    @cached_property
    def problem(self) -> Problem:
        """One node per group and one edge per linked pair; built on first access."""
        return _problem(self)


def unfolded(quotient: Quotient, priced: Priced) -> Priced:
    """The pricing of the whole step that a pricing of its classes stands for."""
    sets = tuple(priced.sets[c] for c in quotient.color)
    free = frozenset(g for g, c in enumerate(quotient.color) if c in priced.free)
    return replace(priced, analysis=quotient.whole, sets=sets, free=free)


@lru_cache(maxsize=64)
def _rates(sizes: tuple[int, ...], model: CostModel) -> Rates:
    return Rates.of((sizes,), model)


class Pricer:
    """Builds the arrays of one Problem; equal inputs give the same array object."""

    def __init__(
        self,
        analysis: Analysis,
        mesh: MeshSpec,
        model: CostModel,
        change_s: float = 0.0,
        free: frozenset[int] = frozenset(),
    ) -> None:
        self.analysis, self.mesh, self.model = analysis, mesh, model
        self.change_s = change_s
        self.free = free
        self.sizes = mesh.sizes
        self.rates = _rates(mesh.sizes, model)
        self.cache: dict[Any, Any] = {}

    def strategies(self, group: Group, allowed: NDArray[np.bool_] | None) -> StrategySet:
        """The strategies of a group that pins and modes allow."""
        full = strategies_of(group, self.sizes)
        if allowed is None or allowed.all():
            return full
        key = ("set", id(full), allowed.tobytes())
        if key not in self.cache:
            self.cache[key] = full.take(allowed)
        return self.cache[key]  # type: ignore[no-any-return]

    def node_cost(self, group: Group, chosen: StrategySet) -> Array:
        """Seconds per strategy, communication weighted by what does not overlap."""
        count = self.analysis.counts[group.index]
        key = ("node", id(chosen), self.analysis.facts[group.index], count)
        if key not in self.cache:
            seconds = self.rates.node_s(self.analysis, group.index, chosen, self.change_s)
            self.cache[key] = (count * seconds[0], chosen)
        return self.cache[key][0]  # type: ignore[no-any-return]

    def parts_of(self, group: Group, chosen: StrategySet, row: int) -> tuple[float, ...]:
        """``Rates.node_parts`` of one strategy."""
        key = ("parts", id(chosen), row, self.analysis.facts[group.index])
        if key not in self.cache:
            one = chosen.take(slice(row, row + 1))
            parts = self.rates.node_parts(self.analysis, group.index, one, self.change_s)
            self.cache[key] = (*(float(part[0, 0]) for part in parts), chosen)
        return self.cache[key][:-1]  # type: ignore[no-any-return]

    def decided_s(self, group: Group, chosen: StrategySet, row: int) -> dict[str, float]:
        """Seconds of the other decisions for a group, by decision, under one strategy."""
        if not self.analysis.facts[group.index].decided:
            return {}
        one = chosen.take(slice(row, row + 1))
        by_decision = self.rates.decided_s(self.analysis.facts[group.index], one)
        return {name: float(seconds[0, 0]) for name, seconds in by_decision.items()}

    def feed_of(self, group: Group, chosen: StrategySet, row: int) -> float:
        """Seconds that feeding the batch counts for under one strategy."""
        if not self.analysis.facts[group.index].fed:
            return 0.0
        one = chosen.take(slice(row, row + 1))
        return float(self.rates.feed_s(self.analysis, group.index, one)[0, 0])

    def link_ends(self, link: GroupLink, sets: Sequence[StrategySet]) -> tuple[Any, Any]:
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

    def is_free(self, link: GroupLink) -> bool:
        """Whether ZeRO-3 requires this change of layout: a parameter is gathered for its use, or a
        gradient is scattered for its update."""
        if not self.free:
            return False
        ops = self.analysis.graph.ops
        updates = link.op < 0 or ops[link.op].phase is Phase.UPDATE
        return link.gradient or (link.a in self.free and not updates)

    def link_cost(self, link: GroupLink, sets: Sequence[StrategySet]) -> Array:
        """[S_a, S_b] seconds (communication weight included)."""
        src, dst = self.link_ends(link, sets)
        nbytes, rank = link.nbytes, len(link.src)
        change_s = 0.0 if self.is_free(link) else self.change_s
        paths = (link.gradient, link.off_path, link.share)
        key = ("edge", id(src), id(dst), nbytes, link.weight, rank, *paths, change_s)
        if key not in self.cache:
            table = reshard_table(rank, self.sizes, self.model)
            pick = np.ix_(src, dst)
            alpha = table.combined_alpha_s if link.gradient else table.alpha_s
            seconds = alpha[pick] + nbytes * table.beta_s_per_byte[pick]
            if link.share != 1.0:
                seconds = np.where(table.sums[pick], link.share, 1.0) * seconds
            if change_s:
                seconds = seconds + change_s * table.changes[pick]
            share = exposed(self.model, link) * link.weight
            self.cache[key] = (weighted(share, seconds), src, dst)
        return self.cache[key][0]  # type: ignore[no-any-return]

    def flipped(self, matrix: Array) -> Array:
        """The transpose, one array object per matrix."""
        key = ("flipped", id(matrix))
        if key not in self.cache:
            self.cache[key] = (np.ascontiguousarray(matrix.T), matrix)
        return self.cache[key][0]  # type: ignore[no-any-return]

    def total(self, parts: Sequence[Array]) -> Array:
        """The sum of matrices; equal sums are one array object."""
        if len(parts) == 1:
            return parts[0]
        key = ("total", *sorted(map(id, parts)))
        if key not in self.cache:
            self.cache[key] = (np.sum(parts, axis=0), parts)
        return self.cache[key][0]  # type: ignore[no-any-return]

    def buffer_bytes(self, chosen: StrategySet, buffer: Buffer) -> Array:
        """Bytes per device under every strategy of its group."""
        lies = (buffer.layout, buffer.port, buffer.when, buffer.tiled)
        key = ("bytes", id(chosen), buffer.nbytes, *lies)
        if key not in self.cache:
            local = self.rates.bytes_of(chosen, buffer)[0]
            self.cache[key] = (local, chosen)
        return self.cache[key][0]  # type: ignore[no-any-return]


def pool_limits(analysis: Analysis, model: CostModel, limit_bytes: float) -> dict[Memory, float]:
    """Bytes per device that each pool of memory has for arrays that are not scalars."""
    return {
        Memory.DEVICE: max(limit_bytes - analysis.scalar_bytes, 0.0),
        Memory.HOST: model.host_memory_limit_bytes,
    }


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
            all-reduce; a large one makes any search propagate the given shardings
            instead of looking for better ones.

    Returns:
        The strategies; its ``problem`` has their costs.
    """
    pricer = Pricer(analysis, mesh, model)
    masks = allowed or {}
    sets = tuple(pricer.strategies(g, masks.get(g.index)) for g in analysis.groups.groups)
    return Priced(analysis, mesh, model, sets, limit_bytes, change_s)


def _problem(priced: Priced) -> Problem:
    """The Problem of ``priced``."""
    analysis, sets = priced.analysis, priced.sets
    pricer = Pricer(analysis, priced.mesh, priced.model, priced.change_s, priced.free)
    groups = analysis.groups.groups
    cost = [pricer.node_cost(g, s) for g, s in zip(groups, sets, strict=True)]
    bundled: dict[int, list[Array]] = {}
    ends: dict[int, tuple[int, int]] = {}
    for link, bundle in zip(analysis.groups.links, analysis.bundles, strict=True):
        matrix = pricer.link_cost(link, sets)
        if link.a == link.b:
            cost[link.a] = cost[link.a] + np.diagonal(matrix)
            continue
        ends[bundle] = (min(link.a, link.b), max(link.a, link.b))
        bundled.setdefault(bundle, []).append(matrix if link.a < link.b else pricer.flipped(matrix))
    limits = pool_limits(analysis, priced.model, priced.limit_bytes)
    number = {pool: k for k, pool in enumerate(limits)}
    usages, limit_bytes, pools = side_by_side(
        [
            Usage(b.group, b.start, b.end, pricer.buffer_bytes(sets[b.group], b), number[b.pool])
            for b in analysis.buffers
        ],
        [(str(pool), limit) for pool, limit in limits.items()],
    )
    folded = any(n > 1 for n in analysis.counts)
    return Problem(
        names=tuple(
            f"{g.index}:{g.name}" + (f" x{n}" if n > 1 else "")
            for g, n in zip(groups, analysis.counts, strict=True)
        ),
        cost_s=tuple(cost),
        edges=tuple(Edge(*ends[k], pricer.total(parts)) for k, parts in bundled.items()),
        usages=usages,
        limit_bytes=limit_bytes,
        levels=tuple(s.store + 1 for s in sets),
        counts=analysis.counts if folded else None,
        pools=pools,
    )
