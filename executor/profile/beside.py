"""Compares measured times with those of a plan: the step, each collective, each line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from executor.profile.program import NAMELESS, Program
from executor.profile.reading import Timed
from planner.errors import RequestError
from planner.plan.plan import Plan


@dataclass(frozen=True)
class Row:
    """Seconds and runs per step, planned and measured; ``causes``: their causes in the plan."""

    kind: str
    line: str
    planned_s: float
    planned_count: float
    measured_s: float
    measured_count: float
    causes: str = ""


@dataclass(frozen=True)
class Beside:
    """A profile compared with a plan; times are those of one device in one step.

    Attributes:
        program, devices, runs: what was traced.
        cluster: the cluster of the plan.
        step_s, planned_step_s: time of a step; the measured one is the median.
        compute_s, collective_s: busy time of computation and of collectives, which may overlap.
        collectives: rows by kind and line, with the largest measured time first.
        lines: rows of computation by line, in the same order; planned counts are unknown (0).
    """

    program: str
    devices: int
    runs: int
    cluster: str
    step_s: float
    planned_step_s: float
    compute_s: float
    planned_compute_s: float
    collective_s: float
    planned_collective_s: float
    collectives: tuple[Row, ...]
    lines: tuple[Row, ...]


_USE, _ARGUMENT = "use of ", "args"
"""Prefixes for uses of an argument: of causes in a plan, of names in a compiled program."""


def check_belongs(plan: Plan, program: Program) -> None:
    """Check that a plan is for this program, by its number of devices and its arguments.

    Raises:
        RequestError: the plan is for another program; says what differs.
    """
    planned = plan.mesh.num_devices
    if program.partitions != planned:
        raise RequestError(
            f"the plan is not of this program: it is for {planned} devices ({plan.cluster}), "
            f"{program.name} was compiled for {program.partitions}"
        )
    known = Counter(leaf.spec.local_shape(leaf.shape, plan.mesh) for leaf in plan.inputs)
    other = Counter(program.arguments) - known
    if 2 * other.total() > len(program.arguments):
        shape = list(next(iter(other)))
        raise RequestError(
            f"the plan is not of this program: of the {len(program.arguments)} arguments of "
            f"{program.name} {other.total()} have shapes on a device that no argument of the plan "
            f"has, such as {shape}"
        )


def beside(plan: Plan, program: Program, timings: Timed) -> Beside:
    """Compare the measured times of a program with its plan.

    Collectives are matched by kind and line. Compilers replace one kind by another and combine
    several into one, so a row of the plan may have no match of its kind: compare sums per line.
    """
    planned: dict[tuple[str, str], list[float]] = {}
    causes: dict[tuple[str, str], dict[str, None]] = {}
    for row in plan.collectives:
        key = (row.kind, row.source or NAMELESS)
        known = planned.setdefault(key, [0.0, 0.0])
        known[0] += row.count * row.time_s
        known[1] += row.count
        causes.setdefault(key, {})[row.cause] = None
    uses = {
        row.cause.removeprefix(_USE): row.source
        for row in plan.collectives
        if row.cause.startswith(_USE)
    }
    measured: dict[tuple[str, str], list[float]] = {}
    lines: dict[str, list[float]] = {}
    computed = sent = 0.0
    for name, seconds in timings.seconds.items():
        part = program.parts[name]
        line = part.line
        if line == NAMELESS and part.what.startswith(_ARGUMENT):
            line = uses.get(part.what.removeprefix(_ARGUMENT), line)
        if part.kind:
            sent += seconds
            where = measured.setdefault((part.kind, line), [0.0, 0.0])
        else:
            computed += seconds
            where = lines.setdefault(line, [0.0, 0.0])
        where[0] += seconds
        where[1] += 0.0 if name.partition(".")[0].endswith("-done") else timings.counts[name]
    rows = []
    for key in {**planned, **measured}:
        (then_s, then), (now_s, now) = (d.get(key, [0.0, 0.0]) for d in (planned, measured))
        rows.append(Row(*key, then_s, then, now_s, now, _few(causes.get(key, {}))))
    planned_lines = {row.source or NAMELESS: row.time_s for row in plan.compute}
    p = plan.prediction
    return Beside(
        program.name,
        timings.devices,
        timings.runs,
        plan.cluster,
        timings.step_s,
        p.step_s,
        computed,
        p.compute_s,
        sent,
        p.communication_s,
        _ordered(rows),
        _ordered(
            Row("", line, planned_lines.get(line, 0.0), 0.0, *lines.get(line, (0.0, 0.0)))
            for line in {**planned_lines, **lines}
        ),
    )


def _ordered(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows in descending order of measured time."""
    return tuple(sorted(rows, key=lambda r: (-r.measured_s, -r.planned_s, r.kind, r.line)))


def _few(causes: Mapping[str, None]) -> str:
    names = list(causes)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
