"""The instructions of a compiled program: which are collectives, and the user's line of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from executor.verify.hlo.collectives import HLO_NAMES
from executor.verify.hlo.text import Instruction, parse
from planner.graph.jaxpr.places import FRAMEWORKS

HOLDERS = frozenset({"while", "conditional", "call", "async-update"})
"""Instructions whose time is that of the instructions inside them."""
NAMELESS = "no line"
OTHER = "(other)"
"""Stands for kernels whose instruction is unknown."""
ROOMS = ("meshwright", "planner", "executor")

_MODULE = re.compile(r"^HloModule ([\w.\-]+)")
_LINE = re.compile(r"(?:^|[/(])([\w.\-]+\.py:\d+) ")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_INLINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_ROW = re.compile(r"^(\d+) (.*)$")
_PACKAGE = re.compile(r"/site-packages/([^/]+)")
_STANDARD = re.compile(r"/lib/python3\.\d+/(?!site-packages/)")
_OWN = re.compile(r'"([^"\n]*)/(?:executor/run/(?:compile|interpret)|planner/arguments/calls)\.py"')
"""Files of meshwright, one of which is in every trace of a planned step."""


@dataclass(frozen=True)
class Part:
    """An instruction: the kind of collective, or empty; its source line; the name that JAX gives
    its computation; whether it calls a library."""

    kind: str
    line: str
    what: str
    calls: bool = False


@dataclass(frozen=True)
class Program:
    """A compiled program: its name, and its instructions by name.

    ``order``: the names in execution order, with an empty one after each computation; ``holders``:
    instructions whose time is that of the instructions inside them; ``partitions``: the number of
    devices that it was compiled for; ``arguments``: the shapes of its arguments on one device.
    """

    name: str
    parts: Mapping[str, Part]
    order: tuple[str, ...] = ()
    holders: frozenset[str] = frozenset()
    partitions: int = 1
    arguments: tuple[tuple[int, ...], ...] = ()


def read_program(text: str) -> Program:
    """Read HLO text.

    Raises:
        ValueError: the text is not HLO.
    """
    head = _MODULE.match(text)
    if head is None:
        raise ValueError("not the text of an HLO module: no HloModule line")
    home = next((m[1] for m in _OWN.finditer(text)), "")
    lines = dict(_frames(text, home))
    module = parse(text)
    computations = module.computations

    def line_of(at: Instruction) -> str:
        metadata = at.attributes.get("metadata", "")
        named = _LINE.search(at.op_name)
        inline, frame = _INLINE.search(metadata), _FRAME.search(metadata)
        if named is not None:
            return named[1]
        if inline is not None and _is_users(inline[1], home):
            return f"{Path(inline[1]).name}:{inline[2]}"
        return lines.get(int(frame[1]), NAMELESS) if frame is not None else NAMELESS

    def inner_line(at: Instruction) -> str:
        """The line of a fusion that has none: the last line inside it."""
        inside = computations.get(at.attributes.get("calls", "").removeprefix("%"))
        inner_lines = [line_of(x) for x in inside.instructions.values()] if inside else []
        return next((line for line in reversed(inner_lines) if line != NAMELESS), NAMELESS)

    parts = {OTHER: Part("", NAMELESS, "")}
    order: list[str] = []
    holders: set[str] = set()
    for computation in computations.values():
        for at in computation.instructions.values():
            if at.opcode in HOLDERS:
                holders.add(at.name)
                continue
            order.append(at.name)
            plain = at.opcode.removesuffix("-start").removesuffix("-done")
            line = line_of(at)
            if line == NAMELESS and at.opcode == "fusion":
                line = inner_line(at)
            kind = HLO_NAMES.get(plain, HLO_NAMES.get(_wrapped(at.name), ""))
            what = _what(at.op_name) or at.opcode
            parts[at.name] = Part(kind, line, what, at.opcode == "custom-call")
        order.append("")
    given = computations[module.entry].instructions.values()
    arguments = tuple(_shape(at.type) for at in given if at.opcode == "parameter")
    held = frozenset(holders)
    return Program(head[1], parts, tuple(order), held, module.partitions, arguments)


def _shape(kind: str) -> tuple[int, ...]:
    """``f32[8,64]{1,0}`` -> (8, 64)."""
    sizes = kind.partition("[")[2].partition("]")[0]
    return tuple(int(n.strip("<=")) for n in sizes.split(",") if n)


def _what(op_name: str) -> str:
    """The last part of a name, or the whole name of an argument."""
    plain = op_name.replace("\\'", "'")
    return plain if plain.startswith("args[") else plain.rpartition("/")[2]


def _wrapped(name: str) -> str:
    """The collective that an instruction such as ``all-reduce-start.3`` is named after, for
    instructions inside a wrapper."""
    plain = name.partition(".")[0]
    return plain.removesuffix("-start").removesuffix("-done")


def _is_users(path: str, home: str) -> bool:
    """Whether a file belongs to the user or to an installed model, as in plans; ``home``: the
    folder of meshwright."""
    package = _PACKAGE.search(path)
    if package is not None:
        return package[1].removesuffix(".py") not in {*FRAMEWORKS, *ROOMS}
    internal = bool(home) and path.startswith(tuple(f"{home}/{room}/" for room in ROOMS))
    return not (internal or path.startswith("<") or _STANDARD.search(path))


def _frames(text: str, home: str) -> Iterator[tuple[int, str]]:
    """For each stack frame of a module, the innermost line of the user's code.

    ``parent_frame_id`` is the parent's number plus one: 1 is no parent, 2 the first frame.
    """
    tables: dict[str, dict[int, str]] = {}
    current: dict[int, str] | None = None
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, {})
        elif current is not None and (entry := _ROW.match(line)):
            current[int(entry[1])] = entry[2]
        elif line:
            current = None
    files = {k: v.strip('"') for k, v in tables.get("FileNames", {}).items()}
    places: dict[int, str] = {}
    for k, row in tables.get("FileLocations", {}).items():
        location = _fields(row)
        path = files.get(location.get("file_name_id", 0), "")
        if path and _is_users(path, home):
            places[k] = f"{Path(path).name}:{location.get('line', 0)}"
    frames = {k: _fields(row) for k, row in tables.get("StackFrames", {}).items()}
    for k in frames:
        at, seen = k, set()
        while at in frames and at not in seen:
            seen.add(at)
            place = places.get(frames[at].get("file_location_id", 0))
            if place is not None:
                yield k, place
                break
            at = frames[at].get("parent_frame_id", 0) - 1


def _fields(row: str) -> dict[str, int]:
    """``{file_name_id=1 line=3}`` as a mapping."""
    return {at[1]: int(at[2]) for at in re.finditer(r"(\w+)=(\d+)", row)}
