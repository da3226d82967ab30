"""A scheduled module: collectives and estimated cycles, multiplied by the trips of loops.

Counts are per run of the step on one device:

- A collective counts wherever it is: at top level, in a called or fused computation, behind an
  ``async-start`` or ``call-start``, or as a ``-start`` / ``-done`` pair (counted at the start).
- A chain of XLA:TPU counts once, where it starts: XLA:TPU spreads an asynchronous collective over
  several fusions with one ``chain_id``, each of which contains the whole collective.
- The count is multiplied by the trips of the loops around it (`executor.verify.hlo.loops`). A
  branch of a conditional counts one over the number of branches, as in a plan.

Payload of a collective (bytes on one device, layouts and padding left out), as in a plan: the
gathered result of an all-gather, the unreduced input of a reduce-scatter, the tensor of an
all-reduce, the local shard of an all-to-all or a permute. Wire bytes are what one device sends in
the bandwidth-optimal algorithm among n members (Thakur, Rabenseifner and Gropp 2005): (n-1)/n of
the payload, twice that for an all-reduce, the payload itself for a permute or a broadcast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from executor.verify.hlo.loops import trip_count
from executor.verify.hlo.text import Computation, Groups, Instruction, parse

HLO_NAMES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
_MOVES_NOTHING = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id while "
    "conditional call custom-call async-update optimization-barrier send recv".split()
)
_IGNORED = ("async-done", "async-update")
_STARTS = ("async-start", "call-start")
"""Run a computation beside the others; on tpu7x ``call-start`` runs collectives on SparseCores."""
_STARTS_CHAIN = "AsyncCollectiveStart"


@dataclass(frozen=True)
class HloCollective:
    """A collective of a compiled module.

    ``count`` is the number of runs per step, ``group_size`` the number of devices that take part,
    and ``groups`` the device numbers of each group (empty for a permute). ``payload_bytes`` and
    ``wire_bytes`` are for one run on one device. ``name`` is the operation of the step that it
    comes from. ``beside_cycles`` are the compiler's cycles of what is scheduled between its start
    and its end; 0 for one that blocks.
    """

    kind: str
    count: float
    group_size: int
    groups: Groups
    payload_bytes: float
    wire_bytes: float
    name: str
    beside_cycles: float = 0.0


@dataclass(frozen=True)
class Total:
    """Sums over collectives, multiplied by the trips of loops; bytes are per device and step."""

    count: float
    payload_bytes: float
    wire_bytes: float


@dataclass(frozen=True)
class Module:
    """What one device does in a step.

    ``cycles`` sums the compiler's ``estimated_cycles`` of all operations but collectives (TPU; 0
    elsewhere). ``notes`` names loops whose trips are unknown; they count once. ``unpriced_bytes``
    is the memory traffic of operations without such an estimate: gathers, scatters, sorts.
    """

    collectives: tuple[HloCollective, ...]
    cycles: float
    notes: tuple[str, ...]
    unpriced_bytes: float = 0.0

    def by_kind(self) -> dict[str, Total]:
        """Totals per kind of collective, in order of names."""
        return {
            kind: total([c for c in self.collectives if c.kind == kind])
            for kind in sorted({c.kind for c in self.collectives})
        }

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per step."""
        return total(self.collectives).wire_bytes


def total(collectives: tuple[HloCollective, ...] | list[HloCollective]) -> Total:
    """Sums over some collectives."""
    return Total(
        math.fsum(c.count for c in collectives),
        math.fsum(c.count * c.payload_bytes for c in collectives),
        math.fsum(c.count * c.wire_bytes for c in collectives),
    )


def wire_bytes(kind: str, payload_bytes: float, group_size: int) -> float:
    """Bytes that a device sends for one collective among ``group_size`` (>= 1) devices."""
    if group_size <= 1:
        return 0.0
    if kind in ("permute", "broadcast"):
        return payload_bytes
    share = payload_bytes * (group_size - 1) / group_size
    return 2.0 * share if kind == "all_reduce" else share


def read_module(text: str) -> Module:
    """Read the text of a compiled module (``jax.stages.Compiled.as_text()``).

    Raises:
        ValueError: not HLO text: no entry computation.
    """
    module = parse(text)
    reader = _Reader(module.computations, module.partitions)
    reader.visit(module.entry, 1.0, fused=False)
    unpriced = reader.unpriced if reader.cycles else 0.0
    return Module(tuple(reader.collectives), reader.cycles, tuple(reader.notes), unpriced)


def text_counts(text: str) -> dict[str, int]:
    """The number of collectives in the text of a module, by kind. A collective inside a loop counts
    once, and so does an asynchronous pair.

    Raises:
        ValueError: not HLO text.
    """
    counts = Counter(
        kind
        for computation in parse(text).computations.values()
        for at in computation.instructions.values()
        if (kind := _kind(computation, at)) is not None
    )
    return dict(sorted(counts.items()))


