"""Kernels that a GPU ran as a part of a CUDA graph, by the instructions that they come from.

XLA:GPU runs most of a step as graphs (command buffers), and the profiler then has only the graph's
name for the instruction, with the kernel's. XLA's kernels are named after their instruction
(``loop_add_fusion_6`` for ``loop_add_fusion.6``). Those of libraries are not: such a kernel is
the next call of a library behind the instruction that ran before it, in the order of the module.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from executor.profile.program import OTHER, Program
from executor.profile.reading import Event

_PLAIN = re.compile(r"\W")
_HELPERS = ("Memset", "Memcpy")
"""Kernels that prepare a call of a library; their time counts for the instruction before."""


def named(events: Iterable[Event], program: Program) -> Iterator[Event]:
    """The events, those of kernels in graphs with the instruction's name in place of the graph's;
    ``OTHER`` where none is found. Those of other programs pass as they are."""
    known = {_PLAIN.sub("_", name): name for name in reversed(program.order)}
    place = {name: k for k, name in enumerate(program.order)}
    last: dict[int, str] = {}
    for e in sorted(events, key=lambda e: (e.device, e.begun_s)):
        if e.module not in ("", program.name) or e.name in program.parts or not e.kernel:
            yield e
            last[e.device] = e.name
            continue
        if e.name in program.holders:
            yield e
            continue
        name = known.get(_PLAIN.sub("_", e.kernel)) or ""
        if not name and e.kernel.startswith(_HELPERS):
            name = last.get(e.device, "")
        elif not name:
            name = _next(program, place.get(last.get(e.device, ""), -1), "nccl" in e.kernel.lower())
        last[e.device] = name or last.get(e.device, "")
        yield dataclasses.replace(e, name=name if name in program.parts else OTHER)


def _next(program: Program, at: int, collective: bool) -> str:
    """The next collective, or call of a library, of the computation that holds an instruction."""
    for name in program.order[at + 1 :]:
        if not name:  # the computation ends
            break
        part = program.parts.get(name)
        if part is not None and (bool(part.kind) if collective else part.calls):
            return name
    return ""
