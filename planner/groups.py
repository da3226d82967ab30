"""Graph + factor rules -> groups: the decisions of a plan.

Operations that only pass dimensions along (elementwise, broadcasts, reductions,
transposes, loop borders) are tied together by unifying their factors (union-find): every
value of such a group is a projection of the group's factors, so one assignment of mesh
axes to factors shards all of them. Operations that mix dimensions (matmuls,
convolutions, gathers, sorts, slices) are groups of their own; their results flow over a
``Link`` into the group of the consumers, where a sharding may change or a partial sum is
combined. Inputs that such operations read keep a group of their own, so that a parameter
can be stored under one sharding and used under another (ZeRO; Rajbhandari et al. 2020).

A union is refused when it would put one factor on two dimensions of a value; the
operation then stands alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from planner.graph.ir import SCALAR, Graph, Op
from planner.rules.factor import FactorRule

MARKS = frozenset({"planner_shard", "sharding_constraint"})
"""Manual marks: identities where a sharding may change."""

IDENTITY_BORDERS = frozenset({"loop_const", "loop_carry", "branch_in"}) | MARKS
"""Places where a value may change its sharding without being computed on."""

SHAPE_KEEPERS = frozenset(
    "broadcast_in_dim transpose reshape squeeze expand_dims copy iota loop_xs loop_ys loop_out "
    "branch_out convert_element_type reduce_precision optimization_barrier split_keys".split()
)
LAYOUT_NONE = -1

Layout = tuple[int, ...]


@dataclass(frozen=True)
class Link:
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


@dataclass(frozen=True)
class Group:
    """One decision: which mesh axis splits which factor."""

    index: int
    kind: str  # "fused" | "anchor" | "input" | "copy"
    sizes: tuple[int, ...]
    shardable: tuple[bool, ...]
    reduction: frozenset[int]
    ops: tuple[int, ...]
    name: str


@dataclass(frozen=True)
class Groups:
    """Every group and link of a graph; ``home[value] = (group, layout)``."""

    groups: tuple[Group, ...]
    links: tuple[Link, ...]
    home: tuple[tuple[int, Layout] | None, ...]
    op_layouts: tuple[tuple[int, tuple[Layout, ...], tuple[Layout, ...]] | None, ...]


def is_fusable(op: Op, rule: FactorRule) -> bool:
    """Whether ``op`` only passes dimensions along, so that its values can share a decision."""
    if op.kind in IDENTITY_BORDERS or op.kind == "loop_back":
        return False
    if any(len(dim) > 1 for side in (rule.operands, rule.results) for v in side for dim in v):
        return False
    if op.kind in ("iota", "loop_xs", "loop_ys", "loop_out", "branch_out"):
        return True
    if any(rule.sizes[f] > 1 for f in rule.replicated):
        return False
    if rule.origin == "elementwise" or op.kind in SHAPE_KEEPERS:
        return not rule.reduction
    return op.kind.startswith("reduce_") or op.kind in ("argmax", "argmin")


@dataclass
class _Fusion:
    graph: Graph
    parent: list[int] = field(default_factory=list)  # atoms
    size: list[int] = field(default_factory=list)
    blocked: list[bool] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)  # atom -> group (raw)
    gparent: list[int] = field(default_factory=list)
    gkind: list[str] = field(default_factory=list)
    gname: list[str] = field(default_factory=list)
    gops: list[list[int]] = field(default_factory=list)
    gatoms: list[list[int]] = field(default_factory=list)
    glayouts: list[set[Layout]] = field(default_factory=list)
    greduce: list[set[int]] = field(default_factory=list)
    home: dict[int, tuple[int, Layout]] = field(default_factory=dict)

    def find(self, atom: int) -> int:
        while self.parent[atom] != atom:
            self.parent[atom] = self.parent[self.parent[atom]]
            atom = self.parent[atom]
        return atom

    def gfind(self, group: int) -> int:
        while self.gparent[group] != group:
            self.gparent[group] = self.gparent[self.gparent[group]]
            group = self.gparent[group]
        return group

    def new_group(self, kind: str, name: str) -> int:
        index = len(self.gparent)
        self.gparent.append(index)
        self.gkind.append(kind)
        self.gname.append(name)
        self.gops.append([])
        self.gatoms.append([])
        self.glayouts.append(set())
        self.greduce.append(set())
        return index

    def new_atom(self, group: int, size: int, blocked: bool = False) -> int:
        atom = len(self.parent)
        self.parent.append(atom)
        self.size.append(size)
        self.blocked.append(blocked)
        self.gatoms[group].append(atom)
        return atom

    def resolve(self, layout: Layout) -> Layout:
        return tuple(LAYOUT_NONE if a == LAYOUT_NONE else self.find(a) for a in layout)

    def fresh(self, group: int, shape: Sequence[int]) -> Layout:
        layout = tuple(LAYOUT_NONE if n <= 1 else self.new_atom(group, n) for n in shape)
        self.glayouts[group].add(layout)
        return layout

    def instantiate(self, group: int, rule: FactorRule) -> tuple[list[Layout], list[Layout]]:
        """The rule's factors as atoms of ``group``; layouts of operands and results."""
        atoms = [
            self.new_atom(group, n, f in rule.replicated) for f, n in enumerate(rule.sizes)
        ]

        def side(values: Iterable[tuple[tuple[int, ...], ...]]) -> list[Layout]:
            return [
                tuple(
                    LAYOUT_NONE if not dim else atoms[dim[0]] for dim in dims
                )
                for dims in values
            ]

        for f in rule.reduction:
            self.greduce[group].add(atoms[f])
        # a minor factor of a merged dimension can't be sharded by itself
        for values in (rule.operands, rule.results):
            for dims in values:
                for dim in dims:
                    for f in dim[1:]:
                        self.blocked[atoms[f]] = True
        ins, outs = side(rule.operands), side(rule.results)
        self.glayouts[group].update(layout for layout in (*ins, *outs) if layout)
        return ins, outs

    def _has_more(self, group: int, shared: set[int]) -> bool:
        """Whether the group has factors beyond ``shared``."""
        roots = {self.find(a) for a in shared if a != LAYOUT_NONE}
        return any(
            a != LAYOUT_NONE and self.find(a) not in roots
            for layout in self.glayouts[group] for a in layout
        )

    def try_union(self, group: int, layout: Layout, other: int, theirs: Layout) -> bool:
        """Unify two groups along matching layouts.

        False (nothing changed) when a value would clash, and when both groups span
        further factors: a small value (a bias, a mean) is no reason to tie two large ones.
        """
        group, other = self.gfind(group), self.gfind(other)
        merged: dict[int, int] = {}

        def root(atom: int) -> int:
            atom = self.find(atom)
            while atom in merged:
                atom = merged[atom]
            return atom

        for mine, their in zip(layout, theirs, strict=True):
            if LAYOUT_NONE in (mine, their):
                if mine != their:
                    return False
                continue
            x, y = root(mine), root(their)
            if x == y:
                continue
            if self.size[x] != self.size[y]:
                return False
            merged[max(x, y)] = min(x, y)
        if group == other and not merged:
            return True
        if group != other:
            shared = {a for a in theirs if a != LAYOUT_NONE} | {a for a in layout}
            if all(self._has_more(g, shared) for g in (group, other)):
                return False
        renamed = set()
        for old in self.glayouts[group] | self.glayouts[other]:
            new = tuple(LAYOUT_NONE if a == LAYOUT_NONE else root(a) for a in old)
            named = [a for a in new if a != LAYOUT_NONE]
            if len(set(named)) != len(named):
                return False
            renamed.add(new)
        for src, dst in merged.items():
            self.parent[self.find(src)] = self.find(dst)
            self.blocked[self.find(dst)] = self.blocked[self.find(dst)] or self.blocked[src]
        keep, gone = min(group, other), max(group, other)
        self.glayouts[keep] = renamed
        if keep != gone:
            self.gparent[gone] = keep
            self.gops[keep] += self.gops[gone]
            self.gatoms[keep] += self.gatoms[gone]
            self.greduce[keep] |= self.greduce[gone]
        return True


