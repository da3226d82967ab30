"""A quotient on many meshes at once: the family of problems that ``search.relax.family`` relaxes.

Meshes with the same number of axes share their strategies (those that any of them has, see
``joint_strategies``), the codes of their links and the transitions between those; only the tables
of ``rates`` differ. So another mesh adds array entries, not Python work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels import CostModel
from planner.cost.pricing import Priced, pool_limits
from planner.cost.rates import Rates, exposed, weighted
from planner.cost.routes import patterns
from planner.search.relax.family import Family, FamilyEdge
from planner.space.buffer import Buffer, Memory, in_pool
from planner.space.groups import GroupLink
from planner.space.strategies import IntArray, StrategySet, digits, joint_strategies
from planner.spec import MeshSpec
from planner.step.analysis import Analysis

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Frame:
    """An edge on any mesh: codes per strategy of both ends, and each link's transitions [A, B]."""

    a: int
    b: int
    code_a: IntArray
    code_b: IntArray
    pairs: tuple[tuple[GroupLink, IntArray], ...]


@dataclass(frozen=True, eq=False)
class PricedFamily:
    """A quotient priced on some meshes.

    Per group: ``sets``, the joint strategies; ``has`` [meshes, strategies], which of them a mesh
    has; ``unary`` [meshes, strategies], their costs.
    """

    analysis: Analysis
    meshes: tuple[MeshSpec, ...]
    rates: Rates
    sets: tuple[StrategySet, ...]
    has: tuple[Mask, ...]
    unary: tuple[Array, ...]
    frames: tuple[Frame, ...]

    def take(self, members: Sequence[int]) -> PricedFamily:
        """The family restricted to some of its meshes."""
        rows = np.asarray(members, np.int64)
        return PricedFamily(
            self.analysis,
            tuple(self.meshes[m] for m in members),
            self.rates.take(rows),
            self.sets,
            tuple(has[rows] for has in self.has),
            tuple(cost[rows] for cost in self.unary),
            self.frames,
        )

    def entries(self) -> int:
        """Table entries of one mesh's edges."""
        return sum(f.pairs[0][1].size for f in self.frames)

    def problems(self) -> Family:
        """The costs of nodes and edges (the edges take most of the memory)."""
        edges = []
        for frame in self.frames:
            tables = [_seconds(self.analysis, self.rates, *pair) for pair in frame.pairs]
            for table in tables[1:]:
                tables[0] += table
            edges.append(FamilyEdge(frame.a, frame.b, frame.code_a, frame.code_b, tables[0]))
        return Family(self.unary, tuple(edges))

    def peaks(self, choice: IntArray, limit_bytes: float) -> Array:
        """[meshes] bytes at the peak under choices [meshes, groups]. If a pool other than the
        device's is fuller, its share of its limit is applied to the device's limit."""
        rows = np.arange(len(self.meshes))
        limits = pool_limits(self.analysis, self.rates.model, limit_bytes)
        peaks: Array = np.zeros(len(rows))
        for pool, limit in limits.items():
            peak = self._pool_peak(in_pool(self.analysis.buffers, pool), choice)
            if pool is Memory.DEVICE:
                peaks = peak
            elif limit < math.inf and limit_bytes < math.inf:
                peaks = np.maximum(peaks, peak * (limits[Memory.DEVICE] / limit))
        return peaks + self.analysis.scalar_bytes

    def _pool_peak(self, buffers: Sequence[Buffer], choice: IntArray) -> Array:
        """[meshes] bytes at the peak of one pool."""
        rows = np.arange(len(self.meshes))
        if not buffers:
            return np.zeros(len(rows))
        known: dict[tuple[object, ...], Array] = {}
        taken = np.empty((len(buffers), len(rows)))
        for k, b in enumerate(buffers):
            key = (b.group, b.layout, b.port, b.when, b.tiled)
            if key not in known:
                share = self.rates.bytes_of(self.sets[b.group], dataclasses.replace(b, nbytes=1.0))
                known[key] = share[rows, choice[:, b.group]]
            taken[k] = b.nbytes * known[key]
        stop = max(b.end for b in buffers)
        change = np.zeros((stop + 1, len(rows)))
        np.add.at(change, [b.start for b in buffers], taken)
        np.subtract.at(change, [b.end for b in buffers], taken)
        peaks: Array = np.cumsum(change, axis=0).max(axis=0)
        return peaks

    def own(self, member: int, limit_bytes: float) -> Priced:
        """The pricing of one mesh by itself."""
        known: dict[tuple[int, bytes], StrategySet] = {}
        sets = []
        for joint, has in zip(self.sets, self.has, strict=True):
            key = (id(joint), has[member].tobytes())
            if key not in known:
                known[key] = joint.take(has[member])
            sets.append(known[key])
        return Priced(
            self.analysis, self.meshes[member], self.rates.model, tuple(sets), limit_bytes
        )

    def own_choice(self, member: int, choice: IntArray) -> tuple[int, ...]:
        """A choice [groups] as strategy numbers of the pricing that ``own`` returns."""
        return tuple(
            int(np.count_nonzero(has[member, :row]))
            for has, row in zip(self.has, choice.tolist(), strict=True)
        )


