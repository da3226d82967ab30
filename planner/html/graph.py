"""The operator graph of a plan for drawing: repeated blocks once, small operations joined.

Inside a segment, operations that mix dimensions and reductions are nodes. Elementwise operations
share a node if nothing heavier is between them (kernels are counted in the same way, see
``step.kernels.starts``). Operations that only rename a value (reshapes, casts of one array) are no
nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.graph.ir import SCALAR, Block, Graph, Op
from planner.plan.extract import Extraction, Sent
from planner.spec import Sharding
from planner.step.analysis import does_nothing

MOST_NODES = 400
"""Largest number of nodes drawn per segment; the cheapest others are left out and counted."""
_RENAMES = frozenset(
    "reshape squeeze expand_dims transpose broadcast_in_dim convert_element_type copy "
    "reduce_precision iota".split()
)


@dataclass(frozen=True)
class ArrayNode:
    """A value and its sharding: ``axes[d]`` are the mesh axes that split dimension d."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Node:
    """One heavy operation or a run of elementwise ones; seconds are those of all repetitions."""

    kind: str
    ops: int
    result: ArrayNode | None
    reads: tuple[ArrayNode, ...]
    """Arguments of the step that it reads."""
    before: tuple[int, ...]
    """Nodes of the segment that it reads."""
    layer: int
    compute_s: float
    sends: tuple[tuple[str, tuple[str, ...], float, float], ...]
    """Collectives that it causes: kind, mesh axes, runs per step, seconds."""
    source: str


@dataclass(frozen=True)
class Segment:
    """Consecutive operations, repeated ``count`` times; ``region``: the loop that contains them."""

    start: int
    length: int
    count: int
    region: str
    nodes: tuple[Node, ...]
    left_out: int
    compute_s: float
    communication_s: float
    updates: bool
    """Whether it computes results that the next step reads."""
    sources: tuple[str, ...]
    alike: bool
    """Whether every repetition has the same shardings."""


def segments(
    plan: Extraction, seconds: Sequence[float], sent: Sequence[Sent]
) -> tuple[Segment, ...]:
    """The step in pieces, in program order. Near-linear in operations.

    Args:
        plan: the chosen plan.
        seconds: per operation, its compute seconds.
        sent: the plan's collectives.
    """
    by_op: dict[int, list[Sent]] = {}
    for s in sent:
        by_op.setdefault(s.op, []).append(s)
    live = plan.graph.live_ops()
    return tuple(
        _Drawing(plan, seconds, by_op, block).run()
        for block in _pieces(plan.graph)
        if any(live[block.start : block.end])
    )


def _pieces(graph: Graph) -> Iterator[Block]:
    """Repeated blocks and the runs between them, which end where a loop begins or ends."""
    at = 0
    for block in (*graph.blocks, Block(len(graph.ops), 0, 0)):
        while at < block.start:
            stop = at + 1
            while stop < block.start and _outer(graph, stop) == _outer(graph, at):
                stop += 1
            yield Block(at, stop - at, 1)
            at = stop
        if block.count:
            yield block
        at = block.end


def _outer(graph: Graph, op: int) -> int:
    """The outermost region around an operation (0: the step itself)."""
    region = graph.ops[op].region
    while region > 0 and graph.regions[region].parent > 0:
        region = graph.regions[region].parent
    return region


