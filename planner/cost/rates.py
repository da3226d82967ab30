"""Costs of strategies on several meshes at once: tables by *mask*, the set of mesh axes in use.

The number of pieces into which a strategy cuts an array, and the axes over which it communicates,
depend on the strategy only through a set of mesh axes, written as a bit mask. So seconds are
computed once per mask (8 masks on three axes) and looked up per strategy. Arrays with a leading
dimension [meshes] are for meshes with the same number of axes; strategies that a mesh lacks are
priced, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from costmodels import CostModel
from costmodels.collectives import Collective
from costmodels.schedule import Overlap, Place
from planner.cost.reshard import Transitions, coefficients, transition_costs
from planner.cost.routes import patterns
from planner.space.buffer import Buffer, Port, Tiled
from planner.space.decisions import DECISIONS
from planner.space.factors import Layout
from planner.space.groups import GroupLink
from planner.space.strategies import IntArray, StrategySet, digits
from planner.step.analysis import Analysis, ideal_s
from planner.step.facts import Facts, Reduction, Said
from planner.step.feeding import SHARE
from planner.step.kernels.costs import Work
from planner.step.memory.tiles import paddings

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Rates:
    """Tables for meshes of ``num_axes`` axes.

    Attributes:
        size: [meshes, masks] devices along the axes of a mask.
        alpha_s, beta_s_per_byte: [meshes, masks] of an all-reduce along the axes of a mask.
        shift: the same two tables for a permutation.
        costs: see ``Transitions``.
        meshes: the axis sizes of each mesh.
    """

    model: CostModel
    num_axes: int
    size: Array
    alpha_s: Array
    beta_s_per_byte: Array
    shift: tuple[Array, Array]
    costs: Transitions
    meshes: tuple[tuple[int, ...], ...] = ()
    splits: dict[tuple[int, tuple[int, ...]], Array] = field(default_factory=dict)
    paddings: dict[tuple[int, Layout, Tiled], tuple[Array, IntArray]] = field(default_factory=dict)

    @staticmethod
    def of(meshes: Sequence[tuple[int, ...]], model: CostModel) -> Rates:
        """The tables of meshes with the same number of axes."""
        n = len(meshes[0])
        size = np.ones((len(meshes), 1 << n))
        for mask in range(1, 1 << n):
            axes = [k for k in range(n) if mask >> k & 1]
            size[:, mask] = [math.prod(sizes[k] for k in axes) for sizes in meshes]

        def table(kind: Collective) -> tuple[Array, Array]:
            pairs = [coefficients(kind, sizes, model) for sizes in meshes]
            alpha, beta = (np.stack(column) for column in zip(*pairs, strict=True))
            return alpha, beta

        costs = transition_costs(meshes, model)
        return Rates(model, n, size, *table("all_reduce"), table("permute"), costs, tuple(meshes))

    def take(self, rows: IntArray) -> Rates:
        """The tables of some of the meshes."""
        costs = self.costs
        transitions = Transitions(
            costs.alpha_s[rows],
            costs.combined_alpha_s[rows],
            costs.beta_s_per_byte[rows],
            costs.changes,
            costs.sums,
        )
        return dataclasses.replace(
            self,
            size=self.size[rows],
            alpha_s=self.alpha_s[rows],
            beta_s_per_byte=self.beta_s_per_byte[rows],
            shift=(self.shift[0][rows], self.shift[1][rows]),
            costs=transitions,
            meshes=tuple(self.meshes[int(k)] for k in np.arange(len(self.meshes))[rows]),
            splits={},
            paddings={},
        )

    def masks(self, assign: IntArray, factors: frozenset[int]) -> IntArray:
        """[strategies] the axes that split any of ``factors``."""
        hit = np.zeros(int(assign.max(initial=-1)) + 2, np.int64)
        for f in factors:
            if f + 1 < hit.size:
                hit[f + 1] = 1
        axis_masks: IntArray = hit[assign + 1] @ (1 << np.arange(self.num_axes))
        return axis_masks

    def codes(self, assign: IntArray, classes: Sequence[frozenset[int]]) -> IntArray:
        """[strategies] the class of factors that every axis splits, as one code (see ``split``)."""
        digit = np.zeros(int(assign.max(initial=-1)) + 2, np.int64)
        for c, factors in enumerate(classes):
            for f in factors:
                if f + 1 < digit.size:
                    digit[f + 1] = c + 1
        class_codes: IntArray = digit[assign + 1] @ (len(classes) + 1) ** np.arange(self.num_axes)
        return class_codes

    def split(self, classes: int, which: tuple[int, ...]) -> Array:
        """[meshes, codes] the number of pieces of the classes ``which``, out of ``classes``."""
        known = self.splits.get((classes, which))
        if known is None:
            base, n = classes + 1, self.num_axes
            code = np.arange(base**n)[:, None] // base ** np.arange(n) % base
            hit = np.isin(code, [c + 1 for c in which])
            known = self.splits[classes, which] = self.size[:, hit @ (1 << np.arange(n))]
        return known

    def compute_s(self, item: Work, assign: IntArray) -> Array:
        """[meshes, strategies] seconds of a device's share of the work, with kernel launches."""
        count = len(item.classes)

        def pieces(which: tuple[int, ...]) -> Array:
            if not item.most:
                return self.split(count, which)
            cut: Array = np.ones(1)
            for c in which:
                cut = cut * np.minimum(self.split(count, (c,)), item.most[c])
            return cut

        seconds = item.kernels * self.model.op_overhead_s + item.seconds(self.model, pieces)
        return seconds[:, self.codes(assign, item.classes)]

    def reduction_s(self, r: Reduction, assign: IntArray) -> Array:
        """[meshes, strategies] seconds of the collectives of a reduction inside a group."""
        over, split_axes = self.masks(assign, r.over), self.masks(assign, r.kept)
        tables = self.shift if r.shifts else (self.alpha_s, self.beta_s_per_byte)
        alpha, beta = (table[:, over] for table in tables)
        latency = self.model.combined_latency if r.gradient else 1.0
        local = r.nbytes / self.size[:, split_axes]
        return r.weight * np.where(over > 0, latency * alpha + beta * local, 0.0)

    def said_s(self, collective: Said) -> Array:
        """[meshes] seconds of a collective that the user wrote; 0 on a mesh without its axes."""
        seconds = np.zeros(len(self.meshes))
        for k, sizes in enumerate(self.meshes):
            if max(collective.axes) < len(sizes):
                alpha, beta = self.model.collective_coefficients(
                    collective.kind, sizes, collective.axes
                )
                seconds[k] = collective.weight * (alpha + beta * collective.nbytes)
        return seconds

    def gather_s(
        self, nbytes: float, layout: tuple[int, ...], chosen: StrategySet, change_s: float
    ) -> Array:
        """[meshes, strategies] seconds to reshard an input from its stored to its used layout."""
        rank = len(layout)
        src = digits(chosen.store, layout, frozenset(), rank)
        dst = digits(chosen.use, layout, frozenset(), rank)
        pairs = patterns(src, dst, rank)
        costs = self.costs
        seconds = costs.combined_alpha_s[:, pairs] + nbytes * costs.beta_s_per_byte[:, pairs]
        return seconds + change_s * costs.changes[pairs] if change_s else seconds

    def node_parts(
        self, analysis: Analysis, group: int, chosen: StrategySet, change_s: float = 0.0
    ) -> tuple[Array, Array, Array, Array]:
        """Seconds of a group: compute, then communication by `Place`; each [meshes, strategies]."""
        shape = (len(self.size), chosen.count)
        compute, waited, ahead, behind = (np.zeros(shape) for _ in range(4))
        for item in analysis.facts[group].work:
            compute += self.compute_s(item, chosen.use)
        for r in analysis.facts[group].reductions:
            part = behind if r.gradient else waited
            part += self.reduction_s(r, chosen.use)
        for collective in analysis.facts[group].said:
            waited += self.said_s(collective)[:, None]
        stored = analysis.facts[group].stored
        if stored is not None:
            ahead += self.gather_s(*stored, chosen, change_s)
        return compute, waited, ahead, behind

    def node_s(
        self, analysis: Analysis, group: int, chosen: StrategySet, change_s: float = 0.0
    ) -> Array:
        """[meshes, strategies] seconds of a group, without the communication that hides."""
        compute, *communication = self.node_parts(analysis, group, chosen, change_s)
        seconds = Overlap.of(self.model).linear_s(compute, communication)
        if analysis.facts[group].fed:
            seconds += self.feed_s(analysis, group, chosen)
        for more in self.decided_s(analysis.facts[group], chosen).values():
            seconds += more
        return seconds

    def feed_s(self, analysis: Analysis, group: int, chosen: StrategySet) -> Array:
        """[meshes, strategies] seconds charged for feeding a group's share of the batch."""
        share, copied_s = (np.zeros((len(self.size), chosen.count)) for _ in range(2))
        link = self.model.host_s_per_byte
        link = link if math.isfinite(link) else 0.0
        for array in analysis.facts[group].fed:
            pieces = self.size[:, self.masks(chosen.store, array.factors)]
            share += array.share / pieces
            copied_s += link * array.nbytes / pieces
        ideal = ideal_s(analysis, self.model, int(self.size[0, -1]))
        return share * (SHARE * ideal) + np.maximum(copied_s - ideal, 0.0)

    def decided_s(self, facts: Facts, chosen: StrategySet) -> dict[str, Array]:
        """[meshes, strategies] seconds of a group's other decisions, by decision."""
        prices = _StrategyPrices(self, chosen)
        return {
            name: DECISIONS[name].seconds(decision_facts, chosen.option(name), prices)
            for name, decision_facts in facts.decided
        }

    def bytes_of(self, chosen: StrategySet, buffer: Buffer) -> Array:
        """[meshes, strategies] bytes per device of a buffer under its group's strategies."""
        assign = chosen.store if buffer.port is Port.STORE else chosen.use
        factors = frozenset(f for f in buffer.layout if f >= 0)
        pieces = self.size[:, self.masks(assign, factors)]
        local = buffer.nbytes / pieces
        if buffer.tiled is not None:
            local = local * self._padding(assign, buffer.layout, buffer.tiled)
        if buffer.port is Port.GATHERED:
            local = np.where((chosen.store == chosen.use).all(axis=1), 0.0, local)
        if buffer.port is Port.COPY:
            local = np.where(pieces == self.size[:, -1:], 0.0, local)
        if buffer.when is not None:
            taken = chosen.option(buffer.when.decision) == buffer.when.option
            local = np.where(taken, local, 0.0)
        return local

    def _padding(self, assign: IntArray, layout: Layout, tiled: Tiled) -> Array:
        """[meshes, strategies] ratio of bytes of shards in memory to those of their elements."""
        key = (id(assign), layout, tiled)
        known = self.paddings.get(key)
        if known is None:
            pieces = [
                self.size[:, self.masks(assign, frozenset({f} - {-1}))].astype(np.int64)
                for f in layout
            ]
            padding = paddings(
                [-(-n // p) for n, p in zip(tiled.shape, pieces, strict=True)], tiled
            )
            known = self.paddings[key] = (padding, assign)
        return known[0]


@dataclass(frozen=True)
class _StrategyPrices:
    """The prices that decisions use (implements ``space.decisions.base.Prices``)."""

    rates: Rates
    chosen: StrategySet

    def local_bytes(self, nbytes: float, factors: frozenset[int], stored: bool) -> Array:
        """See ``Prices``."""
        assign = self.chosen.store if stored else self.chosen.use
        return nbytes / self.rates.size[:, self.rates.masks(assign, factors)]

    def host_copy_s(self, nbytes: Array, ahead: bool) -> Array:
        """See ``Prices``."""
        model = self.rates.model
        share = Overlap.of(model).exposed(Place.AHEAD) if ahead else 1.0
        return share * (model.host_latency_s + model.host_s_per_byte * nbytes)


def weighted(share: float, seconds: Array) -> Array:
    """``share * seconds``, but infinite seconds stay infinite (impossible) if the share is 0."""
    return share * seconds if share else np.where(np.isinf(seconds), seconds, 0.0)


def place_of(link: GroupLink) -> Place:
    """The place in a step of a link's collectives. Updated inputs are read by the next step."""
    if link.gradient:
        return Place.BEHIND
    return Place.AHEAD if link.off_path else Place.WAITED


def exposed(model: CostModel, link: GroupLink) -> float:
    """Share of a link's communication that does not hide under compute."""
    return Overlap.of(model).exposed(place_of(link))
