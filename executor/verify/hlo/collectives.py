"""Read scheduled HLO text: collectives and estimated cycles, loops multiplied out.

What is counted, once per run of the step on one device:

- a collective wherever it stands: at top level, in a called or fused computation, behind an
  ``async-start``, or as a ``-start`` / ``-done`` pair (counted at the start);
- of XLA:TPU's chains once: it spreads an asynchronous collective over several fusions, and each of
  them holds the whole collective again, with one ``chain_id`` (counted where it is started);
- times the trips of the loops around it (`executor.verify.hlo_text.trip_count`); a branch of a
  conditional counts one over the number of branches, as in a plan.

Payload of a collective (bytes on one device, layouts and padding left out), as in a plan: the
gathered result of an all-gather, the unreduced input of a reduce-scatter, the tensor of an
all-reduce, the local shard of an all-to-all or a permute. Wire bytes are what one device sends in
the bandwidth-optimal algorithm among n members (Thakur, Rabenseifner and Gropp 2005): (n-1)/n of
the payload, twice that for an all-reduce, the payload itself for a permute or a broadcast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor.verify.hlo_text import (
    Computation,
    Instruction,
    operand_bytes,
    operand_names,
    parse_computations,
    trip_count,
)

HLO_NAMES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
_IGNORED = ("async-done", "async-update")
_CALLED = re.compile(r"(?:calls|body|true_computation|false_computation)=%?([\w.\-]+)")
_LISTED = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_APPLIED = re.compile(r"to_apply=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CHAIN = re.compile(r'chain_id="?(\d+)')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_STARTS_CHAIN = 'custom_call_target="AsyncCollectiveStart"'
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class HloCollective:
    """A collective of a compiled module.

    ``count`` is how often it runs a step, ``group_size`` how many devices take part, ``groups``
    the device numbers of each group (empty for a permute), ``payload_bytes`` and ``wire_bytes``
    are of one run on one device, ``name`` the operation of the step that it comes from.
    """

    kind: str
    count: float
    group_size: int
    groups: tuple[tuple[int, ...], ...]
    payload_bytes: float
    wire_bytes: float
    name: str


@dataclass(frozen=True)
class Total:
    """Sums over collectives, loops multiplied out; bytes of one device a step."""

    count: float
    payload_bytes: float
    wire_bytes: float


@dataclass(frozen=True)
class Module:
    """What one device does in a step.

    ``cycles`` sums the compiler's ``estimated_cycles`` of all operations but collectives (TPU; 0
    elsewhere). ``notes`` names loops whose trips are not known; they count once.
    """

    collectives: tuple[HloCollective, ...]
    cycles: float
    notes: tuple[str, ...]

    def by_kind(self) -> dict[str, Total]:
        """Totals per kind of collective, in order of names."""
        return {
            kind: total([c for c in self.collectives if c.kind == kind])
            for kind in sorted({c.kind for c in self.collectives})
        }

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends a step."""
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
    computations, entry = parse_computations(text)
    found = re.search(r"\bnum_partitions=(\d+)", text[: text.find("\n")])
    reader = _Reader(computations, int(found.group(1)) if found else 1)
    reader.visit(entry, 1.0, fused=False)
    return Module(tuple(reader.collectives), reader.cycles, tuple(reader.notes))


class _Reader:
    """Walks the computations from the entry with the weight of the loops around."""

    def __init__(self, computations: Mapping[str, Computation], devices: int) -> None:
        self.computations, self.devices = computations, devices
        self.collectives: list[HloCollective] = []
        self.cycles = 0.0
        self.notes: list[str] = []
        self.chains = _chain_starts(computations)

    def visit(self, name: str, weight: float, *, fused: bool) -> None:
        computation = self.computations[name]
        for instruction in computation.instructions.values():
            kind = _collective_kind(instruction.opcode)
            if kind is not None:
                chain = _chain(instruction)
                here = (name, instruction.name)
                if chain and self.chains.setdefault(chain, here) != here:
                    continue
                self.collectives.append(self._collective(computation, instruction, kind, weight))
                continue
            if not fused:
                cycles = _CYCLES.search(instruction.attributes)
                self.cycles += weight * int(cycles.group(1)) if cycles else 0.0
            inside = fused or instruction.opcode == "fusion"
            for callee, share in self._callees(computation, instruction):
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
            condition = _CONDITION.search(at.attributes)
            if condition:
                yield condition.group(1), share
        names = _CALLED.findall(at.attributes)
        for listed in _LISTED.findall(at.attributes):
            names += re.findall(r"%?([\w.\-]+)", listed)
        if at.opcode == "conditional":
            share = 1.0 / max(1, len(names))
        if at.opcode in ("call", "async-start"):
            names += _APPLIED.findall(at.attributes)
        yield from ((name, share) for name in names if name in self.computations)

    def _collective(
        self, computation: Computation, at: Instruction, kind: str, weight: float
    ) -> HloCollective:
        groups: tuple[tuple[int, ...], ...] = ()
        if kind == "permute":
            pairs = re.search(r"source_target_pairs=\{(.*?\})\}", at.attributes)
            ends = re.findall(r"\{(\d+),(\d+)\}", pairs.group(1) if pairs else "")
            size = 2 if any(a != b for a, b in ends) else 1
        else:
            groups = replica_groups(at.attributes, self.devices)
            size = max((len(group) for group in groups), default=self.devices)
        payload = float(operand_bytes(computation, at))
        if kind == "all_gather":
            payload *= size
        elif kind == "all_reduce" and _scattered(computation):
            kind = "reduce_scatter"
        source = _OP_NAME.search(at.attributes)
        return HloCollective(
            kind,
            weight,
            size,
            groups,
            payload,
            wire_bytes(kind, payload, size),
            source.group(1) if source else "",
        )