class _Drawing:
    """Builds one segment of ``segments``."""

    def __init__(
        self,
        plan: Extraction,
        seconds: Sequence[float],
        by_op: dict[int, list[Sent]],
        block: Block,
    ) -> None:
        self.plan, self.graph, self.block = plan, plan.graph, block
        self.seconds, self.by_op = seconds, by_op
        self.live = self.graph.live_ops()
        self.params = dict(zip(self.graph.inputs, self.graph.input_paths, strict=True))
        self.parent: list[int] = []
        self.ops: list[list[Op]] = []
        self.depth: dict[int, int] = {}  # heavy operations before a value of the segment
        self.node: dict[int, int] = {}  # the node that computes a value
        self.light: dict[int, bool] = {}

    def find(self, node: int) -> int:
        while self.parent[node] != node:
            node = self.parent[node]
        return node

    def run(self) -> Segment:
        block, graph = self.block, self.graph
        first = graph.ops[block.start : block.start + block.length]
        for op in first:
            if self.live[op.index]:
                self.place(op)
        nodes = self.nodes()
        shown = sorted(sorted(range(len(nodes)), key=lambda k: -nodes[k].compute_s)[:MOST_NODES])
        outer = graph.regions[_outer(graph, block.start)]
        every = range(block.start, block.end)
        carried = set(graph.next_values.values())
        sources = dict.fromkeys(op.source for op in first if op.source and self.live[op.index])
        return Segment(
            block.start,
            block.length,
            block.count,
            f"{outer.kind} x{outer.weight:g}" if outer.index else "",
            tuple(_renumbered(nodes, shown)),
            len(nodes) - len(shown),
            sum(self.seconds[k] for k in every),
            sum(s.time_s for k in every for s in self.by_op.get(k, ())),
            any(o in carried for k in every for o in graph.ops[k].outputs),
            tuple(sources),
            self.alike(),
        )

    def alike(self) -> bool:
        """Whether all repetitions have the shardings of the first."""
        block = self.block
        for k in range(block.start + block.length, block.end):
            twin = self.graph.ops[block.start + (k - block.start) % block.length]
            for a, b in zip(self.graph.ops[k].outputs, twin.outputs, strict=True):
                if self.live[k] and self.plan.value_sharding(a) != self.plan.value_sharding(b):
                    return False
        return True

    def place(self, op: Op) -> None:
        """Assign an operation to a node."""
        values = self.graph.values
        inputs = [i for i in dict.fromkeys(op.inputs) if i != SCALAR and values[i].shape]
        if not any(values[o].shape for o in op.outputs) and not inputs:
            return
        inside = [i for i in inputs if i in self.node]
        renames = does_nothing(op) or op.kind in _RENAMES
        if renames and len(inside) == len(inputs) == 1:
            for o in op.outputs:
                self.node[o], self.depth[o] = self.node[inside[0]], self.depth[inside[0]]
                self.light[o] = self.light[inside[0]]
            self.ops[self.find(self.node[inside[0]])].append(op)
            return
        if renames and not inside:
            return  # renames an argument, a value of another segment, or a constant
        reduces = op.kind.startswith(("reduce_", "arg"))
        heavy = reduces or not (self.plan.priced.analysis.groups.fusable[op.index] or renames)
        level = max([self.depth[i] for i in inside], default=0)
        new_node = len(self.parent)
        self.parent.append(new_node)
        self.ops.append([op])
        if not heavy:
            for i in inside:
                other = self.find(self.node[i])
                if self.light[i] and self.depth[i] == level and other != new_node:
                    self.parent[other] = new_node
                    self.ops[new_node] = [*self.ops[other], *self.ops[new_node]]
                    self.ops[other] = []
        for o in op.outputs:
            self.node[o], self.light[o] = new_node, not heavy
            self.depth[o] = level + heavy

    def argument(self, value: int) -> int | None:
        """The argument of the step that a value renames, or None."""
        while value not in self.params:
            maker = self.graph.values[value].op
            if maker < 0:
                return None
            op = self.graph.ops[maker]
            inputs = [i for i in op.inputs if i != SCALAR]
            same = does_nothing(op) and op.kind not in ("loop_carry", "loop_out", "branch_out")
            if not (same or op.kind in _RENAMES) or len(inputs) != 1:
                return None
            value = inputs[0]
        return value

    def nodes(self) -> list[Node]:
        """The nodes in program order of their last operations, layered."""
        roots = [k for k in range(len(self.parent)) if self.find(k) == k]
        roots.sort(key=lambda k: max(op.index for op in self.ops[k]))
        number = {root: k for k, root in enumerate(roots)}
        reads: list[list[int]] = []
        for root in roots:
            inputs = [i for op in self.ops[root] for i in op.inputs if i in self.node]
            read_nodes = {number[self.find(self.node[i])] for i in inputs} - {number[root]}
            reads.append(sorted(read_nodes))
        layer = _layers(reads)
        return [
            self.described(self.ops[root], tuple(reads[k]), layer[k])
            for k, root in enumerate(roots)
        ]

    def described(self, ops: Sequence[Op], before: tuple[int, ...], layer: int) -> Node:
        """The node of some operations, with its text and figures."""
        values, length = self.graph.values, self.block.length
        heavy = [op for op in ops if not does_nothing(op) and op.kind not in _RENAMES]
        main = max(heavy or ops, key=lambda op: (self.seconds[op.index], op.index))
        outputs = [o for op in ops for o in op.outputs if values[o].shape]
        best = max(outputs, key=lambda o: (values[o].nbytes, o), default=None)
        names = dict.fromkeys(op.kind for op in heavy or ops)
        arguments: dict[int, None] = {}
        for op in ops:
            for i in op.inputs:
                argument = None if i == SCALAR or i in self.node else self.argument(i)
                if argument is not None:
                    arguments[argument] = None
        sums: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        compute, names_of = 0.0, self.plan.priced.mesh.names
        for op in ops:
            for k in range(op.index, self.block.end, length):
                compute += self.seconds[k]
                for s in self.by_op.get(k, ()):
                    key = (s.step.kind, tuple(names_of[a] for a in s.step.axes))
                    total = sums.setdefault(key, [0.0, 0.0])
                    total[0] += s.count
                    total[1] += s.time_s
        return Node(
            ", ".join(names),
            len(ops),
            None if best is None else self.array(best, ""),
            tuple(self.array(v, self.params[v], "use") for v in arguments),
            before,
            layer,
            compute,
            tuple((kind, axes, n, s) for (kind, axes), (n, s) in sums.items()),
            main.source,
        )

    def array(self, value: int, name: str, port: str = "store") -> ArrayNode:
        """A value with its sharding."""
        v = self.graph.values[value]
        spec: Sharding = self.plan.value_sharding(value, port)
        return ArrayNode(name, v.shape, v.dtype, spec.dims)


def _layers(reads: Sequence[Sequence[int]]) -> list[int]:
    """The layer of each node: the first one below all nodes that it reads. Nodes that depend on
    nothing else in the segment, such as a mask, move down to their reader.

    ``reads`` has no cycles, but need not be in order.
    """
    readers: list[list[int]] = [[] for _ in reads]
    for k, before in enumerate(reads):
        for b in before:
            readers[b].append(k)
    missing = [len(before) for before in reads]
    order = [k for k, n in enumerate(missing) if not n]
    layer = [0] * len(reads)
    for k in order:  # grows during the loop
        for after in readers[k]:
            layer[after] = max(layer[after], layer[k] + 1)
            missing[after] -= 1
            if not missing[after]:
                order.append(after)
    loose = [False] * len(reads)
    for k in order:
        loose[k] = all(loose[b] and len(readers[b]) == 1 for b in reads[k])
    for k in reversed(order):
        if readers[k] and loose[k]:
            layer[k] = min(layer[after] for after in readers[k]) - 1
    return layer


def _renumbered(nodes: Sequence[Node], shown: Sequence[int]) -> Iterator[Node]:
    """The nodes that are shown, renumbered."""
    number = {k: new for new, k in enumerate(shown)}
    for k in shown:
        before = tuple(number[b] for b in nodes[k].before if b in number)
        yield dataclasses.replace(nodes[k], before=before)
