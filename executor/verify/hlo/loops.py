"""Trip counts of the loops in a compiled module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from executor.verify.hlo.text import Computation, Instruction

_PASSED_ON = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape")


def trip_count(
    computations: Mapping[str, Computation], caller: Computation, loop: Instruction
) -> int | None:
    """How often a ``while`` runs, or None if that is unknown.

    Uses ``known_trip_count`` where the compiler wrote it, else a condition ``counter < bound`` with
    a constant bound, start (0 if unknown) and step (1 if unknown).
    """
    if loop.trips is not None:
        return loop.trips
    condition, body = (computations.get(loop.callee(part)) for part in ("condition", "body"))
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
    """The comparison that a condition returns, also if it is inside a fusion or a call."""
    root = condition.instructions.get(condition.root)
    if root is None:
        return None
    callee, given = condition, None
    if root.opcode in ("fusion", "call"):
        computation = computations.get(root.callee("calls") or root.applied)
        if computation is None:
            return None
        callee, given = computation, root.operands
        root = callee.instructions.get(callee.root)
    if root is None or root.opcode != "compare":
        return None

    def outside(name: str) -> str | int | None:
        at = callee.instructions[name]
        if given is None:
            return name
        if at.opcode == "constant":
            return at.number
        return given[at.number or 0] if at.opcode == "parameter" else None

    left, right = (outside(name) for name in root.operands[:2])
    if not isinstance(left, str) or right is None:
        return None
    return _Test(left, right, root.direction)


def _followed(computation: Computation, name: str) -> Instruction | None:
    """The instruction that produces a value, skipping copies and conversions."""
    at = computation.instructions.get(name)
    while at is not None and at.opcode in _PASSED_ON:
        at = computation.instructions.get(next(iter(at.operands), ""))
    return at


def _constant(computation: Computation, name: str) -> int | None:
    at = _followed(computation, name)
    return at.number if at is not None and at.opcode == "constant" else None


def _element(computation: Computation, name: str) -> int | None:
    """The index of a value in the computation's parameter, or None if it is no element of it."""
    at = _followed(computation, name)
    if at is None or at.opcode != "get-tuple-element":
        return None
    source = computation.instructions.get(at.operands[0])
    return None if source is None or source.opcode != "parameter" else at.index


def _initial(caller: Computation, loop: Instruction, element: int) -> int | None:
    """The constant that an element of the loop's state starts with."""
    at = _followed(caller, loop.operands[0])
    if at is None or at.opcode != "tuple":
        return None
    return _constant(caller, at.operands[element])


def _step(body: Computation, element: int) -> int | None:
    """The constant that the body adds to an element of its state."""
    root = body.instructions.get(body.root)
    if root is None or root.opcode != "tuple":
        return None
    at = _followed(body, root.operands[element])
    if at is None or at.opcode != "add":
        return None
    for this, other in (at.operands, at.operands[::-1]):
        step = _constant(body, other)
        if step and _element(body, this) == element:
            return step
    return None
