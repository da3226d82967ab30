"""Finds the instructions of kernels that a GPU ran as part of a CUDA graph.

XLA:GPU runs most of a step as graphs (command buffers). The profiler then records the name of the
graph in place of the instruction's, and the name of the kernel. XLA's kernels are named after their
instruction (``loop_add_fusion_6`` for ``loop_add_fusion.6``). Library kernels are not: such a
kernel is assigned to the next library call after the instruction that ran before it, in the order
of the module.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from executor.profile.program import OTHER, Program
from executor.profile.reading import Event

_PLAIN = re.compile(r"\W")
_HELPERS = ("Memset", "Memcpy")
"""Prefixes of kernels that prepare a library call; their time counts for the one before."""


def named(events: Iterable[Event], program: Program) -> Iterator[Event]:
    """The events; kernels in graphs get the name of their instruction in place of the graph's, or
    ``OTHER`` if it is unknown. Events of other programs are unchanged."""
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
    """The next collective or library call after an instruction, in the same computation."""
    for name in program.order[at + 1 :]:
        if not name:  # the computation ends
            break
        part = program.parts.get(name)
        if part is not None and (bool(part.kind) if collective else part.calls):
            return name
    return ""
