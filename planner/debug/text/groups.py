"""Groups as text, with the values that live in them, and links."""

from __future__ import annotations

from planner.debug.text.items import (
    group_text,
    later_copies,
    layout_text,
    left_out,
    link_text,
    ranges,
    repeated_groups,
)
from planner.graph.ir import Graph
from planner.space.factors import Layout
from planner.space.groups import Groups


def groups_text(groups: Groups, graph: Graph, *, folded: bool = False) -> str:
    """Groups and links, one line each.

    Args:
        groups: the groups.
        graph: the step that they belong to.
        folded: leave out items in later copies of repeated blocks.
    """
    homes: list[dict[Layout, list[int]]] = [{} for _ in groups.groups]
    for value, home in enumerate(groups.home):
        if home is not None:
            homes[home[0]].setdefault(home[1], []).append(value)
    repeated = repeated_groups(groups, graph) if folded else frozenset()
    later = later_copies(graph) if folded else frozenset()
    lines = [f"groups: {len(groups.groups)} groups, {len(groups.links)} links"]
    for group in groups.groups:
        if group.index not in repeated:
            held = homes[group.index].items()
            values = "; ".join(f"{layout_text(k)} {ranges(v, '%')}" for k, v in held)
            lines.append(f"  group {group_text(group)}{', values ' if values else ''}{values}")
    lines += left_out(len(repeated), "groups")
    shown = [x for x in groups.links if x.op not in later]
    lines += [f"  link {link_text(link, graph)}" for link in shown]
    lines += left_out(len(groups.links) - len(shown), "links")
    return "\n".join(lines)
