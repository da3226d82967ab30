"""The buffers of a device: their lifetimes, and the decision that gives each its layout.

The result of an operation that mixes dimensions has the operation's own layout while it runs (a
partial sum has its full size before it is scattered), and the layout of the result afterwards.

A value that operations read in a different layout than it is made in is in memory twice. Only a
plan determines whether the two layouts differ, but a search needs buffers whose bytes depend on one
decision alone. So for a search, the value has one layout at a time: that of its maker, that of its
readers from the first to the last of them, then that of its maker again.
docs/explanation/memory.md has the reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.annotate import MARKS
from planner.graph.ir import PRODUCTS, SCALAR, Graph, Op, Phase, Role
from planner.rules.kernels.regions import REGION
from planner.space.buffer import Buffer, Memory, Port, Tiled, When
from planner.space.decisions import DECISIONS, Chosen
from planner.space.decisions.host_memory import OFFLOAD
from planner.space.factors import Layout
from planner.space.groups import GroupLink, Groups
from planner.step.memory.lanes import image_lanes
from planner.step.memory.liveness import intervals
from planner.step.memory.materialized import Written
from planner.step.memory.workspace import workspaces
from planner.step.op_kinds import ENTERED, FOLDED, OVERWRITES, extents

EMPTY: Chosen = {}


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """The buffers of a step.

    ``order`` is the order in which operations run. Moments are places in it. If a plan is known,
    each place has two moments: the operation, and the collectives between it and the next.
    """

    buffers: tuple[Buffer, ...]
    order: tuple[int, ...]


def find_buffers(
    graph: Graph,
    groups: Groups,
    written_values: Written,
    live: Sequence[bool],
    donated: Sequence[bool],
    tile: tuple[int, int] = (1, 1),
    moves: Callable[[GroupLink], bool] | None = None,
    chosen: Chosen = EMPTY,
    inside: frozenset[int] = frozenset(),
    packing: float = 1.0,
) -> Lifetimes:
    """The buffers of a step whose kernels are ``written_values``. Near-linear in operations.

    Args:
        graph: the step.
        groups: its groups.
        written_values: what is written, and when it is read.
        live: per operation, whether its results are used.
        donated: per input, whether results may take its memory.
        tile: rows and lanes that the two minor dimensions of an array are padded to.
        moves: whether the layouts at the ends of a link differ; None if no plan is known.
        chosen: per decision, the values that have a choice.
        inside: gradients that are not written (``step.memory.updates``).
        packing: ratio of the bytes allotted to temporaries to their size.
    """
    hosted = chosen.get(OFFLOAD, frozenset())
    held = _Finding(graph, groups, written_values, live, tile, moves, inside, packing)
    held.run(donated, hosted)
    buffers: Sequence[Buffer] = held.buffers
    for name, values in chosen.items():
        buffers = DECISIONS[name].buffers(buffers, graph, values)
    return Lifetimes(tuple(buffers), written_values.order)


def has_gaps(b: Buffer, stays: frozenset[int]) -> bool:
    """Whether a buffer is a temporary. Arguments and results (``stays``) have no gaps around them,
    except for copies of arrays that are kept in host memory."""
    return b.value not in stays or b.port is Port.GATHERED or b.when == When(OFFLOAD, 1)


def loops_entered(graph: Graph, live: Sequence[bool]) -> dict[int, int]:
    """The loop that each value of a ``loop_const`` or ``loop_xs`` enters, as the region of its
    body; values that the loop only stacks are omitted."""
    out: dict[int, int] = {}
    homes = {op.outputs[0]: op.region for op in graph.ops if op.kind in ENTERED}
    for op in graph.ops:
        for i in op.inputs if live[op.index] else ():
            if i in homes and i not in out:
                region = op.region
                while region > 0 and graph.regions[region].parent != homes[i]:
                    region = graph.regions[region].parent
                if region > 0:
                    out[i] = region
    return out


def made_of_parameters(graph: Graph, fuses: Sequence[bool]) -> set[int]:
    """Values that kernels compute from parameters as they read them: casts, values passed into
    loops."""
    kinds = (Role.PARAMETER, Role.FROZEN)
    derived = {v for v in graph.inputs if graph.values[v].role in kinds}
    given = frozenset(derived)
    for op in graph.ops:
        read = [i for i in op.inputs if i != SCALAR]
        if op.kind == "optimization_barrier":
            derived.update(o for i, o in zip(op.inputs, op.outputs, strict=True) if i in derived)
        elif (fuses[op.index] or op.kind in ENTERED) and read and derived.issuperset(read):
            derived.update(op.outputs)
    return derived - given


class _Finding:
    """``find_buffers`` in progress."""

    def __init__(
        self,
        graph: Graph,
        groups: Groups,
        written_values: Written,
        live: Sequence[bool],
        tile: tuple[int, int],
        moves: Callable[[GroupLink], bool] | None,
        inside: frozenset[int],
        packing: float,
    ) -> None:
        self.graph, self.groups, self.found, self.live = graph, groups, written_values, live
        self.tile, self.moves, self.inside, self.packing = tile, moves, inside, packing
        self.stays = frozenset((*graph.inputs, *graph.outputs))
        padded = tile != (1, 1)
        self.lanes = image_lanes(graph, groups.op_layouts, groups.fuses) if padded else {}
        self.begin, self.stop = extents(graph, written_values.time)
        self.entered = loops_entered(graph, live)
        self.weights = made_of_parameters(graph, groups.fuses)
        self.readers: dict[int, list[Op]] = {}
        for op in graph.ops:
            for i in set(op.inputs) if live[op.index] else ():
                self.readers.setdefault(i, []).append(op)
        self.buffers: list[Buffer] = []
        self.lent: dict[int, list[tuple[int, int]]] = {}
        """Per value, the intervals in which its bytes count in a reader's layout."""
        self.until: dict[int, float] = {}
        """Per value, when its last reader, except readers of a copy, has run."""
        self.gathered: dict[int, list[int]] = {}
        """Per input, when operations read the copy that is made for use."""
        self.arrives: dict[int, float] = {}
        """Per input, the size of this copy as a share of its bytes."""

    def add(
        self,
        group: int,
        start: float,
        end: float,
        value: int,
        layout: Layout,
        port: Port,
        when: When | None = None,
        pool: Memory = Memory.DEVICE,
        share: float = 1.0,
    ) -> None:
        known = self.graph.values[value]
        if end <= start or (known.host and pool is Memory.DEVICE):
            return
        scale = 1 if self.moves is None else 2
        nbytes = share * self.found.nbytes[value]
        tiled: Tiled | None = None
        on_device = pool is Memory.DEVICE
        if on_device and self.tile != (1, 1) and len(known.shape) > 1 and all(known.shape):
            tiled = Tiled(known.shape, self.tile, self.lanes.get(value, ()))
        first, last = int(scale * start), int(scale * end)
        buffer = Buffer(group, first, last, nbytes, layout, port, when, pool, value, tiled)
        if on_device and has_gaps(buffer, self.stays):
            buffer = dataclasses.replace(buffer, nbytes=self.packing * nbytes)
        self.buffers.append(buffer)

    def run(self, donated: Sequence[bool], hosted: frozenset[int]) -> None:
        """Fill ``buffers``."""
        self.operands()
        products = self.products()
        self.turned()
        moves = self.moves or (lambda _: True)
        given = self.graph, self.groups, self.found, self.live, self.tile
        for extra in workspaces(*given, moves):
            kind = self.groups.groups[extra.group].kind
            side = Port.STORE if extra.stored and kind == "input" else Port.USE
            moments = (extra.group, extra.first, extra.last)
            self.add(*moments, extra.value, extra.layout, side, share=extra.share)
        groups, graph = self.groups, self.graph
        inside = self.inside
        carries = {new: old for old, new in graph.next_values.items()}
        for span in intervals(graph, self.found, self.live, donated, hosted):
            when = None if span.when is None else When(OFFLOAD, int(span.when is Memory.HOST))
            home_value = carries.get(span.value, span.value) if span.when else span.value
            home = groups.home[home_value]
            if home is None or self.found.base[span.value] in inside:
                continue
            group, layout = home
            port = Port.STORE if groups.groups[group].kind == "input" else Port.USE
            if span.pool is not Memory.DEVICE:
                self.add(group, span.start, span.end, span.value, layout, port, when, span.pool)
                continue
            start: float = span.start
            if span.value in products and products[span.value] == span.start:
                start += 1 if self.moves is None else 0.5
            stop: float = span.end
            if self.moves is not None and stop <= len(graph.ops):
                stop = max(stop - 0.5, start)
            stop = min(stop, self.until.get(span.value, stop))
            for first, last in sorted(self.lent.get(span.value, ())):
                self.add(group, start, min(first, stop), span.value, layout, port, when)
                start = max(start, last)
            self.add(group, start, stop, span.value, layout, port, when)
            reads = self.gathered.get(span.value)
            if port is Port.STORE and reads and span.when is not Memory.HOST:
                first, last, share = min(reads), max(reads) + 1, self.arrives[span.value]
                self.add(group, first, last, span.value, layout, Port.GATHERED, share=share)

    def operands(self) -> None:
        """Add the buffers of operands, in the layout in which they are read."""
        kinds = [g.kind for g in self.groups.groups]
        copies: dict[int, list[int]] = {}  # per copy, when operations read it
        copied: dict[int, GroupLink] = {}
        for link in self.groups.links:
            if link.op < 0 or not self.live[link.op]:
                continue
            op = self.graph.ops[link.op]
            if link.operand < 0:
                if op.kind in FOLDED and link.operand <= -2:  # a view that is sent
                    self.lend(link, sorted(self.reads(op)))
            elif link.a_use:
                self.gathered.setdefault(link.value, []).append(self.found.time[link.op])
                self.arrives[link.value] = self.share(link)
            elif kinds[link.b] == "copy":
                copied[link.b] = link
            elif kinds[link.a] == "copy":
                copies.setdefault(link.a, []).extend(self.reads(op))
            elif kinds[link.b] == "anchor":
                self.lend(link, sorted(self.reads(op)))
            elif self.graph.ops[link.op].kind == "loop_const":
                self.enter(link)
        for copy, link in copied.items():
            self.lend(link, sorted(copies.get(copy, [self.found.time[link.op]])))

    def reads(self, op: Op) -> Iterator[int]:
        """When an operation and, if it is a view, the readers of its result run. A loop reads a
        stack until its end."""
        yield self.found.time[op.index]
        if op.kind in ENTERED:
            yield self.stop[self.entered.get(op.outputs[0], op.region)]
        elif op.kind in FOLDED and self.found.base[op.outputs[0]] == self.found.base[op.inputs[0]]:
            for reader in self.readers.get(op.outputs[0], ()):
                yield from self.reads(reader)

    def enter(self, link: GroupLink) -> None:
        """Hold a value that a loop reads in every iteration, in the layout in which it enters."""
        graph, inner = self.graph, self.graph.ops[link.op].outputs[0]
        region = self.entered.get(inner, -1)
        if region < 0:
            return
        base, first, last = self.found.base[link.value], self.begin[region], self.stop[region]
        self.lend(
            link, sorted({first, *(t for t in self.found.reads[base] if first <= t <= last), last})
        )
        if self.moves is None and graph.values[base].op < 0:  # the stored array stays beside it
            share = self.share(link)
            self.add(link.b, first, last + 1, link.value, link.dst, Port.USE, share=share)

    def share(self, link: GroupLink) -> float:
        """The share of a value's bytes that arrives at the end of a link."""
        return min(1.0, link.nbytes / max(1, self.found.nbytes[link.value]))

    def lend(self, link: GroupLink, times: Sequence[int]) -> None:
        """Hold a value in the layout of the link's reader while it is read, at ``times``."""
        base, first, last = self.found.base[link.value], times[0], times[-1] + 1
        share = self.share(link)
        maker = self.graph.values[base].op
        temporary = maker >= 0 and base not in self.graph.outputs and self.found.kept[base]
        if self.moves is None:
            taken = self.lent.setdefault(base, [])
            if base in self.weights and not self.found.kept[base]:
                self.add(link.b, first, last, link.value, link.dst, Port.COPY, share=share)
            if temporary and not any(first < b and a < last for a, b in taken):
                taken.append((first, last))
                self.add(link.b, first, last, link.value, link.dst, Port.USE, share=share)
        elif self.moves(link):  # a sent value is written, even if its readers could compute it
            self.add(link.b, first - 0.5, last - 0.5, link.value, link.dst, Port.USE, share=share)
            others = [r + 0.5 for r in self.found.reads[base] if r not in times]
            if temporary and base not in self.until:
                self.until[base] = max([self.leaves(link, first), *others])

    def leaves(self, link: GroupLink, first: float) -> float:
        """When a value that is first sent at ``first`` is no longer needed: after the loop, if a
        loop that does not make the value sends it in every iteration."""
        maker = self.graph.values[self.found.base[link.value]].op
        home = self.graph.ops[maker].region if maker >= 0 else 0
        region = self.graph.ops[link.op].region
        turns = -1
        while region not in (home, -1):
            turns, region = region, self.graph.regions[region].parent
        return first if turns < 0 else self.stop[turns] + 0.5

    def turned(self) -> None:
        """Add the new values of inputs whose gradient is a product that comes out transposed.

        The update reads one side transposed, so it can't overwrite its operands: all values that
        one gradient updates are written beside the old values, then copied. A GPU writes a product
        in either order; only a product that is moved before the update comes out transposed.
        """
        graph, written_values = self.graph, self.found
        root = [-1] * len(graph.values)
        moved = self.moved()
        for op in graph.ops:
            if not self.live[op.index] or len(op.outputs) != 1:
                continue
            out = graph.values[op.outputs[0]]
            if op.kind == "transpose":
                base = written_values.base[out.index]
                maker = graph.values[base].op
                turns = base in moved if written_values.merges else op.region > 0
                if turns and maker >= 0 and graph.ops[maker].kind in PRODUCTS:
                    root[out.index] = out.index
            elif self.groups.fuses[op.index] or op.kind in MARKS:
                roots = [
                    root[i] for i in op.inputs if i >= 0 and graph.values[i].shape == out.shape
                ]
                root[out.index] = max(roots, default=-1)
        updated: dict[int, list[int]] = {}
        for value in graph.next_values.values():
            if value >= 0 and root[value] >= 0 and graph.values[value].op >= 0:
                updated.setdefault(root[value], []).append(value)
        for values in updated.values():
            at = max(written_values.time[graph.values[v].op] for v in values)
            for value in values:
                home = self.groups.home[value]
                if home is not None:
                    self.add(home[0], at, at + 1, value, home[1], Port.USE)

    def moved(self) -> set[int]:
        """Results of products that change their layout afterwards; empty if no plan is known."""
        moves = self.moves or (lambda _: False)
        return {x.value for x in self.groups.links if x.operand <= -2 and moves(x)}

    def products(self) -> dict[int, int]:
        """Add results in the layout in which they are made; returns when, by value.

        If a plan is known, only results that are scattered or sent from this layout.
        """
        out: dict[int, int] = {}
        scattered = self.moved()
        filled = self.filled()
        for op in self.graph.ops:
            entry = self.groups.op_layouts[op.index]
            if entry is None or not self.live[op.index]:
                continue
            if self.groups.groups[entry[0]].kind != "anchor" or op.kind == REGION:
                continue
            for value, layout in zip(op.outputs, entry[2], strict=True):
                at = self.found.time[op.index]
                produced = self.found.kept[value] or value in self.found.passed
                if produced and (self.moves is None or value in scattered):
                    out[value] = at
                    self.add(entry[0], filled.get(value, at), at + 1, value, layout, Port.USE)
        return out

    def filled(self) -> dict[int, int]:
        """Tables of zeros that rows are added to: per result, the moment from which XLA:GPU holds
        it. It fills them as soon as the backward pass of their loop begins, as they depend on
        nothing."""
        graph, written_values = self.graph, self.found
        begun: dict[int, int] = {}
        for op in graph.ops:
            if op.phase is Phase.BACKWARD:
                at = written_values.time[op.index]
                begun[op.region] = min(at, begun.get(op.region, at))
        return {
            op.outputs[0]: begun[op.region]
            for op in graph.ops
            if written_values.normalizes
            and op.kind in OVERWRITES
            and op.phase is Phase.BACKWARD
            and (op.inputs[0] == SCALAR or not written_values.sources[op.inputs[0]])
        }
