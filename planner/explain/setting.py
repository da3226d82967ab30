"""A plan as decisions for "what if" questions. Equal decisions are merged if the plan treats them
alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.choose.attempts import SPREAD
from planner.cost.pricing import Priced
from planner.graph.ir import Role
from planner.plan.extract import Extraction
from planner.planning import Planned
from planner.report.fold import common_path, pattern
from planner.report.units import array_text, sharding_text
from planner.search.local.memory import MemoryTimeline
from planner.search.problem import Problem, evaluate
from planner.space.factors import Layout
from planner.spec import Sharding
from planner.step.analysis import ideal_s


@dataclass(frozen=True, eq=False)
class PlanSetting:
    """A planned step.

    Attributes:
        plan: the decisions of the whole step.
        priced: the pricing of the decisions in ``choice``: one per class of equal decisions, or all
            of them if the plan treats members of a class differently.
        choice: the plan's strategy for each decision.
        node: per group of the whole step, its decision.
        spread_s: surcharge for a change of layout if the search only completes given shardings;
            else 0.
    """

    plan: Extraction
    priced: Priced
    choice: tuple[int, ...]
    node: tuple[int, ...]
    spread_s: float

    @cached_property
    def problem(self) -> Problem:
        """The costs of the decisions."""
        return self.priced.problem

    @cached_property
    def searched(self) -> Problem:
        """The problem that a search solves to complete a choice."""
        if not self.spread_s:
            return self.problem
        return dataclasses.replace(self.priced, change_s=self.spread_s).problem

    @cached_property
    def timeline(self) -> MemoryTimeline:
        """Memory over time."""
        return MemoryTimeline(self.problem)

    @cached_property
    def base(self) -> tuple[float, float]:
        """Seconds and peak bytes of the plan."""
        cost, peak, _ = evaluate(self.problem, self.choice)
        return cost, peak

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Per decision, the groups of the whole step that it stands for."""
        out: list[list[int]] = [[] for _ in self.choice]
        for group, node in enumerate(self.node):
            out[node].append(group)
        return tuple(map(tuple, out))

    @cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        """Per group of the whole step, the values that it decides."""
        analysis = self.plan.priced.analysis
        out: list[list[int]] = [[] for _ in analysis.groups.groups]
        for value, home in enumerate(analysis.groups.home):
            if home is not None:
                out[home[0]].append(value)
        return tuple(map(tuple, out))

    @cached_property
    def copies(self) -> dict[int, tuple[int, Layout]]:
        """Per copy group (of a value that several operations read), that value and its layout."""
        groups = self.plan.priced.analysis.groups
        return {
            link.b: (link.value, link.dst)
            for link in groups.links
            if groups.groups[link.b].kind == "copy"
        }

    def foremost(self, node: int) -> int | None:
        """The value that a decision is named after: a parameter, else another argument, else the
        largest."""
        values, graph = self.made[self.members[node][0]], self.plan.graph

        def weight(value: int) -> tuple[bool, bool, int, int]:
            array = graph.values[value]
            state = array.role is Role.MOMENT
            return value not in self.inputs, state, -array.nbytes, value

        return min(values, key=weight, default=None)

    @cached_property
    def inputs(self) -> frozenset[int]:
        """The values that are arguments."""
        return frozenset(self.plan.graph.inputs)

    def name(self, node: int, value: int | None = None) -> str:
        """The name of a decision, after one of its values; equal decisions share one name."""
        value, members = self.foremost(node) if value is None else value, self.members[node]
        graph, groups = self.plan.graph, self.plan.priced.analysis.groups.groups
        if value is None:
            if members[0] in self.copies:
                return f"{value_text(self.plan, self.copies[members[0]][0])} where it is read"
            group = groups[members[0]]
            return op_text(self.plan, group.ops[0]) if group.ops else group.name
        if value not in self.inputs:
            return value_text(self.plan, value)
        values = [v for g in members for v in self.made[g] if v in self.inputs]
        value_path, paths = graph.values[value].name, [graph.values[v].name for v in values]
        return common_path([path for path in paths if pattern(path) == pattern(value_path)])

    def spec(self, node: int, strategy: int) -> str:
        """The sharding of a decision under a strategy, as text."""
        value, first = self.foremost(node), self.members[node][0]
        groups = self.plan.priced.analysis.groups
        home = self.copies.get(first) if value is None else groups.home[value]
        if home is not None:
            stored, used = shardings(self, node, strategy, home[1])
            return sharding_text(stored, used)
        row = self.priced.sets[node].use[strategy].tolist()
        ops = groups.groups[first].ops
        entry = groups.op_layouts[ops[0]] if ops else None
        sharding = row_sharding(self, row, entry[2][0] if entry is not None and entry[2] else ())
        mesh = self.priced.mesh
        summed = [
            name
            for name, size, factor in zip(mesh.names, mesh.sizes, row, strict=True)
            if size > 1 and factor in groups.groups[first].reduction
        ]
        return f"{sharding} summed over {','.join(summed)}" if summed else str(sharding)


def op_text(plan: Extraction, op: int) -> str:
    """``dot_general (model.py:9)``."""
    operation = plan.graph.ops[op]
    return f"{operation.kind} ({operation.source})" if operation.source else operation.kind


def value_text(plan: Extraction, value: int) -> str:
    """``tanh f32[64,512] (model.py:9)``, or the path of an argument."""
    array = plan.graph.values[value]
    if array.op < 0:
        return array.name or f"%{value}"
    op = plan.graph.ops[array.op]
    where = f" ({op.source})" if op.source else ""
    return f"{op.kind} {array_text(array.shape, array.dtype)}{where}"


def row_sharding(setting: PlanSetting, row: Sequence[int], layout: Sequence[int]) -> Sharding:
    """Sharding of a value with ``layout`` when mesh axis k splits factor ``row[k]``; axes of one
    device split nothing."""
    mesh = setting.priced.mesh
    named = list(zip(mesh.names, mesh.sizes, row, strict=True))
    return Sharding(
        tuple(
            tuple(name for name, size, f in named if size > 1 and f >= 0 and f == factor)
            for factor in layout
        )
    )


def shardings(
    setting: PlanSetting, node: int, strategy: int, layout: Sequence[int]
) -> tuple[Sharding, Sharding]:
    """How a value of a decision is stored and used under a strategy."""
    chosen = setting.priced.sets[node]
    return (
        row_sharding(setting, chosen.store[strategy].tolist(), layout),
        row_sharding(setting, chosen.use[strategy].tolist(), layout),
    )


def setting_of(planned: Planned) -> PlanSetting:
    """The decisions of a plan."""
    quotient, whole = planned.quotient, planned.extraction.priced
    choice = tuple(planned.extraction.choice)
    part, node = quotient.part, quotient.color
    if quotient.apart(choice):
        part, node = quotient.whole, tuple(range(len(choice)))
    first = [int(k) for k in np.unique(np.asarray(node, np.int64), return_index=True)[1]]
    priced = dataclasses.replace(whole, analysis=part, sets=tuple(whole.sets[g] for g in first))
    spread = 0.0
    if planned.request.spreads:
        spread = SPREAD * ideal_s(part, whole.model, 1) + 1e-9
    return PlanSetting(
        planned.extraction, priced, tuple(choice[g] for g in first), tuple(node), spread
    )
