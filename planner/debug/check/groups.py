"""Checks of the groups: factors, homes of values, layouts of operations, and links."""

from __future__ import annotations

import math

from planner.debug.check.layouts import Layouts, demand, within
from planner.graph.ir import SCALAR, Graph
from planner.space.groups import Group, GroupLink, Groups

KINDS = frozenset({"fused", "anchor", "input", "copy", "edge"})


def check_groups(groups: Groups, graph: Graph) -> None:
    """Demand the invariants of the groups of a graph.

    Raises:
        InternalError: the group, link, value or operation at fault.
    """
    for position, group in enumerate(groups.groups):
        check_group(group, position, len(graph.ops))
    layouts = Layouts(groups.groups)
    _homes(groups, graph, layouts)
    _operations(groups, graph, layouts)
    for link in groups.links:
        check_link(link, groups.groups, graph, layouts)
        _ends(link, groups, graph)


def check_group(group: Group, position: int, num_ops: int) -> None:
    """Demand that the factors of one group are sound."""
    where, count = f"group {group.index} {group.name}", len(group.sizes)
    demand(group.index == position, where, f"stands at {position}")
    demand(group.kind in KINDS, where, f"is a group of kind {group.kind}")
    demand(len(group.shardable) == count, where, f"{count} factors, {len(group.shardable)} marked")
    within(where, "sums over factor", group.reduction, count)
    within(where, "operation", group.ops, num_ops)
    for f, (size, able) in enumerate(zip(group.sizes, group.shardable, strict=True)):
        demand(size >= (2 if able else 1), where, f"factor {f} has size {size}")


def check_link(link: GroupLink, groups: tuple[Group, ...], graph: Graph, layouts: Layouts) -> None:
    """Demand that the ends of a link exist and its layouts have the shape of the value."""
    where = link_place(link)
    within(where, "value", (link.value,), len(graph.values))
    within(where, "group", (link.a, link.b), len(groups))
    shape = graph.values[link.value].shape
    layouts.fits(f"{where}, source", link.a, link.src, shape)
    layouts.fits(f"{where}, target", link.b, link.dst, shape)
    demand(link.weight >= 0 and math.isfinite(link.weight), where, f"flows {link.weight} times")
    demand(not link.partial or groups[link.a].kind == "anchor", where, "sums, but not of an anchor")
    demand(not link.gradient or link.partial, where, "a gradient without partial sums")
    demand(not link.a_use or groups[link.a].kind == "input", where, "the use of no input")


def link_place(link: GroupLink) -> str:
    """A text that identifies a link."""
    return f"link of %{link.value} from group {link.a} to group {link.b}"


def _homes(groups: Groups, graph: Graph, layouts: Layouts) -> None:
    """Demand that every value that can be split has a home of its shape, if its operation is
    live."""
    live = graph.live_ops()
    demand(
        len(groups.home) == len(graph.values),
        "homes",
        f"{len(groups.home)} for {len(graph.values)} values",
    )
    for value, home in zip(graph.values, groups.home, strict=True):
        where = f"home of %{value.index} {value}"
        if home is not None:
            layouts.fits(where, *home, value.shape, exact=True)
        elif value.splits:
            demand(value.op >= 0 and not live[value.op], where, "none, though it can be split")


def _operations(groups: Groups, graph: Graph, layouts: Layouts) -> None:
    """Demand that operations are in the group that lays out their operands and results."""
    demand(
        len(groups.op_layouts) == len(groups.fusable) == len(graph.ops),
        "layouts of operations",
        f"{len(groups.op_layouts)} for {len(graph.ops)} operations",
    )
    owner: dict[int, int] = {}
    for holder in groups.groups:
        for at in holder.ops:
            demand(
                at not in owner, f"operation {at}", f"in groups {owner.get(at)} and {holder.index}"
            )
            owner[at] = holder.index
    for op, entry in zip(graph.ops, groups.op_layouts, strict=True):
        where = f"operation {op.index} {op.kind}"
        if entry is None:
            demand(op.index not in owner, where, f"in group {owner.get(op.index)} without a layout")
            continue
        group, ins, outs = entry
        demand(
            owner.get(op.index) == group,
            where,
            f"laid out by group {group}, stands in {owner.get(op.index)}",
        )
        for side, values, sides in (("operand", op.inputs, ins), ("result", op.outputs, outs)):
            demand(len(values) == len(sides), where, f"{len(sides)} layouts of {side}s")
            for k, (v, layout) in enumerate(zip(values, sides, strict=True)):
                if v != SCALAR:
                    layouts.fits(f"{where}, {side} {k}", group, layout, graph.values[v].shape)


def _ends(link: GroupLink, groups: Groups, graph: Graph) -> None:
    """Demand that a link's value flows through its operation and operand."""
    where = link_place(link)
    demand((link.a, link.src) != (link.b, link.dst), where, "leads nowhere")
    if link.operand == -1:
        demand(
            link.value in graph.next_values.values(), where, "ties a value that no input becomes"
        )
        return
    within(where, "operation", (link.op,), len(graph.ops))
    op = graph.ops[link.op]
    values, k = (op.inputs, link.operand) if link.operand >= 0 else (op.outputs, -2 - link.operand)
    side = "operand" if link.operand >= 0 else "result"
    within(where, f"{side} of operation {link.op} {op.kind}:", (k,), len(values))
    demand(values[k] == link.value, where, f"{side} {k} of operation {link.op} is %{values[k]}")
    demand((link.operand < 0) == link.partial, where, f"partial is {link.partial}")
