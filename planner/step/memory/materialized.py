"""Which values of a traced step are written to memory, and when the kernels that read them run.

The results of operations that mix dimensions are written to memory. Each kernel that reads an
elementwise result recomputes it from its *sources*, as long as this moves no more bytes than
writing it once. docs/explanation/memory.md has the reasons.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.graph.ir import PRODUCTS, SCALAR, Graph, Op, Phase
from planner.step.memory.schedule import activations_first, schedule
from planner.step.op_kinds import (
    ENTERED,
    FILLS,
    FOLDED,
    JOINED,
    PASSES,
    PICKED,
    SLICES,
    VIEWS,
    extents,
    joins_rows,
    runs_alone,
    selects,
    writes,
)

SMALL = 1 / 16
"""Share of an array's bytes; every reader of it may read as much again to compute what it needs."""

MAX_SOURCES = 24
"""An elementwise result of more arrays than this is written (compilers bound their kernels)."""


@dataclass(frozen=True, eq=False)
class Written:
    """The values that are written, and when they are read.

    Attributes:
        kept: per value, whether it is written to memory.
        nbytes: per value, its size as it is written.
        reads: per value that is kept, the times at which kernels read it, in order.
        base: per value, the value whose memory it is read from: itself, or the one it is a view of.
        sources: per value, the values that a kernel reads to use it, with the bytes: itself if it
            is kept, else the kept values that it is computed from.
        order: operation indices in the order in which they run: as traced, or that of
            ``schedule`` or ``activations_first``.
        passed: values that a product's kernel passes to an elementwise operation in it.
        time: per operation, its place in ``order``.
        merges: whether kernels without common operands are merged, as on GPUs.
        normalizes: whether a kernel reduces the rows of an array and reads them again, like those
            of softmax and norms on GPUs; it does not overwrite them.
    """

    kept: tuple[bool, ...]
    nbytes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    base: tuple[int, ...]
    sources: tuple[Mapping[int, int], ...]
    order: tuple[int, ...]
    time: tuple[int, ...]
    passed: frozenset[int]
    merges: bool
    normalizes: bool = False

    def without(self, inside: Sequence[bool]) -> Written:
        """The same, without values that never leave a hand-written kernel."""
        if not any(inside):
            return self
        is_written = tuple([k and not i for k, i in zip(self.kept, inside, strict=True)])
        sources = tuple([{s: n for s, n in x.items() if not inside[s]} for x in self.sources])
        return dataclasses.replace(self, kept=is_written, sources=sources)


def written(
    graph: Graph,
    fusable: Sequence[bool],
    live: Sequence[bool],
    fused_operands: bool = False,
    late: bool = False,
    normalizes: bool = False,
    stored: bool = False,
) -> Written:
    """Separate values that are written from those that their readers recompute.

    Args:
        graph: the step.
        fusable: per operation, whether it only passes dimensions along.
        live: per operation, whether its results are used.
        fused_operands: whether a product computes its elementwise operands itself, as on TPUs.
        late: whether operations that only the update needs come last (``schedule``).
        normalizes: see ``Written``.
        stored: whether a softmax, or its gradient, is written once for several products.

    Complexity: O(operands * MAX_SOURCES).
    """
    written_values = _Writing(graph, fusable, live, fused_operands, late, stored).run()
    return dataclasses.replace(written_values, normalizes=True) if normalizes else written_values