def build_groups(graph: Graph, rules: Sequence[FactorRule]) -> Groups:
    """Decide which values share a decision. Near-linear in operations.

    Args:
        graph: the traced step.
        rules: one factor rule per operation.
    """
    fusion = _Fusion(graph)
    live = graph.live_ops()
    fusable = [is_fusable(op, rules[op.index]) for op in graph.ops]
    consumers = graph.consumers()
    links: list[tuple[int, Layout, int, Layout, int, float, int, int, bool]] = []
    op_layouts: list[tuple[int, list[Layout], list[Layout]] | None] = [None] * len(graph.ops)
    copies: dict[int, tuple[int, Layout]] = {}

    def anchors_of(value: int) -> int:
        return sum(1 for c in consumers[value] if live[c] and not fusable[c]
                   and graph.ops[c].kind not in IDENTITY_BORDERS | {"loop_back"})

    def add_inputs() -> None:
        for value in graph.values:
            if value.op != -1 or not value.shape:
                continue
            own = len(value.shape) >= 2 and anchors_of(value.index) > 0
            group = fusion.new_group("input" if own else "fused", value.name)
            fusion.home[value.index] = (group, fusion.fresh(group, value.shape))

    def use(op: Op, position: int, value: int, group: int, layout: Layout) -> None:
        """Link ``value`` into an operand of a group that stands alone."""
        weight = graph.regions[op.region].weight
        source, theirs = fusion.home[value]
        if anchors_of(value) >= 2 and fusion.gkind[source] != "input":
            if value not in copies:
                copy = fusion.new_group("copy", graph.values[value].name or f"%{value}")
                made = fusion.fresh(copy, graph.values[value].shape)
                at = graph.values[value].op
                w = graph.regions[graph.ops[at].region].weight if at >= 0 else 1.0
                links.append((source, theirs, copy, made, value, w, op.index, position, False))
                copies[value] = (copy, made)
            source, theirs = copies[value]
        links.append((source, theirs, group, layout, value, weight, op.index, position, False))

    def fuse(op: Op, rule: FactorRule) -> None:
        group = fusion.new_group("fused", op.kind)
        ins, outs = fusion.instantiate(group, rule)
        fusion.gops[group].append(op.index)
        op_layouts[op.index] = (group, ins, outs)
        for position, value in enumerate(op.inputs):
            if value == SCALAR or not graph.values[value].shape:
                continue
            source, theirs = fusion.home[value]
            joined = fusion.gkind[source] == "fused" and fusion.try_union(
                group, ins[position], source, theirs
            )
            if not joined:
                weight = graph.regions[op.region].weight
                links.append(
                    (source, theirs, group, ins[position], value, weight, op.index, position,
                     False)
                )
        for k, value in enumerate(op.outputs):
            if graph.values[value].shape:
                fusion.home[value] = (group, outs[k])

    def stand_alone(op: Op, rule: FactorRule) -> None:
        group = fusion.new_group("anchor", op.kind)
        ins, outs = fusion.instantiate(group, rule)
        fusion.gops[group].append(op.index)
        op_layouts[op.index] = (group, ins, outs)
        for position, value in enumerate(op.inputs):
            if value != SCALAR and graph.values[value].shape:
                use(op, position, value, group, ins[position])
        weight = graph.regions[op.region].weight
        for k, value in enumerate(op.outputs):
            shape = graph.values[value].shape
            if not shape:
                continue
            hub = fusion.new_group("fused", f"{op.kind} result")
            made = fusion.fresh(hub, shape)
            links.append((group, outs[k], hub, made, value, weight, op.index, -2 - k, True))
            fusion.home[value] = (hub, made)

    def border(op: Op) -> None:
        for value, out in zip(op.inputs, op.outputs, strict=True):
            shape = graph.values[out].shape
            if not shape:
                continue
            group = fusion.new_group("fused", op.kind)
            made = fusion.fresh(group, shape)
            fusion.home[out] = (group, made)
            fusion.gops[group].append(op.index)
            op_layouts[op.index] = (group, [made], [made])
            if value != SCALAR:
                source, theirs = fusion.home[value]
                weight = graph.regions[op.region].weight
                links.append((source, theirs, group, made, value, weight, op.index, 0, False))

    add_inputs()
    for op in graph.ops:
        touched = (*op.inputs, *op.outputs)
        if not live[op.index] or not any(v != SCALAR and graph.values[v].shape for v in touched):
            continue
        rule = rules[op.index]
        if op.kind in IDENTITY_BORDERS:
            border(op)
        elif op.kind == "loop_back":
            result, carry = op.inputs
            if result != SCALAR and graph.values[carry].shape:
                weight = graph.regions[op.region].weight
                links.append((*fusion.home[result], *fusion.home[carry], result, weight,
                              op.index, 0, False))
        elif fusable[op.index]:
            fuse(op, rule)
        else:
            stand_alone(op, rule)
    for i, o in graph.ties:
        value, target = graph.outputs[o], graph.inputs[i]
        if value != SCALAR and value != target and graph.values[target].shape:
            at = graph.values[value].op
            links.append((*fusion.home[value], *fusion.home[target], value, 1.0, at, -1, False))
    return _freeze(graph, fusion, links, op_layouts, live)


