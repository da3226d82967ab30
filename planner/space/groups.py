"""Builds groups, the decisions of a plan, from a graph and its factor rules.

Operations that only pass dimensions along (elementwise, broadcasts, reductions,
transposes, loop borders) are tied together by unifying their factors (union-find): every
value of such a group is a projection of the group's factors, so one assignment of mesh
axes to factors shards all of them. Operations that mix dimensions (matmuls,
convolutions, gathers, sorts, slices) form separate groups; their results flow over a
``GroupLink`` into the group of the consumers, where a sharding may change or a partial sum is
combined. Inputs that such operations read also form separate groups, so that a parameter
can be stored under one sharding and used under another (ZeRO; Rajbhandari et al. 2020).

A union is refused if it would put one factor on two dimensions of a value; the
operation then forms a separate group. It is also refused if it would give one decision to two pins
with different shardings; the value then flows over a link, where it is resharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.annotate import EDGE, Pin
from planner.graph.equal import equal_values
from planner.graph.ir import SCALAR, Graph, Op
from planner.graph.labels.roles import sums_gradient
from planner.rules.factor import FactorRule
from planner.space.factors import LAYOUT_NONE, Fusion, Layout
from planner.space.fusable import IDENTITY_BORDERS, is_fusable
from planner.space.open_sums import sums_of_each, sums_of_groups

ENTRIES = frozenset({"loop_const", "loop_carry", "loop_xs", "branch_in"})
"""Operations outside a region whose results are values inside it."""


@dataclass(frozen=True)
class GroupLink:
    """A value that flows from one group to another, ``weight`` times a step.

    ``src`` and ``dst`` give each dimension's factor in the producing and the consuming
    group (-1: none). ``partial``: the producer's reduction factors leave partial sums.
    ``operand`` is -1 where the value is tied to an input it updates.
    """

    a: int
    src: Layout
    b: int
    dst: Layout
    value: int
    weight: float
    op: int
    operand: int
    partial: bool = False
    a_use: bool = False
    gradient: bool = False
    """Whether this is a gradient on its way to a parameter's update: XLA combines the
    all-reduces of all such values into few, so their latency is not paid one by one."""
    nbytes: float = 0.0
    """Bytes of the whole value as it is sent (``step.kernels.operands``)."""
    sum: int = -1
    """Index of the sum that this value is added to before the reduction (``planner.space.sums``);
    -1: none."""
    share: float = 1.0
    """Share of one reduction in its price: one over the number of addends of its sum."""

    @property
    def off_path(self) -> bool:
        """Whether little waits for this value, as for a gradient or an update of an input."""
        return self.gradient or self.operand == -1


@dataclass(frozen=True)
class Group:
    """One decision: which mesh axis splits which factor."""

    index: int
    kind: str  # "fused" | "anchor" | "input" | "copy" | "edge"
    sizes: tuple[int, ...]
    shardable: tuple[bool, ...]
    reduction: frozenset[int]
    ops: tuple[int, ...]
    name: str
    decisions: tuple[tuple[str, int], ...] = ()
    """Its decisions other than the sharding, as names (``planner.space.decisions``) with the number
    of options."""


@dataclass(frozen=True)
class Groups:
    """Every group and link of a graph; ``home[value] = (group, layout)``."""

    groups: tuple[Group, ...]
    links: tuple[GroupLink, ...]
    home: tuple[tuple[int, Layout] | None, ...]
    op_layouts: tuple[tuple[int, tuple[Layout, ...], tuple[Layout, ...]] | None, ...]
    fusable: tuple[bool, ...]
    """Per operation, whether it only passes dimensions along (``is_fusable``), so that all its
    values share one decision."""
    fuses: tuple[bool, ...]
    """Per operation, whether compilers fuse it: those, and sums of gradients per example."""


def build_groups(graph: Graph, rules: Sequence[FactorRule], pins: Sequence[Pin] = ()) -> Groups:
    """Decide which values share a decision. Near-linear in operations.

    Args:
        graph: the traced step.
        rules: one factor rule per operation.
        pins: values whose sharding is given.
    """
    grouping = _Grouping(graph, rules, pins)
    grouping.add_inputs()
    for op in graph.ops:
        if grouping.live[op.index] and _does_something(graph, op) and not grouping.repeated(op):
            grouping.add(op, rules[op.index])
    grouping.tie()
    return _freeze(graph, grouping)


def _does_something(graph: Graph, op: Op) -> bool:
    """Whether an operation has arrays to split; one whose results have no elements computes
    nothing."""
    results = [graph.values[v] for v in op.outputs]
    if results and all(v.shape and not v.splits for v in results):
        return False
    return any(v != SCALAR and graph.values[v].splits for v in (*op.inputs, *op.outputs))


_NO_ANCHORS = IDENTITY_BORDERS | {"loop_back", "loop_test"}


class _Grouping:
    """``build_groups`` in progress."""

    def __init__(self, graph: Graph, rules: Sequence[FactorRule], pins: Sequence[Pin]) -> None:
        self.graph = graph
        self.pinned = {pin.value: pin for pin in pins}
        self.fusion = Fusion()
        self.live = graph.live_ops()
        known: dict[tuple[str, int], bool] = {}  # rules are shared between equal operations
        for op in graph.ops:
            key = (op.kind, id(rules[op.index]))
            if key not in known:
                known[key] = is_fusable(op, rules[op.index])
        groups, each = sums_of_groups(graph), sums_of_each(graph, rules)
        self.fuses = tuple(
            [
                (known[op.kind, id(rules[op.index])] or self.says_nothing(op))
                and not (op.kind == "reduce_sum" and op.outputs[0] in groups)
                for op in graph.ops
            ]
        )
        self.fusable = tuple(
            [
                fuses and not (op.kind == "reduce_sum" and op.outputs[0] in each)
                for op, fuses in zip(graph.ops, self.fuses, strict=True)
            ]
        )
        self.same = equal_values(graph, self.live, self.pinned)
        self.anchors = [0] * len(graph.values)
        for op in graph.ops:
            if self.live[op.index] and not self.fusable[op.index] and op.kind not in _NO_ANCHORS:
                for value in {self.same[v] for v in op.inputs if v != SCALAR}:
                    self.anchors[value] += 1
        self.links: list[tuple[int, Layout, int, Layout, int, float, int, int, bool]] = []
        self.op_layouts: list[tuple[int, list[Layout], list[Layout]] | None] = [None] * len(
            graph.ops
        )
        self.copies: dict[int, tuple[int, Layout]] = {}

    def says_nothing(self, op: Op) -> bool:
        """Whether an operation is a constraint without effect, such as one on a mesh of one
        device: its value has no reason to change its sharding there."""
        return op.kind == "sharding_constraint" and op.outputs[0] not in self.pinned

    def anchors_of(self, value: int) -> int:
        """The number of operations that mix dimensions and read a value."""
        return self.anchors[value]

    def repeated(self, op: Op) -> bool:
        """Place an operation that repeats an earlier one with that one: compilers compute and send
        the value once."""
        firsts = [self.same[v] for v in op.outputs]
        if not firsts or firsts[0] == op.outputs[0] or firsts[0] not in self.fusion.home:
            return False
        for value, first in zip(op.outputs, firsts, strict=True):
            if first in self.fusion.home:
                self.fusion.home[value] = self.fusion.home[first]
        first_op = self.graph.values[firsts[0]].op
        entry = self.op_layouts[first_op]
        self.op_layouts[op.index] = entry
        if entry is not None:
            self.fusion.gops[self.fusion.gfind(entry[0])].append(op.index)
        return True

    def add_inputs(self) -> None:
        """Groups of inputs and constants."""
        for value in self.graph.values:
            if value.op != -1 or not value.splits:
                continue
            separate = len(value.shape) >= 2 and self.anchors_of(value.index) > 0
            group = self.fusion.new_group("input" if separate else "fused", value.name)
            self.place(value.index, group, self.fusion.fresh(group, value.shape))

    def place(self, value: int, group: int, layout: Layout) -> None:
        """Set the home of the first value of a new group, and apply its pin."""
        self.fusion.home[value] = (group, layout)
        if value in self.pinned:
            self.fusion.hold(group, layout, self.pinned[value].axes)

    def use(self, op: Op, position: int, value: int, group: int, layout: Layout) -> None:
        """Link ``value`` into an operand of a separate group."""
        weight = self.graph.regions[op.region].weight
        source, source_layout = self.fusion.home[value]
        first = self.same[value]
        if self.anchors_of(first) >= 2 and self.fusion.gkind[source] != "input":
            if first not in self.copies:
                copy = self.fusion.new_group("copy", self.graph.values[value].name or f"%{value}")
                copy_layout = self.fusion.fresh(copy, self.graph.values[value].shape)
                w = self.weight_of(value, op)
                self.links.append(
                    (source, source_layout, copy, copy_layout, value, w, op.index, position, False)
                )
                self.copies[first] = (copy, copy_layout)
            source, source_layout = self.copies[first]
        self.links.append(
            (source, source_layout, group, layout, value, weight, op.index, position, False)
        )

    def weight_of(self, value: int, reader: Op) -> float:
        """How often a step makes a value; a value that enters a loop is made in its body."""
        graph = self.graph
        at = graph.values[value].op
        if at < 0:
            return 1.0
        home = region = graph.ops[at].region
        if graph.ops[at].kind in ENTRIES:
            region = reader.region
            if reader.kind == "loop_ys":  # read by the body, whose last operation comes before
                between = reversed(graph.ops[at + 1 : reader.index])
                region = next((op.region for op in between if op.region != home), region)
            while graph.regions[region].parent not in (home, -1):
                region = graph.regions[region].parent
        return graph.regions[region].weight

    def fuse(self, op: Op, rule: FactorRule) -> None:
        """Join an operation with the groups of its operands, or link it where they would clash."""
        fusion, values = self.fusion, self.graph.values
        placed, joins = None, -1
        for position, value in enumerate(op.inputs):
            if value != SCALAR and values[value].splits:
                source, layout = fusion.home[value]
                stacks = op.kind == "loop_ys" and fusion.gheld[fusion.gfind(source)]
                if fusion.gkind[source] == "fused" and not stacks:
                    placed = fusion.adopt(source, layout, rule, position)
                    if placed is not None:
                        group, joins = source, position
                        break
        if placed is None:
            group = fusion.new_group("fused", op.kind)
            placed, joins = fusion.instantiate(group, rule), len(op.inputs)
        ins, outs = placed
        fusion.gops[fusion.gfind(group)].append(op.index)
        self.op_layouts[op.index] = (group, ins, outs)
        for position, value in enumerate(op.inputs):
            if value == SCALAR or not values[value].splits or position == joins:
                continue
            source, layout = fusion.home[value]
            joined = (
                position > joins
                and fusion.gkind[source] == "fused"
                and fusion.try_union(group, ins[position], source, layout)
            )
            if not joined:
                weight = self.graph.regions[op.region].weight
                if op.kind == "loop_ys":  # a slice is made in every iteration
                    weight = max(weight, self.weight_of(value, op))
                self.links.append(
                    (source, layout, group, ins[position], value, weight, op.index, position, False)
                )
        for k, value in enumerate(op.outputs):
            if self.graph.values[value].splits:
                self.fusion.home[value] = (group, outs[k])

    def stand_alone(self, op: Op, rule: FactorRule) -> None:
        """Create a group for an operation that mixes dimensions, and one for each result."""
        group = self.fusion.new_group("anchor", op.kind)
        ins, outs = self.fusion.instantiate(group, rule)
        self.fusion.gops[group].append(op.index)
        self.op_layouts[op.index] = (group, ins, outs)
        for position, value in enumerate(op.inputs):
            if value != SCALAR and self.graph.values[value].splits:
                self.use(op, position, value, group, ins[position])
        weight = self.graph.regions[op.region].weight
        for k, value in enumerate(op.outputs):
            shape = self.graph.values[value].shape
            if not self.graph.values[value].splits:
                continue
            hub = self.fusion.new_group("fused", f"{op.kind} result")
            hub_layout = self.fusion.fresh(hub, shape)
            self.links.append(
                (group, outs[k], hub, hub_layout, value, weight, op.index, -2 - k, True)
            )
            self.fusion.home[value] = (hub, hub_layout)

    def region(self, op: Op, rule: FactorRule) -> None:
        """Place a ``shard_map``: it has no decision, and the marks after it give the shardings of
        its results (``planner.rules.kernels.regions``)."""
        group = self.fusion.new_group("anchor", op.kind)
        self.fusion.gops[group].append(op.index)
        ins: list[Layout] = [(LAYOUT_NONE,) * len(dims) for dims in rule.operands]
        outs: list[Layout] = [(LAYOUT_NONE,) * len(dims) for dims in rule.results]
        self.op_layouts[op.index] = (group, ins, outs)
        for value in op.outputs:
            if self.graph.values[value].splits:
                hub = self.fusion.new_group("fused", f"{op.kind} result")
                hub_layout = self.fusion.fresh(hub, self.graph.values[value].shape)
                self.fusion.home[value] = (hub, hub_layout)

    def border(self, op: Op) -> None:
        """Place a value that enters a region or passes a mark: same value, new decision."""
        for value, out in zip(op.inputs, op.outputs, strict=True):
            shape = self.graph.values[out].shape
            if not self.graph.values[out].splits:
                continue
            kind = "edge" if op.kind == EDGE else "fused"  # its readers have a new decision
            group = self.fusion.new_group(kind, op.kind)
            layout = self.fusion.fresh(group, shape)
            self.place(out, group, layout)
            self.fusion.gops[group].append(op.index)
            self.op_layouts[op.index] = (group, [layout], [layout])
            if value != SCALAR:
                source, source_layout = self.fusion.home[value]
                weight = self.graph.regions[op.region].weight
                self.links.append(
                    (source, source_layout, group, layout, value, weight, op.index, 0, False)
                )

    def add(self, op: Op, rule: FactorRule) -> None:
        """Place one operation."""
        if op.kind == "loop_test":
            return
        if op.kind in IDENTITY_BORDERS and not self.fusable[op.index]:
            self.border(op)
        elif op.kind == "loop_back":
            result, carry = op.inputs
            if result != SCALAR and self.graph.values[carry].splits:
                weight = self.graph.regions[op.region].weight
                home = self.fusion.home
                self.links.append((*home[result], *home[carry], result, weight, op.index, 0, False))
        elif self.fusable[op.index]:
            self.fuse(op, rule)
        elif rule.origin == "region":
            self.region(op, rule)
        else:
            self.stand_alone(op, rule)

    def tie(self) -> None:
        """Link results to the inputs that they become in the next step."""
        graph, home = self.graph, self.fusion.home
        for target, value in graph.next_values.items():
            if value != SCALAR and value != target and graph.values[target].splits:
                at = graph.values[value].op
                self.links.append((*home[value], *home[target], value, 1.0, at, -1, False))


def _freeze(graph: Graph, grouping: _Grouping) -> Groups:
    """Number groups and factors densely; drop links that can never cost anything."""
    fusion, live = grouping.fusion, grouping.live
    number: dict[int, int] = {}
    local: dict[int, int] = {}
    groups: list[Group] = []
    for raw in range(len(fusion.gparent)):
        if fusion.gfind(raw) != raw:
            continue
        number[raw] = len(groups)
        atoms = list(dict.fromkeys(fusion.find(a) for a in fusion.gatoms[raw]))
        reduce = {fusion.find(a) for a in fusion.greduce[raw]}
        local.update({a: k for k, a in enumerate(atoms)})
        groups.append(
            Group(
                number[raw],
                fusion.gkind[raw],
                tuple(fusion.size[a] for a in atoms),
                tuple(not fusion.blocked[a] and fusion.size[a] > 1 for a in atoms),
                frozenset(local[a] for a in reduce),
                tuple(o for o in fusion.gops[raw] if live[o]),
                fusion.gname[raw],
            )
        )

    finished: dict[Layout, Layout] = {}
    local[LAYOUT_NONE] = LAYOUT_NONE
    roots = [a if p == a else fusion.find(a) for a, p in enumerate(fusion.parent)]
    roots.append(LAYOUT_NONE)

    def done(layout: Layout) -> Layout:
        known = finished.get(layout)
        if known is None:
            known = finished[layout] = tuple([local[roots[a]] for a in layout])
        return known

    places = [number[fusion.gfind(raw)] for raw in range(len(fusion.gparent))]
    at = places.__getitem__

    links = []
    for a, src, b, dst, value, weight, op, operand, partial in grouping.links:
        to_use = (
            groups[at(a)].kind == "input"
            and op >= 0
            and operand >= 0
            and groups[at(b)].kind == "anchor"
        )
        gradient = partial and sums_gradient(graph, value)
        link = GroupLink(
            at(a),
            done(src),
            at(b),
            done(dst),
            value,
            weight,
            op,
            operand,
            partial,
            to_use,
            gradient,
            float(graph.values[value].nbytes),
        )
        if link.a != link.b or link.src != link.dst:
            links.append(link)
    home = tuple(
        (at(fusion.home[v.index][0]), done(fusion.home[v.index][1]))
        if v.index in fusion.home
        else None
        for v in graph.values
    )
    layouts = tuple(
        None
        if entry is None
        else (at(entry[0]), tuple(map(done, entry[1])), tuple(map(done, entry[2])))
        for entry in grouping.op_layouts
    )
    return Groups(tuple(groups), tuple(links), home, layouts, grouping.fusable, grouping.fuses)