class _Writing:
    """``written`` in progress."""

    def __init__(
        self,
        graph: Graph,
        fusable: Sequence[bool],
        live: Sequence[bool],
        fused_operands: bool,
        late: bool,
        stored: bool,
    ) -> None:
        self.graph, self.live, self.fused_operands = graph, live, fused_operands
        self.stored = stored
        self.final = set(graph.outputs)
        narrow = self._narrow() if fused_operands else [False] * len(graph.values)
        self.nbytes = [v.nbytes // (1 + n) for v, n in zip(graph.values, narrow, strict=True)]
        self.light = [
            (op.kind in _LIGHT and not (fused_operands and runs_alone(graph, op)))
            or (fusable[op.index] and not writes(op) and not graph.changes_memory(op))
            or (fused_operands and selects(graph, op))
            for op in graph.ops
        ]
        heavy = [
            not (x or writes(op) or op.kind in _CLOSES or graph.changes_memory(op))
            for x, op in zip(self.light, graph.ops, strict=True)
        ]
        if late:
            self.order = schedule(graph, heavy, live)
        elif fused_operands:
            self.order = activations_first(graph, live)
        else:
            self.order = tuple(range(len(graph.ops)))
        self.time = [0] * len(graph.ops)
        for at, index in enumerate(self.order):
            self.time[index] = at
        self.stop = extents(graph, self.time)[1]
        self.forced = self._forced(fused_operands)
        self.passed = self._passed(fusable) if fused_operands else set()
        self.readers = self._readers()
        self.shared = self._shared() if fused_operands else [False] * len(graph.values)
        self.exponential = [False] * len(graph.values)
        """Per value, whether kernels that read it compute exponentials of what they read."""
        self.kept = [v.op == -1 for v in graph.values]
        self.reads: list[list[int]] = [[] for _ in graph.values]
        self.base = list(range(len(graph.values)))
        self.sources: list[dict[int, int]] = [
            {v.index: v.nbytes} if v.op == -1 else {} for v in graph.values
        ]

    def _forced(self, fused_operands: bool) -> list[bool]:
        """Values that must be written: read by an operation that does not compute them itself."""
        forced = [False] * len(self.graph.values)
        selected: set[int] = set()  # made from a ``selects``: products do not compute these
        for op in self.graph.ops:
            if not self.live[op.index] or writes(op):
                continue
            if self.light[op.index]:
                if selects(self.graph, op) or not selected.isdisjoint(op.inputs):
                    selected.update(op.outputs)
                if fused_operands and op.kind == "reshape" and self._repeats(op.inputs[0]):
                    forced[op.inputs[0]] = True
                if not (op.kind in ENTERED or (fused_operands and joins_rows(self.graph, op))):
                    continue
            inputs: Iterable[int] = op.inputs
            if op.kind in PRODUCTS and fused_operands and not op.fused:
                inputs = selected.intersection(inputs)
            for i in inputs:
                while i != SCALAR and not forced[i]:
                    maker = self.graph.values[i].op
                    if maker >= 0 and self.graph.ops[maker].kind in FOLDED:
                        i = self.graph.ops[maker].inputs[0]
                        continue
                    forced[i] = True
        return forced

    def _repeats(self, value: int) -> bool:
        """Whether a value repeats elements of an array along an extra dimension, as ``jnp.repeat``
        does before it joins two dimensions: XLA:TPU writes it."""
        maker = self.graph.values[value].op if value != SCALAR else -1
        if maker < 0 or self.graph.ops[maker].kind != "broadcast_in_dim":
            return False
        (source, *_), out = self.graph.ops[maker].inputs, self.graph.values[value]
        if source == SCALAR:
            return False
        inner = self.graph.values[source].shape
        return 1 < math.prod(inner) < math.prod(out.shape) and len(out.shape) > len(inner) > 1

    def _passed(self, fusable: Sequence[bool]) -> set[int]:
        """Results of products that are not written: each has one reader, an elementwise operation
        in the product's kernel. The result of the last such operation is written. A gradient is
        passed to its update as it is made."""
        graph = self.graph
        readers: list[list[int]] = [[] for _ in graph.values]
        for op in graph.ops:
            if self.live[op.index]:
                for i in set(op.inputs):
                    if i != SCALAR:
                        readers[i].append(op.index)
        passed: set[int] = set()
        claimed: set[int] = set()  # a kernel has one product: the last that an operation reads
        apart = PICKED | JOINED | FILLS | PASSES
        for op in reversed(graph.ops):
            if op.kind not in PRODUCTS or op.fused or not self.live[op.index]:
                continue
            chain, value, end = [], op.outputs[0], 0
            while value not in self.final and len(readers[value]) == 1:
                reader = graph.ops[readers[value][0]]
                later = [graph.ops[r] for o in reader.outputs for r in readers[o]]
                updates = bool(later) and all(r.phase is Phase.UPDATE for r in later)
                same = reader.region == op.region and not updates
                if not (same and fusable[reader.index]) or reader.kind in apart:
                    break
                if reader.index in claimed or len(reader.outputs) != 1:
                    break
                claimed.add(reader.index)
                chain.append(value)
                value = reader.outputs[0]
                if reader.kind not in FOLDED:
                    end, written = len(chain), value
            if end:
                remade = all(
                    (fusable[r] or writes(graph.ops[r]) or graph.ops[r].kind in PRODUCTS)
                    and not graph.ops[r].kind.startswith(("loop_", "branch_"))
                    and graph.ops[r].kind not in apart
                    for r in readers[written]
                )
                if remade and not (written in self.final or self.forced[written]):
                    end, written = self._narrowed([*chain[:end], written])
                passed.update(chain[:end])
                self.forced[written] = True
        return passed

    def _narrowed(self, chain: Sequence[int]) -> tuple[int, int]:
        """The value of a chain that a product's kernel writes, and its place: the last, or the
        narrower one that it is made from, such as the scores of attention, which every reader
        converts and masks again."""
        graph, last = self.graph, len(chain) - 1
        for place in range(last - 1, -1, -1):
            value = chain[place]
            op = graph.ops[graph.values[chain[place + 1]].op]
            others = sum(self._unspread(i) for i in op.inputs if i not in (SCALAR, value))
            if others > SMALL * self.nbytes[value]:
                break
            if self.nbytes[value] < self.nbytes[chain[last]]:
                return place, value
        return last, chain[last]

    def _unspread(self, value: int) -> int:
        """Bytes of a value, or of the array that it repeats."""
        while value != SCALAR and (maker := self.graph.values[value].op) >= 0:
            op = self.graph.ops[maker]
            if op.kind not in FILLS | VIEWS:
                break
            value = op.inputs[0] if op.inputs else SCALAR
        return 0 if value == SCALAR else self.nbytes[value]

    def _narrow(self) -> list[bool]:
        """Float32 results that only products read: written as bfloat16, which products read."""
        graph = self.graph
        wide = [v.op < 0 or v.dtype != "float32" or v.index in self.final for v in graph.values]
        read = [False] * len(graph.values)
        for op in reversed(graph.ops):
            if not self.live[op.index]:
                continue
            passes = op.kind in FOLDED | JOINED and not wide[op.outputs[0]]
            for i in op.inputs:
                if i != SCALAR:
                    read[i] = True
                    wide[i] = wide[i] or not (passes or op.kind in PRODUCTS)
        return [r and not w for r, w in zip(read, wide, strict=True)]

    def _readers(self) -> list[int]:
        """Per value, the number of operations that read it, directly or through views."""
        count = [0] * len(self.graph.values)
        for op in reversed(self.graph.ops):
            if not self.live[op.index]:
                continue
            times = max([count[o] for o in op.outputs], default=0) if op.kind in VIEWS else 1
            for i in set(op.inputs):
                if i != SCALAR:
                    count[i] += times
        return count

    def _shared(self) -> list[bool]:
        """Per value, whether two products or more read it, directly or through views, and nothing
        else."""
        products, readers = [0] * len(self.graph.values), [0] * len(self.graph.values)
        for op in reversed(self.graph.ops):
            if not self.live[op.index]:
                continue
            folded = op.kind in FOLDED and not op.kind.startswith(("loop_", "branch_"))
            for i in set(op.inputs):
                if i != SCALAR:
                    products[i] += products[op.outputs[0]] if folded else op.kind in PRODUCTS
                    readers[i] += readers[op.outputs[0]] if folded else 1
        return [n == p > 1 for n, p in zip(readers, products, strict=True)]

    def run(self) -> Written:
        for op in self.graph.ops:
            if self.live[op.index]:
                self.place(op)
        for o in self.final:
            if o != SCALAR:
                for s in self.sources[o]:
                    self.reads[s].append(len(self.graph.ops))
        reads = tuple(tuple(sorted(times)) for times in self.reads)
        return Written(
            tuple(self.kept),
            tuple(self.nbytes),
            reads,
            tuple(self.base),
            tuple(self.sources),
            self.order,
            tuple(self.time),
            frozenset(self.passed),
            not self.fused_operands,
        )

    def place(self, op: Op) -> None:
        """Decide whether an operation's results are written."""
        if op.kind in FOLDED and op.inputs[0] != SCALAR:
            self.base[op.outputs[0]] = self.base[op.inputs[0]]
        if op.kind in VIEWS:
            for i, o in zip(op.inputs, op.outputs, strict=False):
                self.sources[o] = self.sources[i] if i != SCALAR else {}
                self.exponential[o] = i != SCALAR and self.exponential[i]
            return
        if op.kind == "optimization_barrier":  # written before, and the same memory after
            for i, o in zip(op.inputs, op.outputs, strict=True):
                self.sources[o] = self.sources[i] if i != SCALAR else {}
            return
        sources: dict[int, int] = {}
        for i in op.inputs:
            if i != SCALAR:
                sources.update(self.sources[i])
        small = max([self.nbytes[o] for o in op.outputs], default=0)
        if op.kind in PICKED:
            sources = {s: min(n, small) for s, n in sources.items()}
        write = not self.light[op.index] or len(sources) > MAX_SOURCES
        if op.kind in SLICES and self.fused_operands:  # new tiles are cut once for all readers
            write = write or self.readers[op.outputs[0]] > 1
        if op.kind in FILLS and not sources:
            self.sources[op.outputs[0]] = {}  # operations that need it in memory write it there
            self.kept[op.outputs[0]] = op.outputs[0] in self.final
            return
        exponential = op.kind == "exp" or any(
            self.exponential[i] and not self.kept[i] for i in op.inputs if i != SCALAR
        )
        for o in op.outputs:
            self.exponential[o] = exponential
            if o in self.passed:
                self.sources[o] = {} if op.kind in PRODUCTS else sources
            elif write or self.forced[o] or o in self.final or self._worth(o, sources):
                self.kept[o] = True
                self.sources[o] = {o: self.nbytes[o]}
            else:
                self.sources[o] = sources
        runs = op.kind in PRODUCTS or not op.outputs
        if runs or any(self.kept[o] for o in op.outputs):
            at = self.time[op.index]
            if op.kind == "loop_ys":  # written from inside the loop
                home = self.graph.values[op.inputs[0]].op if op.inputs[0] != SCALAR else -1
                at = max(self.stop[self.graph.ops[home].region], 0) if home >= 0 else at
            for s in sources:
                self.reads[s].append(at)

    def _worth(self, value: int, sources: dict[int, int]) -> bool:
        """Whether writing a value once moves fewer bytes than computing it in every reader. The
        product that makes its source writes a narrowed value, without reading that source. For
        ``stored``, see ``written``."""
        if self.stored and self.exponential[value] and self.shared[value]:
            return True
        k, nbytes, source_bytes = self.readers[value], self.nbytes[value], sum(sources.values())
        narrowed = nbytes < self.graph.values[value].nbytes
        here = [n for s, n in sources.items() if narrowed and self._multiplied(s, value)]
        return k * source_bytes > source_bytes - max(here, default=0) + nbytes + k * nbytes

    def _multiplied(self, source: int, value: int) -> bool:
        """Whether a product makes ``source`` in the loop that makes ``value``."""
        graph = self.graph
        maker, value_op = graph.values[source].op, graph.ops[graph.values[value].op]
        if maker < 0 or graph.ops[maker].kind not in PRODUCTS:
            return False
        return graph.ops[maker].region == value_op.region


_CLOSES = frozenset({"loop_back"})
_LIGHT = PICKED | JOINED | VIEWS