def gradient_shapes(graph: Graph) -> set[tuple[int, ...]]:
    """Shapes that gradients of carried inputs have, also one slice of a stack of layers."""
    shapes = {graph.values[graph.inputs[i]].shape for i, _ in graph.ties}
    return (shapes | {s[1:] for s in shapes if len(s) > 1}) - {()}


def _freeze(
    graph: Graph, fusion: _Fusion,
    raw_links: list[tuple[int, Layout, int, Layout, int, float, int, int, bool]],
    op_layouts: list[tuple[int, list[Layout], list[Layout]] | None], live: Sequence[bool],
) -> Groups:
    """Number groups and factors densely; drop links that can never cost anything."""
    number: dict[int, int] = {}
    local: dict[int, int] = {}
    groups: list[Group] = []
    for raw in range(len(fusion.gparent)):
        if fusion.gfind(raw) != raw:
            continue
        number[raw] = len(groups)
        roots = list(dict.fromkeys(fusion.find(a) for a in fusion.gatoms[raw]))
        reduce = {fusion.find(a) for a in fusion.greduce[raw]}
        local.update({a: k for k, a in enumerate(roots)})
        groups.append(
            Group(
                number[raw], fusion.gkind[raw], tuple(fusion.size[a] for a in roots),
                tuple(not fusion.blocked[a] and fusion.size[a] > 1 for a in roots),
                frozenset(local[a] for a in reduce),
                tuple(o for o in fusion.gops[raw] if live[o]), fusion.gname[raw],
            )
        )

    def done(layout: Layout) -> Layout:
        return tuple(LAYOUT_NONE if a == LAYOUT_NONE else local[fusion.find(a)] for a in layout)

    def at(group: int) -> int:
        return number[fusion.gfind(group)]

    carried = {graph.inputs[i] for i, _ in graph.ties}
    updates = {at(fusion.home[v][0]) for v in carried if v in fusion.home}
    shapes = gradient_shapes(graph)
    links = []
    for a, src, b, dst, value, weight, op, operand, partial in raw_links:
        to_use = (groups[at(a)].kind == "input" and op >= 0 and operand >= 0
                  and groups[at(b)].kind == "anchor")
        gradient = partial and at(b) in updates and graph.values[value].shape in shapes
        link = Link(at(a), done(src), at(b), done(dst), value, weight, op, operand, partial,
                    to_use, gradient)
        if link.a != link.b or link.src != link.dst:
            links.append(link)
    home = tuple(
        (at(fusion.home[v.index][0]), done(fusion.home[v.index][1]))
        if v.index in fusion.home else None
        for v in graph.values
    )
    layouts = tuple(
        None if entry is None
        else (at(entry[0]), tuple(map(done, entry[1])), tuple(map(done, entry[2])))
        for entry in op_layouts
    )
    return Groups(tuple(groups), tuple(links), home, layouts)
