"""Which buffers a device holds, when, and which decision lays each out.

A usage is unary: its bytes follow from one group's strategy. A value that moves between layouts
is therefore told in turns: in the layout of the group that makes it until an operation reads it in
another group's, in that layout while the operation runs, then in the first again. What an
operation that mixes dimensions makes is held in the operation's own layout (a partial sum before
it is scattered has its full size) at the moment it runs, and from then on in its result's.
docs/explanation/memory.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph.ir import Graph
from planner.graph.liveness import intervals
from planner.graph.written import Written
from planner.groups import Groups, Link
from planner.unify import Layout

UsageRow = tuple[int, int, int, float, Layout, str]
"""(group, start, end, bytes, layout, port): port is "use", "store" or "gathered"."""


@dataclass(frozen=True, eq=False)
class Usages:
    """The usages of a step: ``values[k]`` is the value that row k holds; ``order`` is the order in
    which operations run, which moments are places in."""

    rows: tuple[UsageRow, ...]
    values: tuple[int, ...]
    order: tuple[int, ...]


def find_usages(
    graph: Graph,
    groups: Groups,
    found: Written,
    live: Sequence[bool],
    donated: Sequence[bool],
) -> Usages:
    """The usages of a step whose kernels are ``found``. Near-linear in operations."""
    return _Usages(graph, groups, found, live).run(donated)


class _Usages:
    """``find_usages`` in progress."""

    def __init__(self, graph: Graph, groups: Groups, found: Written, live: Sequence[bool]) -> None:
        self.graph, self.groups, self.found, self.live = graph, groups, found, live
        self.rows: list[UsageRow] = []
        self.values: list[int] = []
        self.lent: dict[int, list[tuple[int, int]]] = {}
        """Per value, the moments at which its bytes are told in a reader's layout."""
        self.gathered: dict[int, list[int]] = {}
        """Per input, when operations read the copy that is made for use."""

    def add(self, group: int, start: int, end: int, value: int, layout: Layout, port: str) -> None:
        if end > start:
            nbytes = float(self.found.nbytes[value])
            self.rows.append((group, start, end, nbytes, layout, port))
            self.values.append(value)

    def run(self, donated: Sequence[bool]) -> Usages:
        self.operands()
        products = self.products()
        groups, graph = self.groups, self.graph
        for span in intervals(graph, self.found, self.live, donated):
            home = groups.home[span.value]
            if home is None:
                continue
            group, layout = home
            made = graph.values[span.value].op
            if made >= 0 and graph.ops[made].kind == "loop_ys":  # laid out as what the body stacks
                inner = groups.home[graph.ops[made].inputs[0]]
                group, layout = (group, layout) if inner is None else (inner[0], (-1, *inner[1]))
            port = "store" if groups.groups[group].kind == "input" else "use"
            start = span.start + (products.get(span.value) == span.start)
            for first, last in sorted(self.lent.get(span.value, ())):
                self.add(group, start, min(first, span.end), span.value, layout, port)
                start = max(start, last)
            self.add(group, start, span.end, span.value, layout, port)
            reads = self.gathered.get(span.value)
            if port == "store" and reads:
                self.add(group, min(reads), max(reads) + 1, span.value, layout, "gathered")
        return Usages(tuple(self.rows), tuple(self.values), self.found.order)

    def operands(self) -> None:
        """Operands in the layout in which they are read."""
        kinds = [g.kind for g in self.groups.groups]
        copies: dict[int, list[int]] = {}  # per copy, when operations read it
        copied: dict[int, Link] = {}
        for link in self.groups.links:
            if link.operand < 0 or not self.live[link.op]:
                continue
            at = self.found.time[link.op]
            if link.a_use:
                self.gathered.setdefault(link.value, []).append(at)
            elif kinds[link.b] == "copy":
                copied[link.b] = link
            elif kinds[link.a] == "copy":
                copies.setdefault(link.a, []).append(at)
            elif kinds[link.b] == "anchor":
                self.lend(link, at, at + 1)
        for copy, link in copied.items():
            reads = copies.get(copy, [self.found.time[link.op]])
            self.lend(link, min(reads), max(reads) + 1)

    def lend(self, link: Link, first: int, last: int) -> None:
        """Hold a value in the layout of the link's reader during [first, last)."""
        base = self.found.base[link.value]
        taken = self.lent.setdefault(base, [])
        made = self.graph.values[base].op
        if not self.found.kept[base] or made < 0 or base in self.graph.outputs:
            return
        if any(first < b and a < last for a, b in taken):
            return
        taken.append((first, last))
        self.add(link.b, first, last, link.value, link.dst, "use")

    def products(self) -> dict[int, int]:
        """Results in the layout in which they are made; returns when, by value."""
        out: dict[int, int] = {}
        for op in self.graph.ops:
            entry = self.groups.op_layouts[op.index]
            if entry is None or not self.live[op.index]:
                continue
            if self.groups.groups[entry[0]].kind != "anchor":
                continue
            for value, layout in zip(op.outputs, entry[2], strict=True):
                if self.found.kept[value]:
                    out[value] = at = self.found.time[op.index]
                    self.add(entry[0], at, at + 1, value, layout, "use")
        return out
