"""Which buffers a device holds, when, and which decision lays each out.

What an operation that mixes dimensions makes is held in the operation's own layout (a partial sum
before it is scattered has its full size) when it runs, and from then on in its result's.

A value that operations read in another layout than it is made in is in memory twice. Whether the
two layouts differ is known when a plan is; a search needs usages whose bytes follow from one
decision alone, so it is told the value in turns: in the layout of its maker, in that of its
readers from the first of them to the last, then in the first again.
docs/explanation/memory.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """The usages of a step: ``values[k]`` is the value that row k holds.

    ``order`` is the order in which operations run. Moments are places in it; where a plan is known
    there are two for each place, the operation and the collectives between it and the next.
    """

    rows: tuple[UsageRow, ...]
    values: tuple[int, ...]
    order: tuple[int, ...]


def find_usages(
    graph: Graph,
    groups: Groups,
    found: Written,
    live: Sequence[bool],
    donated: Sequence[bool],
    moves: Callable[[Link], bool] | None = None,
) -> Usages:
    """The usages of a step whose kernels are ``found``. Near-linear in operations.

    Args:
        graph: the step.
        groups: its groups.
        found: what is written, and when it is read.
        live: per operation, whether its results are used.
        donated: per input, whether results may take its memory.
        moves: whether the layouts at the ends of a link differ, where a plan is known.
    """
    return _Usages(graph, groups, found, live, moves).run(donated)


class _Usages:
    """``find_usages`` in progress."""

    def __init__(
        self,
        graph: Graph,
        groups: Groups,
        found: Written,
        live: Sequence[bool],
        moves: Callable[[Link], bool] | None,
    ) -> None:
        self.graph, self.groups, self.found, self.live = graph, groups, found, live
        self.moves = moves
        self.rows: list[UsageRow] = []
        self.values: list[int] = []
        self.lent: dict[int, list[tuple[int, int]]] = {}
        """Per value, the moments at which its bytes are told in a reader's layout."""
        self.until: dict[int, float] = {}
        """Per value, when its last reader but those of a copy has run."""
        self.gathered: dict[int, list[int]] = {}
        """Per input, when operations read the copy that is made for use."""

    def add(
        self, group: int, start: float, end: float, value: int, layout: Layout, port: str
    ) -> None:
        if end > start:
            nbytes, scale = float(self.found.nbytes[value]), 1 if self.moves is None else 2
            self.rows.append((group, int(scale * start), int(scale * end), nbytes, layout, port))
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
            start: float = span.start
            if span.value in products and products[span.value] == span.start:
                start += 1 if self.moves is None else 0.5
            stop: float = span.end
            if self.moves is not None and stop <= len(graph.ops):
                stop = max(stop - 0.5, start)
            stop = min(stop, self.until.get(span.value, stop))
            for first, last in sorted(self.lent.get(span.value, ())):
                self.add(group, start, min(first, stop), span.value, layout, port)
                start = max(start, last)
            self.add(group, start, stop, span.value, layout, port)
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
                self.lend(link, [at])
        for copy, link in copied.items():
            self.lend(link, sorted(copies.get(copy, [self.found.time[link.op]])))

    def lend(self, link: Link, times: Sequence[int]) -> None:
        """Hold a value in the layout of the link's reader while it is read, at ``times``."""
        base, first, last = self.found.base[link.value], times[0], times[-1] + 1
        made = self.graph.values[base].op
        mine = made >= 0 and base not in self.graph.outputs
        if not self.found.kept[base]:
            return
        if self.moves is not None:
            if self.moves(link):
                self.add(link.b, first - 0.5, last - 0.5, link.value, link.dst, "use")
                others = [r + 0.5 for r in self.found.reads[base] if r not in times]
                if mine and base not in self.until:
                    self.until[base] = max([first, *others])
            return
        taken = self.lent.setdefault(base, [])
        if mine and not any(first < b and a < last for a, b in taken):
            taken.append((first, last))
            self.add(link.b, first, last, link.value, link.dst, "use")

    def products(self) -> dict[int, int]:
        """Results in the layout in which they are made; returns when, by value.

        Where a plan is known, only those that are scattered or sent from it.
        """
        out: dict[int, int] = {}
        moves = self.moves or (lambda _: False)
        scattered = {x.value for x in self.groups.links if x.operand <= -2 and moves(x)}
        for op in self.graph.ops:
            entry = self.groups.op_layouts[op.index]
            if entry is None or not self.live[op.index]:
                continue
            if self.groups.groups[entry[0]].kind != "anchor":
                continue
            for value, layout in zip(op.outputs, entry[2], strict=True):
                at = self.found.time[op.index]
                if self.found.kept[value] and (self.moves is None or value in scattered):
                    out[value] = at
                    self.add(entry[0], at, at + 1, value, layout, "use")
        return out
