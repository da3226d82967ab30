"""HLO text -> computations and instructions; how often a loop runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_PAREN = re.compile(r"[()]")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,<=\s]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_PASSED_ON = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape")

# Bits of an element; sub-byte types are packed.
_BITS = {
    **{"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16},
    **{"s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64},
    **{"c64": 64, "c128": 128, "token": 0, "opaque": 0},
}


@dataclass(frozen=True)
class Instruction:
    """One line: ``name = type opcode(operands), attributes``."""

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str


@dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name in order, and the name of its root."""

    name: str
    instructions: dict[str, Instruction]
    root: str


def parse_computations(text: str) -> tuple[dict[str, Computation], str]:
    """Computations of a module by name, and the entry's name.

    Raises:
        ValueError: no entry computation.
    """
    found: dict[str, Computation] = {}
    entry = name = root = ""
    lines: dict[str, Instruction] = {}
    for line in text.splitlines():
        if not name:
            head = _HEAD.match(line)
            if head:
                name, lines, root = head.group(2), {}, ""
                entry = name if head.group(1) else entry
        elif line.startswith("}"):
            found[name] = Computation(name, lines, root)
            name = ""
        else:
            at = _NAME.match(line)
            if at:
                instruction = _instruction(at.group(2), line[at.end() :])
                lines[instruction.name] = instruction
                root = instruction.name if at.group(1) else root
    if not entry:
        raise ValueError("not the text of an HLO module: no ENTRY computation")
    return found, entry


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
    for found in _PAREN.finditer(text, opened):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def operand_names(at: Instruction) -> list[str]:
    """Names of the instructions whose results this one reads."""
    return _OPERAND.findall(at.operands)


def operand_bytes(computation: Computation, at: Instruction) -> int:
    """Bytes of all operands on one device, without padding."""
    known = computation.instructions
    return sum(type_bytes(known[name].type) for name in operand_names(at) if name in known)


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


def trip_count(
    computations: Mapping[str, Computation], caller: Computation, loop: Instruction
) -> int | None:
    """How often a ``while`` runs, or None.

    From ``known_trip_count`` where the compiler wrote it; else from a condition ``counter < bound``
    with constant bound, start (0 where it can't be seen) and step (1 likewise).
    """
    known = _TRIPS.search(loop.attributes)
    if known:
        return int(known.group(1))
    names = dict(re.findall(r"(condition|body)=%?([\w.\-]+)", loop.attributes))
    condition, body = (computations.get(names.get(part, "")) for part in ("condition", "body"))
    test = None if condition is None else _test(computations, condition)
    if condition is None or body is None or test is None or test.direction not in ("LT", "LE"):
        return None
    counter = _element(condition, test.left)
    bound = test.right if isinstance(test.right, int) else _constant(condition, test.right)
    if bound is None and isinstance(test.right, str):
        held = _element(condition, test.right)
        bound = None if held is None else _initial(caller, loop, held)
    if counter is None or bound is None:
        return None
    span = bound + (test.direction == "LE") - (_initial(caller, loop, counter) or 0)
    return max(0, -(-span // (_step(body, counter) or 1)))


@dataclass(frozen=True)
class _Test:
    """``left direction right``, by names in the loop's condition; ``right`` may be a number."""

    left: str
    right: str | int
    direction: str


def _test(computations: Mapping[str, Computation], condition: Computation) -> _Test | None:
    """The comparison that a condition returns, also where it stands in a fusion."""
    root = condition.instructions.get(condition.root)
    if root is None:
        return None
    callee, given = condition, None
    if root.opcode in ("fusion", "call"):
        inner = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", root.attributes)
        found = computations.get(inner.group(1)) if inner else None
        if found is None:
            return None
        callee, given = found, operand_names(root)
        root = callee.instructions.get(callee.root)
    direction = re.search(r"direction=(\w+)", root.attributes) if root else None
    if root is None or root.opcode != "compare" or direction is None:
        return None

    def outside(name: str) -> str | int | None:
        at = callee.instructions[name]
        if given is None:
            return name
        if at.opcode == "constant":
            return _number(at)
        return given[int(at.operands)] if at.opcode == "parameter" else None

    left, right = (outside(name) for name in operand_names(root)[:2])
    if not isinstance(left, str) or right is None:
        return None
    return _Test(left, right, direction.group(1))


def _followed(computation: Computation, name: str) -> Instruction | None:
    """The instruction that makes a value, copies and conversions passed over."""
    at = computation.instructions.get(name)
    while at is not None and at.opcode in _PASSED_ON:
        at = computation.instructions.get(next(iter(operand_names(at)), ""))
    return at


def _number(at: Instruction) -> int | None:
    return int(at.operands) if re.fullmatch(r"-?\d+", at.operands.strip()) else None


def _constant(computation: Computation, name: str) -> int | None:
    at = _followed(computation, name)
    return _number(at) if at is not None and at.opcode == "constant" else None


def _element(computation: Computation, name: str) -> int | None:
    """Which element of the computation's parameter a value is."""
    at = _followed(computation, name)
    if at is None or at.opcode != "get-tuple-element":
        return None
    source = computation.instructions.get(operand_names(at)[0])
    found = re.search(r"index=(\d+)", at.attributes)
    if source is None or source.opcode != "parameter" or found is None:
        return None
    return int(found.group(1))


def _initial(caller: Computation, loop: Instruction, element: int) -> int | None:
    """The constant that an element of the loop's state starts with."""
    at = _followed(caller, operand_names(loop)[0])
    if at is None or at.opcode != "tuple":
        return None
    return _constant(caller, operand_names(at)[element])


def _step(body: Computation, element: int) -> int | None:
    """The constant that the body adds to an element of its state."""
    root = body.instructions.get(body.root)
    if root is None or root.opcode != "tuple":
        return None
    at = _followed(body, operand_names(root)[element])
    if at is None or at.opcode != "add":
        return None
    parts = operand_names(at)
    for this, other in (parts, parts[::-1]):
        step = _constant(body, other)
        if step and _element(body, this) == element:
            return step
    return None