def price_family(
    analysis: Analysis,
    meshes: Sequence[MeshSpec],
    model: CostModel,
    allowed: Sequence[Mapping[int, Mask]],
) -> PricedFamily:
    """Strategies and node costs of a quotient on meshes with the same number of axes.

    Args:
        analysis: the quotient.
        meshes: the meshes.
        model: prices compute and collectives.
        allowed: per mesh and group, a mask over the mesh's own strategy set (pins).
    """
    sizes = [mesh.sizes for mesh in meshes]
    rates = Rates.of(sizes, model)
    known: dict[tuple[object, ...], tuple[StrategySet, Mask]] = {}
    sets, has, unary = [], [], []
    for g in analysis.groups.groups:
        key = (g.sizes, g.shardable, g.kind == "input", g.decisions)
        if key not in known:
            known[key] = joint_strategies(g.sizes, g.shardable, sizes, g.kind, g.decisions)
        joint, present = known[key]
        if any(g.index in masks for masks in allowed):
            present = present.copy()
            for m, masks in enumerate(allowed):
                if g.index in masks:
                    present[m, present[m]] = masks[g.index]
        cost = analysis.counts[g.index] * rates.node_s(analysis, g.index, joint)
        sets.append(joint)
        has.append(present)
        unary.append(np.where(present, cost, np.inf))
    for link, bundle in zip(analysis.groups.links, analysis.bundles, strict=True):
        if bundle < 0:
            pairs = patterns(*_ends(analysis, link, sets), len(link.src))
            unary[link.a] = unary[link.a] + _seconds(analysis, rates, link, pairs)
    return PricedFamily(
        analysis,
        tuple(meshes),
        rates,
        tuple(sets),
        tuple(has),
        tuple(unary),
        _frames(analysis, sets),
    )


def _ends(
    analysis: Analysis, link: GroupLink, sets: Sequence[StrategySet]
) -> tuple[IntArray, IntArray]:
    """Digits [strategies, axes] of the value at both ends of a link."""
    groups = analysis.groups.groups
    partial = groups[link.a].reduction if link.partial else frozenset()
    a, b = sets[link.a], sets[link.b]
    source = a.use if link.a_use or groups[link.a].kind != "input" else a.store
    target = b.use if groups[link.b].kind != "input" else b.store
    rank = len(link.src)
    return digits(source, link.src, partial, rank), digits(target, link.dst, frozenset(), rank)


def _seconds(analysis: Analysis, rates: Rates, link: GroupLink, pairs: IntArray) -> Array:
    """[meshes, ...] seconds of the transitions ``pairs`` [...] of a link's value, weighted."""
    costs = rates.costs
    alpha = costs.combined_alpha_s if link.gradient else costs.alpha_s
    share = link.weight * exposed(rates.model, link)
    seconds = alpha + link.nbytes * costs.beta_s_per_byte
    if link.share != 1.0:
        seconds = seconds * costs.shares(link.share)
    return weighted(share, seconds).take(pairs, axis=1)


def _frames(analysis: Analysis, sets: Sequence[StrategySet]) -> tuple[Frame, ...]:
    """One frame per bundle of links; strategies of an end that no link distinguishes share a
    code."""
    bundled: dict[int, list[GroupLink]] = {}
    for link, bundle in zip(analysis.groups.links, analysis.bundles, strict=True):
        if bundle >= 0:
            bundled.setdefault(bundle, []).append(link)
    frames = []
    for links in bundled.values():
        a, b = links[0].a, links[0].b
        ends = [_ends(analysis, link, sets) for link in links]
        ends = [e if x.a == a else e[::-1] for e, x in zip(ends, links, strict=True)]
        first_a, code_a = _codes([e[0] for e in ends])
        first_b, code_b = _codes([e[1] for e in ends])
        pairs = []
        for link, (left, right) in zip(links, ends, strict=True):
            left, right = left[first_a][:, None], right[first_b][None, :]
            both = (left, right) if link.a == a else (right, left)
            pairs.append((link, patterns(*both, len(link.src))))
        frames.append(Frame(a, b, code_a, code_b, tuple(pairs)))
    return tuple(frames)


def _codes(rows: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Strategies with equal digits in every link get one code: (a strategy of each, [S] codes)."""
    joined = np.concatenate(rows, axis=1)
    base = int(joined.max(initial=0)) + 1
    key = np.zeros(len(joined), np.int64)
    for k, column in enumerate(joined.T):
        if k and base**k > 2**40:
            key = np.unique(key, return_inverse=True)[1]
        key = key * base + column
    _, first, code = np.unique(key, return_index=True, return_inverse=True)
    return first, code
