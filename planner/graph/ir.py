"""The operator graph: values, operations, regions. Plain frozen data, no jax.

Invariants (``verify``): every value has one producer (an operation or the inputs);
operations are in program order; an operation reads values that are made before it, except
``loop_back``, which closes a loop.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from planner.errors import InternalError

if TYPE_CHECKING:  # takes a fifth of a second to import, and only the view needs it
    import networkx as nx

SCALAR = -1
"""Operand index of a literal: no value, nothing to shard."""


RAGGED = frozenset({"ragged_dot", "ragged_dot_general"})
"""Products of groups of rows, each group with a different matrix."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"}) | RAGGED
"""Operations that multiply and add: they take most of a step's time."""


class Phase(StrEnum):
    """The part of a train step that an operation belongs to (``planner.graph.labels.phases``)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Role(StrEnum):
    """Role of a value in a train step (``planner.graph.labels.roles``). The first five are state:
    arguments that come back as results; ``EXAMPLES`` has a row per example, such as hidden states
    of truncated backpropagation, caches and environments."""

    PARAMETER = "parameter"
    MOMENT = "moment"
    STATISTIC = "statistic"
    EXAMPLES = "examples"
    KEY = "key"
    BATCH = "batch"
    ARGUMENT = "argument"
    FROZEN = "frozen"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    COTANGENT = "cotangent"
    UPDATE = "update"
    NEXT = "next"


@dataclass(frozen=True, slots=True)
class Value:
    """One array.

    Attributes:
        index: its number.
        shape, dtype, itemsize: of the whole array; bytes of an element.
        op: its producer, or -1 for inputs and constants.
        name: the path of an input, ``"const"`` of a constant.
        host: whether the model itself put it into host memory.
        role: its role in the step.
        of: the input that a gradient, a moment or a next value belongs to, or -1.
        carried: whether it is an input that comes back as a result: the state of the step.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    op: int
    name: str = ""
    host: bool = False
    role: Role = Role.ACTIVATION
    of: int = -1
    carried: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        size = self.itemsize
        for n in self.shape:
            size *= n
        return size

    @property
    def splits(self) -> bool:
        """Whether there is anything to shard: dimensions, and elements."""
        return bool(self.shape) and 0 not in self.shape

    @property
    def fed(self) -> bool:
        """Of an input: whether the host may feed it; no state, frozen weights or keys."""
        return not self.carried and self.role not in (Role.FROZEN, Role.KEY)

    @property
    def has_examples(self) -> bool:
        """Of an input: whether it may have a row per example: fed inputs, and some state."""
        return self.fed or self.role is Role.EXAMPLES

    def labelled(self, role: Role, of: int, carried: bool) -> Value:
        """The same with a role."""
        return Value(
            self.index,
            self.shape,
            self.dtype,
            self.itemsize,
            self.op,
            self.name,
            self.host,
            role,
            of,
            carried,
        )

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. ``kind`` is the jax primitive, or one of ours for loop borders.

    ``attrs`` distinguishes operations of equal kind and shape (hash of the parameters);
    ``fused`` names the call of a function that stands for one kernel (``step.kernels.fused``);
    ``effect``: it has side effects (prints, calls the host, writes to a reference), so it runs even
    if its results are unused; ``segment`` is the repeated block that it belongs to and the copy of
    that block, (-1, 0) for none; ``passes`` is the number of bfloat16 products of a float32 product
    that requests a precision (1: it requests none); ``work`` is the work of a kernel or of a region
    of the user's in one run, as (kind of kernel, flop, bytes): for a kernel the total, with 0 bytes
    (its operands give them), for a ``shard_map`` one device's part; ``sends`` is what a
    ``shard_map`` sends (``planner.rules.kernels.inside``); ``held`` is the bytes that it allocates
    inside: if compilers multiply ragged products by group, and if they mask them.
    """

    index: int
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    region: int
    attrs: str = ""
    source: str = ""
    fused: str = ""
    effect: bool = False
    phase: Phase = Phase.FORWARD
    segment: tuple[int, int] = (-1, 0)
    passes: int = 1
    work: tuple[tuple[str, float, float], ...] = ()
    sends: tuple[tuple[str, tuple[int, ...], float, float], ...] = ()
    held: tuple[float, float] = (0.0, 0.0)

    def labelled(self, phase: Phase, segment: tuple[int, int]) -> Op:
        """The same with a phase and a segment; a quarter of the time of ``dataclasses.replace``."""
        return Op(
            self.index,
            self.kind,
            self.inputs,
            self.outputs,
            self.region,
            self.attrs,
            self.source,
            self.fused,
            self.effect,
            phase,
            segment,
            self.passes,
            self.work,
            self.sends,
            self.held,
        )

    @property
    def kernel(self) -> str:
        """The kind of most of ``work``; "" if the operation's kind says what it does."""
        return self.work[0][0] if self.work else ""