class _Reader:
    """Walks the computations from the entry, with the trips of surrounding loops as weights."""

    def __init__(self, computations: Mapping[str, Computation], devices: int) -> None:
        self.computations, self.devices = computations, devices
        self.collectives: list[HloCollective] = []
        self.cycles = self.unpriced = 0.0
        self.notes: list[str] = []
        self.beside: dict[Chain | str, float] = {}
        self.chains = _chain_starts(computations)

    def visit(self, name: str, weight: float, *, fused: bool) -> None:
        computation = self.computations[name]
        if not fused:
            self.beside.update(_beside(self.computations, computation))
        for instruction in computation.instructions.values():
            kind = _kind(computation, instruction)
            if kind is not None:
                chain = _chain(instruction)
                here = (name, instruction.name)
                if chain and self.chains.setdefault(chain, here) != here:
                    continue
                self.collectives.append(self._collective(computation, instruction, kind, weight))
                continue
            if not fused:
                self.cycles += weight * instruction.cycles
                self.unpriced += weight * self._unpriced(computation, instruction)
            inside = fused or instruction.opcode == "fusion"
            for callee, share in self._callees(computation, instruction):
                if instruction.opcode in _STARTS:
                    hidden = self.beside.get(f"{name}/{instruction.name}", 0.0)
                    inner = self.computations[callee].instructions
                    self.beside.update({f"{callee}/{at}": hidden for at in inner})
                self.visit(callee, weight * share, fused=inside)

    def _callees(self, caller: Computation, at: Instruction) -> Iterator[tuple[str, float]]:
        """Computations that an instruction runs, and how often each."""
        if at.opcode in _IGNORED:
            return
        share = 1.0
        if at.opcode == "while":
            trips = trip_count(self.computations, caller, at)
            if trips is None:
                self.notes.append(f"loop {at.name}: trips unknown, counted once")
            share = 1.0 if trips is None else float(trips)
            if at.callee("condition"):
                yield at.callee("condition"), share
        names = list(at.callees)
        if at.opcode == "conditional":
            share = 1.0 / max(1, len(names))
        if at.opcode in ("call", *_STARTS):
            names.append(at.applied)
        yield from ((name, share) for name in names if name in self.computations)

    def _unpriced(self, computation: Computation, at: Instruction) -> float:
        """Bytes that an instruction without estimated cycles reads and writes. Its largest operand
        is a table, of which only as much is touched as the other operands and the result have."""
        if at.cycles or at.opcode in _MOVES_NOTHING or at.opcode.endswith(("-start", "-done")):
            return 0.0
        inside = [self.computations[c] for c in at.callees if c in self.computations]
        if any(_kind(c, i) for c in inside for i in c.instructions.values()):
            return 0.0
        known = computation.instructions
        sizes = sorted(known[name].nbytes for name in at.operands if name in known)
        table = sizes.pop() if sizes else 0
        return 2.0 * (sum(sizes) + (at.nbytes if at.nbytes != table else 0))

    def _collective(
        self, computation: Computation, at: Instruction, kind: str, weight: float
    ) -> HloCollective:
        groups: Groups = ()
        if kind == "permute":
            size = 2 if any(a != b for a, b in at.pairs) else 1
        else:
            groups = at.groups(self.devices)
            size = max((len(group) for group in groups), default=self.devices)
        payload = float(computation.operand_bytes(at))
        if kind == "all_gather":
            payload *= size
        sent = wire_bytes(kind, payload, size)
        beside = self.beside.get(_chain(at) or f"{computation.name}/{at.name}", 0.0)
        return HloCollective(kind, weight, size, groups, payload, sent, at.op_name, beside)


Chain = tuple[str, str]
"""Ids of a chain and of its channel."""


def _chain(at: Instruction) -> Chain | None:
    """The chain of fusions that an instruction is in, if there is one."""
    return (at.chain, at.channel) if at.chain else None


def _chain_starts(computations: Mapping[str, Computation]) -> dict[Chain, tuple[str, str]]:
    """Where each chain starts: the computation, and the collective that the start reads."""
    starts: dict[Chain, tuple[str, str]] = {}
    for name, computation in computations.items():
        for start in computation.instructions.values():
            if start.opcode != "custom-call" or start.target != _STARTS_CHAIN:
                continue
            for read in start.operands:
                at = computation.instructions.get(read)
                chain = _chain(at) if at is not None else None
                if chain:
                    starts[chain] = (name, read)
    return starts


def _beside(
    computations: Mapping[str, Computation], computation: Computation
) -> dict[Chain | str, float]:
    """Cycles scheduled between start and end of the asynchronous collectives of a computation, by
    chain, or for a ``-start`` by its computation and name."""
    begun: dict[Chain | str, float] = {}
    cycles: dict[Chain | str, float] = {}
    passed = 0.0
    for at in computation.instructions.values():
        inside = [computations[c] for c in at.callees if c in computations]
        for inner in (i for c in inside for i in c.instructions.values()):
            key = _chain(inner) if _kind(computation, inner) else None
            if key is not None:
                cycles[key] = passed - begun.setdefault(key, passed)
        if at.opcode.endswith("-done"):
            for read in at.operands:
                start = f"{computation.name}/{read}"
                if start in begun:
                    cycles[start] = passed - begun[start]
        passed += at.cycles
        if at.opcode.endswith("-start"):
            begun[f"{computation.name}/{at.name}"] = passed
    return cycles


def _kind(computation: Computation, at: Instruction) -> str | None:
    """The kind of a collective, None for other instructions. XLA:TPU writes a reduce-scatter as an
    all-reduce fused with a slice of its result."""
    kind = HLO_NAMES.get(at.opcode.removesuffix("-start"))
    scattered = kind == "all_reduce" and computation.name.startswith("all-reduce-scatter")
    return "reduce_scatter" if scattered else kind
