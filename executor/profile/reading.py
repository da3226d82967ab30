"""A trace of ``jax.profiler`` -> seconds of every instruction of a compiled program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from planner.errors import RequestError

DEVICE = re.compile(r"/device:\w+:(\d+)")
_OPS = "XLA Ops"
"""The line of a TPU's plane that has the instructions."""
_INSTRUCTION = re.compile(r"%?([\w.\-]+)(?: = |$)")


@dataclass(frozen=True)
class Event:
    """One run of one instruction on one device; times in seconds. ``kernel``: the GPU kernel."""

    name: str
    module: str
    device: int
    run: int
    begun_s: float
    spent_s: float
    kernel: str = ""


@dataclass(frozen=True)
class Timed:
    """The times of a program in a trace.

    Attributes:
        devices, runs: number of devices, and of runs of the program on each.
        seconds: per instruction, the time of all its runs in a step, averaged over steps and
            devices.
        counts: how often each instruction runs in a step.
        steps_s: of every step, the time from the first instruction to the last on the slowest
            device.
    """

    devices: int
    runs: int
    seconds: Mapping[str, float]
    counts: Mapping[str, float]
    steps_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """The time of the median step."""
        return float(np.median(self.steps_s))


def trace_file(folder: Path) -> Path:
    """The newest trace in a folder.

    Raises:
        RequestError: there is no trace.
    """
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
    if not traces:
        raise RequestError(
            f"{folder}: no trace (*.xplane.pb): give the folder of train(..., directory=..., "
            "profile=(first, last)), or of jax.profiler.trace"
        )
    return traces[-1]


def read_events(path: Path) -> Iterator[Event]:
    """The instructions in a trace.

    If devices have their own planes, only those are read; of each, only the line of instructions if
    there is one beside the lines of streams.

    Raises:
        RequestError: the file is not a trace.
    """
    try:
        data = jax.profiler.ProfileData.from_file(str(path))
        planes = list(data.planes)
    except Exception as error:  # the library's errors have no common type
        raise RequestError(f"{path}: no trace of jax.profiler: {error}") from error
    by_plane = [list(_of_plane(plane)) for plane in planes if DEVICE.search(plane.name)]
    if not any(by_plane):
        by_plane = [list(_of_plane(plane)) for plane in planes if not DEVICE.search(plane.name)]
    for events in by_plane:
        yield from events


def _of_plane(plane: Any) -> Iterator[Event]:
    match = DEVICE.search(plane.name)
    by_line: dict[str, list[Event]] = {}
    for line in plane.lines:
        parsed = (_event(event, dict(event.stats), match, line.name) for event in line.events)
        by_line.setdefault(line.name, []).extend(e for e in parsed if e is not None)
    for name, events in by_line.items():
        if name == _OPS or not by_line.get(_OPS):
            yield from events


def _event(
    event: Any, stats: Mapping[str, Any], match: re.Match[str] | None, line: str
) -> Event | None:
    if "hlo_op" in stats:
        name = str(stats["hlo_op"])
    elif match is not None and line == _OPS and (at := _INSTRUCTION.match(event.name)):
        name = at[1]
    else:
        return None
    device = int(match[1]) if match is not None else int(stats.get("device_ordinal", 0))
    module = str(stats.get("hlo_module", ""))
    run = int(stats.get("run_id", 0))
    begun, spent = event.start_ns * 1e-9, event.duration_ns * 1e-9
    kernel = "" if match is None or line == _OPS else event.name
    return Event(name, module, device, run, begun, spent, kernel)


def timed(events: Iterable[Event], module: str, inside: frozenset[str]) -> Timed:
    """The times of a program, from events.

    Args:
        events: the events of a trace.
        module: the program's name; events without a name of a program also count if they name its
            instructions.
        inside: the instructions to count; others (loops, calls) only contain these.

    Raises:
        RequestError: the program is not in the trace.
    """
    seen: set[str] = set()
    spans: dict[tuple[int, int], list[float]] = {}
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    devices: set[int] = set()
    for e in events:
        seen.add(e.module)
        if e.module not in ("", module) or e.name not in inside:
            continue
        devices.add(e.device)
        seconds[e.name] = seconds.get(e.name, 0.0) + e.spent_s
        counts[e.name] = counts.get(e.name, 0) + 1
        span = spans.setdefault((e.run, e.device), [e.begun_s, e.begun_s])
        span[0], span[1] = min(span[0], e.begun_s), max(span[1], e.begun_s + e.spent_s)
    if not seconds:
        others = ", ".join(sorted(seen - {""})[:5]) or "no program at all"
        raise RequestError(f"the trace has no run of {module}; it has {others}")
    runs = len({run for run, _ in spans})
    if runs == 1 and len(spans) == len(devices):  # no run numbers: count the rarest instruction
        runs = max(min(counts.values()) // len(devices), 1)
    by_run: dict[int, float] = {}
    for (run, _), (first, last) in spans.items():
        by_run[run] = max(by_run.get(run, 0.0), last - first)
    steps = tuple(by_run.values()) if len(by_run) == runs else (max(by_run.values()) / runs,)
    each = runs * len(devices)
    return Timed(
        len(devices),
        runs,
        {name: s / each for name, s in seconds.items()},
        {name: n / each for name, n in counts.items()},
        steps,
    )
