"""HLO text -> computations and instructions: the only reader of HLO text.

``jax.stages.Compiled.as_text()`` is JAX's only public view of a compiled module. jaxlib has a
parser (``Compiled.runtime_executable().hlo_modules()``), but in a private module, and its
instructions have only a name, an opcode and operands; shapes and attributes are text again (jaxlib
0.10).

An instruction is a line ``name = type opcode(operands), attribute=value, ...``. Properties parse
the types and attributes that callers need, when they need them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Groups = tuple[tuple[int, ...], ...]
"""Device numbers, group by group."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ENDS = re.compile(r"^\}(\s|$|, execution_thread)")
_PAREN = re.compile(r"[()]")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,<=\s]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_LISTED = re.compile(r"[\w.\-]+")
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[\[({]|[\])}]|, ?([\w\-]+)=')
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
MOST_CYCLES = 2**53
"""No estimate of one instruction is larger."""
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_PAIR = re.compile(r"\{(\d+),(\d+)\}")

_CALLED = ("calls", "body", "true_computation", "false_computation")
_CALLED_LISTS = ("branch_computations", "called_computations")
_RUNS = re.compile(rf"(?:{'|'.join((*_CALLED, *_CALLED_LISTS))})=")

# Bits of an element; sub-byte types are packed.
_BITS = {
    **{"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16},
    **{"s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64},
    **{"c64": 64, "c128": 128, "token": 0, "opaque": 0},
}


@dataclass(frozen=True)
class Instruction:
    """One line; ``inside`` is the text in its parentheses, ``behind`` the text after them."""

    name: str
    type: str
    opcode: str
    inside: str
    behind: str

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions whose results this one reads."""
        return tuple(_OPERAND.findall(self.inside))

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """Attribute values as text, by name."""
        return _attributes(self.behind)

    @property
    def nbytes(self) -> int:
        """Bytes of the result on one device, without padding."""
        return type_bytes(self.type)

    @property
    def number(self) -> int | None:
        """The value of an integer constant, or the position of a parameter."""
        text = self.inside.strip()
        return int(text) if text.removeprefix("-").isdecimal() else None

    @property
    def callees(self) -> tuple[str, ...]:
        """Computations that it runs: bodies and branches, without conditions and ``applied``."""
        if not _RUNS.search(self.behind):  # true of most; saves parsing the attributes
            return ()
        names = [self.callee(key) for key in _CALLED]
        for key in _CALLED_LISTS:
            names += _LISTED.findall(self.attributes.get(key, ""))
        return tuple(name for name in names if name)

    def callee(self, attribute: str) -> str:
        """The computation that an attribute names, or ``""``."""
        return self.attributes.get(attribute, "").strip().removeprefix("%")

    @property
    def applied(self) -> str:
        """The computation of a call, or the one by which a reduction combines two elements, or
        ``""``."""
        return self.callee("to_apply")

    @property
    def trips(self) -> int | None:
        """How often a loop runs, if the compiler wrote it."""
        match = _TRIPS.search(self.attributes.get("backend_config", ""))
        return int(match.group(1)) if match else None

    @property
    def cycles(self) -> int:
        """The compiler's estimate (TPU); 0 elsewhere, and if it wrote the largest integer."""
        if "estimated_cycles" not in self.behind:
            return 0
        match = _CYCLES.search(self.attributes.get("backend_config", ""))
        known = int(match.group(1)) if match else 0
        return known if known < MOST_CYCLES else 0

    @property
    def index(self) -> int | None:
        """The tuple element that it takes."""
        text = self.attributes.get("index", "")
        return int(text) if text.isdecimal() else None

    @property
    def direction(self) -> str:
        """The direction of a comparison: ``LT``, ``LE`` and so on."""
        return self.attributes.get("direction", "")

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def channel(self) -> str:
        """The number of its channel, or ``""``."""
        return self.attributes.get("channel_id", "")

    @property
    def chain(self) -> str:
        """The number of the chain of fusions that it is a part of (TPU), or ``""``."""
        inner = self.attributes.get("frontend_attributes", "")
        return _attributes(f",{inner[1:-1]}").get("chain_id", "").strip('"')

    @property
    def op_name(self) -> str:
        """The operation of the step that it comes from."""
        match = _OP_NAME.search(self.attributes.get("metadata", ""))
        return match.group(1) if match else ""

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The (source, target) device numbers of a permute."""
        pairs = _PAIR.findall(self.attributes.get("source_target_pairs", ""))
        return tuple((int(a), int(b)) for a, b in pairs)

    def groups(self, devices: int) -> Groups:
        """Device numbers of each group of a collective among ``devices``, in any of HLO's three
        notations.

        ``{{0,1},{2,3}}``; ``[2,4]<=[4,2]T(1,0)``: the numbers from 0, in that shape, transposed, in
        two groups of four; ``mesh['a'=2,'b'=4] {'b'}``: groups along the named axes of that mesh;
        ``'b':(2)2`` is a part of an axis. ``{}`` is one group of all.
        """
        text = self.attributes.get("replica_groups", "{}")
        if text.startswith("{{"):
            rows = re.findall(r"\{([\d,]+)\}", text)
            return tuple(tuple(map(int, row.split(","))) for row in rows)
        if text.startswith("mesh["):
            return _mesh_groups(text, self.attributes.get("device_ids", ""))
        iota = re.match(r"\[(\d+),(\d+)\]<=(.*)", text)
        if iota:
            numbers = _iota(iota.group(3)).reshape(int(iota.group(1)), int(iota.group(2)))
            return tuple(tuple(row) for row in numbers.tolist())
        return (tuple(range(devices)),)


@dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name in order, and the name of its root."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def operand_bytes(self, at: Instruction) -> int:
        """Bytes of all operands of an instruction on one device, without padding."""
        known = self.instructions
        return sum(known[name].nbytes for name in at.operands if name in known)


@dataclass(frozen=True)
class HloModule:
    """A module: its computations by name, the name of the entry computation, and the number of
    devices it was partitioned for."""

    computations: Mapping[str, Computation]
    entry: str
    partitions: int


def parse(text: str) -> HloModule:
    """Read the text of a module.

    Raises:
        ValueError: the text is not HLO: it has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    lines: dict[str, Instruction] = {}
    for line in _joined(text.splitlines()):
        if not name:
            head = _HEAD.match(line)
            if head:
                name, lines, root = head.group(2), {}, ""
                entry = name if head.group(1) else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, lines, root)
            name = ""
        else:
            at = _NAME.match(line)
            if at:
                instruction = _instruction(at.group(2), line[at.end() :])
                lines[instruction.name] = instruction
                root = instruction.name if at.group(1) else root
    if not entry:
        raise ValueError("not the text of an HLO module: no ENTRY computation")
    partitions = _PARTITIONS.search(text[: text.find("\n")])
    return HloModule(computations, entry, int(partitions.group(1)) if partitions else 1)


def _joined(lines: Sequence[str]) -> Iterator[str]:
    """Lines of a module, with each instruction in one line: attributes with text of the user's,
    such as the metadata of a kernel, span several lines."""
    held = ""
    for line in lines:
        if held and not (_NAME.match(line) or _ENDS.match(line)):
            held += line
            continue
        if held:
            yield held
        held = line if _NAME.match(line) else ""
        if not held:
            yield line
    if held:
        yield held


def _instruction(name: str, rest: str) -> Instruction:
    split = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    kind, after = rest[:split], rest[split:].lstrip()
    opened = after.index("(")
    closed = _closing(after, opened)
    return Instruction(
        name, kind, after[:opened].strip(), after[opened + 1 : closed - 1], after[closed:]
    )


def _closing(text: str, opened: int) -> int:
    """One past the parenthesis that closes the one at ``opened``."""
    depth = 0
    for paren in _PAREN.finditer(text, opened):
        depth += 1 if paren.group() == "(" else -1
        if depth == 0:
            return paren.end()
    return len(text)


def _attributes(text: str) -> dict[str, str]:
    """``, name=value, ...`` split where no bracket and no quote is open."""
    attributes: dict[str, str] = {}
    name, start, depth = "", 0, 0
    for part in _PART.finditer(text):
        first = part.group()[0]
        if first in "[({":
            depth += 1
        elif first in "])}":
            depth -= 1
        elif first == "," and depth == 0:
            attributes[name] = text[start : part.start()]
            name, start = part.group(1), part.end()
    attributes[name] = text[start:]
    attributes.pop("", None)
    return attributes


def type_bytes(text: str) -> int:
    """Bytes of an HLO type such as ``bf16[4,128]{1,0:T(8,128)}`` or a tuple of such."""
    return sum(
        math.ceil(
            _bits(kind) * math.prod(int(n.replace("<=", "")) for n in dims.split(",") if n) / 8
        )
        for kind, dims in _ARRAY.findall(text)
    )


def _bits(kind: str) -> int:
    return _BITS.get(kind, 8 if kind.startswith("f8") else 4 if kind.startswith("f4") else 0)


def _iota(text: str) -> NDArray[np.int64]:
    """``[4,2]T(1,0)``: 0, 1, ... in that shape, transposed, flat."""
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        raise ValueError(f"cannot read device numbers {text[:60]!r}")
    shape = [int(n) for n in match.group(1).split(",")]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    if match.group(2):
        numbers = numbers.transpose([int(n) for n in match.group(2).split(",")])
    return numbers.reshape(-1)


def _mesh_groups(text: str, device_ids: str) -> Groups:
    """Groups along axes of a mesh; the axes follow ``device_ids``, if any."""
    axes = re.findall(r"'([^']+)'=(\d+)", text[: text.index("]")])
    sizes = {name: int(size) for name, size in axes}
    numbers = _iota(device_ids[1:]) if device_ids else np.arange(math.prod(sizes.values()))
    along = device_ids or text
    chosen = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", along[along.rindex("{") :])
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