Chain = tuple[str, str]
"""Numbers of a chain and of its channel."""


def _chain(at: Instruction) -> Chain | None:
    """The chain of fusions that runs a collective, if it is one of several."""
    found, channel = _CHAIN.search(at.attributes), _CHANNEL.search(at.attributes)
    return (found.group(1), channel.group(1) if channel else "") if found else None


def _chain_starts(computations: Mapping[str, Computation]) -> dict[Chain, tuple[str, str]]:
    """Where each chain is started: the computation, and the collective that the start reads."""
    found: dict[Chain, tuple[str, str]] = {}
    for name, computation in computations.items():
        for start in computation.instructions.values():
            if _STARTS_CHAIN not in start.attributes:
                continue
            for read in operand_names(start):
                at = computation.instructions.get(read)
                chain = _chain(at) if at is not None else None
                if chain:
                    found[chain] = (name, read)
    return found


def _collective_kind(opcode: str) -> str | None:
    return HLO_NAMES.get(opcode.removesuffix("-start"))


def _scattered(computation: Computation) -> bool:
    """Whether this is XLA:TPU's reduce-scatter, an all-reduce fused with a slice of its result."""
    return computation.name.startswith("all-reduce-scatter")


def replica_groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Device numbers of each group of a collective, in any of HLO's three notations.

    ``{{0,1},{2,3}}``; ``[2,4]<=[4,2]T(1,0)``: the numbers from 0, in that shape, transposed, in two
    groups of four; ``mesh['a'=2,'b'=4] {'b'}``: groups along the named axes of that mesh, of which
    ``'b':(2)2`` is a part. ``{}`` is one group of all.
    """
    found = re.search(r"replica_groups=(.*?)(?:, [a-z_]+=(?!\()|$)", attributes)
    text = found.group(1) if found else "{}"
    if text.startswith("{{"):
        return tuple(
            tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text)
        )
    if text.startswith("mesh["):
        return _mesh_groups(text)
    iota = re.match(r"\[(\d+),(\d+)\]<=(.*)", text)
    if iota:
        rows = _iota(iota.group(3)).reshape(int(iota.group(1)), int(iota.group(2)))
        return tuple(tuple(row) for row in rows.tolist())
    return (tuple(range(devices)),)


def _iota(text: str) -> NDArray[np.int64]:
    """``[4,2]T(1,0)``: 0, 1, ... in that shape, transposed, flat."""
    found = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        raise ValueError(f"cannot read device numbers {text[:60]!r}")
    shape = [int(n) for n in found.group(1).split(",")]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    if found.group(2):
        numbers = numbers.transpose([int(n) for n in found.group(2).split(",")])
    return numbers.reshape(-1)


def _mesh_groups(text: str) -> tuple[tuple[int, ...], ...]:
    axes = re.findall(r"'([^']+)'=(\d+)", text[: text.index("]")])
    sizes = {name: int(size) for name, size in axes}
    ids = re.search(r"device_ids=\((.*?\](?:T\([\d,]+\))?)\)", text)
    numbers = _iota(ids.group(1)) if ids else np.arange(math.prod(sizes.values()))
    chosen = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", text[text.rindex("{") :])
    shape: list[int] = []
    grouped: list[int] = []
    for name, size in sizes.items():
        parts = sorted((int(pre or 1), int(part or size)) for n, pre, part in chosen if n == name)
        done = 1
        for pre, part in parts:
            shape += [pre // done, part]
            grouped.append(len(shape) - 1)
            done = pre * part
        shape.append(size // done)
    rest = [i for i in range(len(shape)) if i not in grouped]
    members = math.prod(shape[i] for i in grouped)
    rows = numbers.reshape(shape).transpose(rest + grouped).reshape(-1, members)
    return tuple(tuple(row) for row in rows.tolist())
