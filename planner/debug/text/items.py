"""Helpers that several printers share: ranges, layouts, factors, items of repeated blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.graph.ir import Graph
from planner.space.factors import Layout
from planner.space.groups import Group, GroupLink, Groups


def ranges(numbers: Iterable[int], prefix: str = "") -> str:
    """Numbers in order, with consecutive ones as ranges.

    >>> ranges([4, 1, 2, 3, 9], "%")
    '%1-4 %9'
    """
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return " ".join(f"{prefix}{a}" if a == b else f"{prefix}{a}-{b}" for a, b in runs)


def layout_text(layout: Layout) -> str:
    """The factor of each dimension.

    >>> layout_text((2, -1, 0))
    '[f2 - f0]'
    """
    return f"[{' '.join('-' if f < 0 else f'f{f}' for f in layout)}]"


def factors_text(factors: Iterable[int]) -> str:
    """A set of factors, in order."""
    return " ".join(f"f{f}" for f in sorted(factors)) or "none"


def number(value: float) -> str:
    """Four significant digits; whole numbers below a million are exact."""
    exact = abs(value) < 1e6 and value == round(value)
    return f"{round(value)}" if exact else f"{value:.4g}"


def group_text(group: Group, count: int = 1) -> str:
    """One group with its factors; ``!`` follows those that stay whole."""
    pairs = zip(group.sizes, group.shardable, strict=True)
    factors = " ".join(f"f{k}={n}{'' if able else '!'}" for k, (n, able) in enumerate(pairs))
    times = f" x{count}" if count > 1 else ""
    sums = f", sums over {factors_text(group.reduction)}" if group.reduction else ""
    ops = f", operations {ranges(group.ops)}" if group.ops else ""
    more = "".join(f", {name}: {n} options" for name, n in group.decisions)
    name = f" {group.name}" if group.name else ""
    return f"{group.index}{times}: {group.kind}{name}, factors {factors or 'none'}{sums}{ops}{more}"


def link_text(link: GroupLink, graph: Graph) -> str:
    """One link: the flow of a value between two groups."""
    if link.operand == -1:
        why = "next value of an input"
    else:
        side, k = ("operand", link.operand) if link.operand >= 0 else ("result", -2 - link.operand)
        why = f"{side} {k} of operation {link.op} {graph.ops[link.op].kind}"
    marks = [n for n in ("partial", "a_use", "gradient") if getattr(link, n)]
    more = "".join(f", {'use' if n == 'a_use' else n}" for n in marks)
    ends = f"{link.a} {layout_text(link.src)} -> {link.b} {layout_text(link.dst)}"
    return f"{ends}: %{link.value} {graph.values[link.value]}, {why}, x{number(link.weight)}{more}"


def later_copies(graph: Graph) -> frozenset[int]:
    """The operations in copies of a repeated block other than the first."""
    return frozenset(op.index for op in graph.ops if op.segment[1] > 0)


def repeated_groups(groups: Groups, graph: Graph) -> frozenset[int]:
    """The groups whose operations are all in later copies of repeated blocks."""
    later = later_copies(graph)
    group_ops: list[set[int]] = [set(g.ops) for g in groups.groups]
    for value, home in zip(graph.values, groups.home, strict=True):
        if home is not None:
            group_ops[home[0]].add(value.op)
    for link in groups.links:
        if groups.groups[link.b].kind == "copy":
            group_ops[link.b].add(link.op)
    return frozenset(g for g, ops in enumerate(group_ops) if ops and ops <= later)


def left_out(count: int, what: str) -> Sequence[str]:
    """A line with the number of items in later copies of repeated blocks, if there are any."""
    return [f"  ({count} {what} of repeated blocks left out)"] if count else []
