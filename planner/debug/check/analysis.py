"""Checks of the facts of groups and of the buffers of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable

from planner.debug.check.layouts import Layouts, demand, within
from planner.graph.ir import Graph
from planner.space.buffer import Buffer, Port
from planner.space.decisions import DECISIONS
from planner.space.decisions.host_memory import OFFLOAD, Hosted
from planner.space.groups import Group
from planner.step.analysis import Analysis
from planner.step.facts import Facts


def check_analysis(analysis: Analysis) -> None:
    """Demand the invariants of an analysis of a whole step.

    Raises:
        InternalError: the group, buffer, link or value at fault.
    """
    graph, groups = analysis.graph, analysis.groups
    check_facts(analysis)
    demand(all(n == 1 for n in analysis.counts), "counts", "a whole step stands for itself alone")
    seen = -1
    for link, bundle in zip(groups.links, analysis.bundles, strict=True):
        where = f"edge of the link of %{link.value}"
        demand(0 <= bundle <= seen + 1, where, f"number {bundle} after {seen}")
        seen = max(seen, bundle)
    layouts = Layouts(groups.groups)
    for buffer in analysis.buffers:
        check_buffer(buffer, graph, layouts, len(graph.ops) + 1)
    _written(analysis)


def check_facts(analysis: Analysis) -> None:
    """Demand one record of facts per group that agrees with it, and an edge for every link."""
    groups = analysis.groups
    count = len(groups.groups)
    demand(len(analysis.facts) == count, "facts", f"{len(analysis.facts)} for {count} groups")
    demand(len(analysis.counts) == count, "counts", f"{len(analysis.counts)} for {count} groups")
    demand(
        len(analysis.bundles) == len(groups.links),
        "edges",
        f"{len(analysis.bundles)} for {len(groups.links)} links",
    )
    done: set[tuple[int, int]] = set()
    for group, facts in zip(groups.groups, analysis.facts, strict=True):
        _agree(f"facts of group {group.index} {group.name}", group, facts)
        key = id(facts), len(group.sizes)
        if key not in done:
            _inside(f"facts of group {group.index} {group.name}", facts)
            done.add(key)


def check_buffer(buffer: Buffer, graph: Graph, layouts: Layouts, end: int) -> None:
    """Demand that a buffer lives within the moments [0, end), with a layout of its group."""
    where = f"buffer of %{buffer.value} in group {buffer.group}"
    demand(
        0 <= buffer.start < buffer.end <= end,
        where,
        f"there in [{buffer.start}, {buffer.end}) of [0, {end})",
    )
    demand(_is_count(buffer.nbytes), where, f"takes {buffer.nbytes} bytes")
    within(where, "group", (buffer.group,), len(layouts.groups))
    demand(
        buffer.port in (Port.USE, Port.COPY) or layouts.groups[buffer.group].kind == "input",
        where,
        f"laid out by the {buffer.port} of a group that is no input",
    )
    if buffer.value >= 0:
        within(where, "value", (buffer.value,), len(graph.values))
        layouts.fits(where, buffer.group, buffer.layout, graph.values[buffer.value].shape)
        return
    split = [f for f in buffer.layout if f >= 0]
    within(where, "factor", split, len(layouts.groups[buffer.group].sizes))


def _agree(where: str, group: Group, facts: Facts) -> None:
    """Demand that facts agree with the fields of their group."""
    for name in ("kind", "sizes", "shardable", "reduction", "decisions"):
        stated, expected = getattr(facts, name), getattr(group, name)
        demand(stated == expected, where, f"{name} is {stated}, the group has {expected}")


def _inside(where: str, facts: Facts) -> None:
    """Demand that facts name only factors of the group, and that counts are finite."""
    count = len(facts.sizes)
    for k, work in enumerate(facts.work):
        part = f"{where}, work {k}"
        used = [f for factors in work.classes for f in factors]
        within(part, "factor", used, count)
        demand(len(used) == len(set(used)), part, "its classes of factors overlap")
        known = [c for _, classes in work.traffic for c in classes]
        within(part, "class", (*known, *work.result), len(work.classes))
        demand(len(work.most) in (0, len(work.classes)), part, "pieces of some classes alone")
        counts = (work.flops, work.kernels, work.result_bytes, *(n for n, _ in work.traffic))
        demand(all(map(_is_count, counts)), part, f"{counts} are no counts")
    for reduction in facts.reductions:
        part = f"{where}, reduction of operation {reduction.op}"
        within(part, "factor", reduction.over | reduction.kept, count)
        demand(bool(reduction.over), part, "sums over nothing")
        demand(not reduction.over & reduction.kept, part, "keeps a factor that it sums over")
        demand(_is_count(reduction.nbytes), part, f"{reduction.nbytes} bytes")
    if facts.stored is not None:
        _factors(f"{where}, stored array", (f for f in facts.stored[1] if f >= 0), count)
    for name, decision_facts in facts.decided:
        demand(name in DECISIONS, where, f"facts of {name!r}, which is no decision")
        for one in decision_facts if isinstance(decision_facts, tuple) else ():
            if isinstance(one, Hosted):
                _factors(f"{where}, array on the host", one.factors, count)
    for fed in facts.fed:
        _factors(f"{where}, array that is fed", fed.factors, count)
        demand(0 < fed.share <= 1, f"{where}, array that is fed", f"a share of {fed.share}")


def _factors(where: str, factors: Iterable[int], count: int) -> None:
    within(where, "factor", factors, count)


def _is_count(number: float) -> bool:
    return number >= 0 and math.isfinite(number)


def _written(analysis: Analysis) -> None:
    """Demand that readers of written values exist (the number after the last operation is the
    caller), and that data per input or per value have the right length."""
    graph, scheduled = analysis.graph, analysis.scheduled
    for what, got, expected in (
        ("readers", len(analysis.reads), len(graph.values)),
        ("donated inputs", len(scheduled.donated), len(graph.inputs)),
        ("values inside kernels", len(scheduled.inside), len(graph.values)),
    ):
        demand(got == expected, what, f"{got} entries, expected {expected}")
    for value, readers in enumerate(analysis.reads):
        within(f"readers of %{value}", "operation", readers, len(graph.ops) + 1)
    for name, values in scheduled.chosen.items():
        demand(name in DECISIONS, "decisions", f"{name!r} is none")
        within(f"values with a choice of {name}", "value", values, len(graph.values))
    stray = scheduled.chosen.get(OFFLOAD, frozenset()) - set(graph.inputs)
    demand(not stray, "arrays that may be on the host", f"{sorted(stray)} are no inputs")