@dataclass(frozen=True, slots=True)
class Block:
    """``count`` equal runs of ``length`` operations, back to back from operation ``start``."""

    start: int
    length: int
    count: int

    @property
    def end(self) -> int:
        """Index of the first operation after the last repetition."""
        return self.start + self.length * self.count


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of the program that runs ``weight`` times a step (product of trip counts)."""

    index: int
    kind: str
    parent: int
    trips: int
    weight: float
    known: bool = True


@dataclass(frozen=True)
class Graph:
    """A traced step.

    ``ties`` pairs an input position with the output that carries it on; ``blocks`` are the repeated
    blocks, by number.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    regions: tuple[Region, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    ties: tuple[tuple[int, int], ...]
    blocks: tuple[Block, ...] = ()

    @cached_property
    def state(self) -> tuple[int, ...]:
        """The inputs that come back as outputs, in their order."""
        return tuple(self.inputs[i] for i, _ in self.ties)

    @cached_property
    def next_values(self) -> Mapping[int, int]:
        """Per input of the state, the value that takes its place in the next step (``SCALAR``: a
        literal)."""
        return {self.inputs[i]: self.outputs[o] for i, o in self.ties}

    @cached_property
    def reports(self) -> tuple[int, ...]:
        """The results besides the state: the loss and other metrics (no literals)."""
        back = {o for _, o in self.ties}
        return tuple(v for k, v in enumerate(self.outputs) if k not in back and v != SCALAR)

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """The inputs that the host feeds at every step; none in a step without state."""
        return tuple(v for v in self.inputs if self.values[v].role is Role.BATCH)

    def changes_memory(self, op: Op) -> bool:
        """Whether an operation copies an operand between device and host memory."""
        return op.kind == "device_put" and bool(self.memory_changes(op))

    def memory_changes(self, op: Op) -> tuple[int, ...]:
        """Which operands an operation copies between device and host memory."""
        if op.kind != "device_put":
            return ()
        pairs = enumerate(zip(op.inputs, op.outputs, strict=True))
        return tuple(
            k for k, (i, o) in pairs if i != SCALAR and self.values[i].host != self.values[o].host
        )

    def op_text(self, op: Op) -> str:
        """One operation as text, without names: what two equal steps share."""
        ins = ", ".join("lit" if i == SCALAR else str(self.values[i]) for i in op.inputs)
        outs = ", ".join(str(self.values[o]) for o in op.outputs)
        attrs = f" {{{op.attrs}}}" if op.attrs else ""
        return f"{op.kind}({ins}) -> {outs}{attrs}"

    def __str__(self) -> str:
        return self.text()

    def text(self, *, folded: bool = False) -> str:
        """The graph in lines: arguments, constants, operations under their phase and segment,
        results.

        Args:
            folded: print only the first copy of every repeated block.
        """
        from planner.graph.views import graph_text

        return graph_text(self, folded)

    def verify(self) -> None:
        """Check the invariants of the module docstring; raises InternalError."""
        defined = {v.index for v in self.values if v.op == -1}
        for position, op in enumerate(self.ops):
            if op.index != position:
                raise InternalError(f"operation {op.index} stands at {position}")
            for i in op.inputs:
                if i != SCALAR and i not in defined:
                    raise InternalError(f"{self.op_text(op)} reads %{i} before it is made")
            for o in op.outputs:
                if o in defined or self.values[o].op != op.index:
                    raise InternalError(f"%{o} has two producers or the wrong one")
                defined.add(o)
        missing = [o for o in self.outputs if o != SCALAR and o not in defined]
        if missing:
            raise InternalError(f"outputs {missing} are never made")

    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Per value, the operations that read it, in order."""
        out: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for i in dict.fromkeys(op.inputs):
                if i != SCALAR:
                    out[i].append(op.index)
        return tuple(tuple(c) for c in out)

    @cached_property
    def read_once(self) -> frozenset[int]:
        """Results of operations that a single operation reads, besides the borders (``loop_back``,
        ``loop_out``) of a loop that carries them."""
        count = [0] * len(self.values)
        for op in self.ops:
            if op.kind not in ("loop_back", "loop_out"):
                for v in {v for v in op.inputs if v != SCALAR}:
                    count[v] += 1
        single = {k for k, n in enumerate(count) if n == 1}
        return frozenset(single - {*self.inputs, *self.outputs})

    def live_ops(self) -> tuple[bool, ...]:
        """Which operations reach an output (loop carries included) or have an effect."""
        return self._live

    @cached_property
    def _live(self) -> tuple[bool, ...]:
        wanted = {i for op in self.ops if op.effect for i in op.inputs}
        live = self.needed_for({*self.outputs, *wanted})[1]
        return tuple(op.effect or live[op.index] for op in self.ops)

    def needed_for(
        self, values: Iterable[int], once: Container[int] = ()
    ) -> tuple[set[int], list[bool]]:
        """All values that ``values`` depend on, through loop carries too, and per operation whether
        they depend on it. For loops whose regions are in ``once``, one iteration counts: what it
        reads, but not what earlier iterations made of that. O(operations)."""
        live = [False] * len(self.ops)
        wanted = {v for v in values if v != SCALAR}
        backs: dict[int, list[Op]] = {}
        for op in self.ops:
            if op.kind in ("loop_back", "loop_test") and op.region not in once:
                for carry in op.inputs[1:]:
                    backs.setdefault(carry, []).append(op)
        stack = list(wanted)
        while stack:
            value = self.values[stack.pop()]
            producers = [] if value.op < 0 else [self.ops[value.op]]
            ops = producers + backs.get(value.index, [])
            for op in ops:
                if not live[op.index]:
                    live[op.index] = True
                    fresh = [i for i in op.inputs if i != SCALAR and i not in wanted]
                    wanted.update(fresh)
                    stack.extend(fresh)
        return wanted, live

    def to_networkx(self) -> nx.DiGraph:
        """A networkx view: a node per operation and input, an edge per value read.

        Node attributes: ``kind``, ``source``, ``region``; edge attributes: ``value``,
        ``shape``, ``dtype``, ``nbytes``.
        """
        from planner.graph.views import networkx_view

        return networkx_view(self)

    def texts(self) -> Iterator[str]:
        """Operation texts in order; two steps are the same when these and the inputs are."""
        for op in self.ops:
            yield self.op_text(op)

    @cached_property
    def codes(self) -> tuple[int, ...]:
        """One number per operation, equal where the texts are, in order of first appearance
        (built without making the texts)."""
        kinds: dict[tuple[tuple[int, ...], str], int] = {}
        types = [kinds.setdefault((v.shape, v.dtype), len(kinds)) for v in self.values]
        types.append(SCALAR)  # operand SCALAR (-1) reads the last entry
        known: dict[object, int] = {}
        out = []
        for op in self.ops:
            ins, outs = tuple([types[i] for i in op.inputs]), tuple([types[o] for o in op.outputs])
            out.append(known.setdefault((op.kind, ins, outs, op.attrs), len(known)))
        return tuple(out)

    def firsts(self) -> tuple[int, ...]:
        """The first operation of each code."""
        first: dict[int, int] = {}
        for index, code in enumerate(self.codes):
            first.setdefault(code, index)
        return tuple(first.values())
