"""Compare a plan's predictions with the programs that compilers make of the step.

There are two rungs, and neither needs accelerators: ``shardy`` (the partitioner in jaxlib) and
``compiled`` (the production compiler, ahead of time). They compare, per device and step:

- ``peak memory``: the plan's ``prediction.peak_bytes`` with argument + output + temp - alias of the
  compiler's ``memory_analysis()``;
- ``wire bytes``, in all and by kind of collective: the plan's collectives with the program's, under
  the conventions of `executor.verify.hlo`. A compiler may replace one kind by another (such as an
  all-gather by a loop of permutes), so only the sum is judged;
- ``compute seconds`` (TPU): ``prediction.compute_s`` with the compiler's ``estimated_cycles`` over
  the clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from costmodels import Cluster
from executor.verify.aot import TPU_CLOCK_HZ, Compiled, tpu_seconds
from executor.verify.hlo.collectives import wire_bytes
from planner.plan.plan import Plan
from planner.rules.kernels.regions import REGION

COMMUNICATION, MEMORY, COMPUTE = "communication", "memory", "compute"


@dataclass(frozen=True)
class Row:
    """One predicted quantity and its actual value ``found``, both in ``unit`` ("bytes" or "s").

    ``tolerance`` is the largest difference, relative to the prediction, that passes; None: not
    judged. ``predicted_count`` and ``found_count`` are runs of collectives per step.
    """

    quantity: str
    unit: str
    predicted: float
    found: float
    tolerance: float | None = None
    predicted_count: float | None = None
    found_count: float | None = None

    @property
    def difference(self) -> float:
        """(found - predicted) / predicted; infinite where nothing was predicted."""
        if self.found == self.predicted:
            return 0.0
        return (self.found - self.predicted) / self.predicted if self.predicted else math.inf

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance, or none was stated."""
        return self.tolerance is None or abs(self.difference) <= self.tolerance


@dataclass(frozen=True)
class Rung:
    """One rung: its comparisons, or in ``absent`` why it was skipped. ``notes`` are caveats."""

    name: str
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    absent: str = ""


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that pass; None: not judged."""

    memory: float | None = None
    communication: float | None = None
    compute: float | None = None


@dataclass(frozen=True)
class Verification:
    """The rungs that were run for one plan."""

    plan: Plan
    rungs: tuple[Rung, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether every judged row of every rung passed."""
        return all(row.passed for rung in self.rungs for row in rung.rows)


def planned_wire(plan: Plan) -> dict[str, tuple[float, float]]:
    """Per kind of collective in a plan: runs per step, and bytes that a device sends per step."""
    sizes = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    return _by_kind(
        (row.kind, row.count, row.payload_bytes, math.prod(sizes[a] for a in row.axes))
        for row in plan.collectives
    )


def _by_kind(
    collectives: Iterable[tuple[str, float, float, int]],
) -> dict[str, tuple[float, float]]:
    """(kind, count, payload bytes, members) -> per kind: sum of counts, sum of wire bytes."""
    sums: dict[str, tuple[float, float]] = {}
    for kind, count, payload, members in collectives:
        runs, sent = sums.get(kind, (0.0, 0.0))
        sums[kind] = (runs + count, sent + count * wire_bytes(kind, payload, members))
    return dict(sorted(sums.items()))


def communication_rows(
    plan: Plan, actual: Mapping[str, tuple[float, float]], tolerance: float | None
) -> tuple[Row, ...]:
    """Wire bytes in all (judged) and by kind; ``actual`` is like `planned_wire`."""
    planned = planned_wire(plan)

    def summed(sums: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
        counts, sent = zip(*sums.values(), strict=True) if sums else ((), ())
        return math.fsum(counts), math.fsum(sent)

    (want_runs, want), (got_runs, got) = summed(planned), summed(actual)
    rows = [Row("wire bytes", "bytes", want, got, tolerance, want_runs, got_runs)]
    for kind in sorted({*planned, *actual}):
        (want_runs, want), (got_runs, got) = planned.get(kind, (0, 0)), actual.get(kind, (0, 0))
        rows.append(Row(f"  {kind}", "bytes", want, got, None, want_runs, got_runs))
    return tuple(rows)


def compiled_rung(plan: Plan, compiled: Compiled, cluster: Cluster, tolerances: Tolerances) -> Rung:
    """Compare the plan with the program of the production compiler."""
    predicted = plan.prediction
    rows = [
        Row("peak memory", "bytes", predicted.peak_bytes, compiled.peak_bytes, tolerances.memory)
    ]
    kinds = compiled.module.by_kind()
    actual = {kind: (total.count, total.wire_bytes) for kind, total in kinds.items()}
    rows += communication_rows(plan, actual, tolerances.communication)
    if cluster.device.kind in TPU_CLOCK_HZ:
        seconds = tpu_seconds(compiled.module.cycles, cluster)
        rows.append(Row("compute seconds", "s", predicted.compute_s, seconds, tolerances.compute))
    return Rung("compiled", tuple(rows), compiled.module.notes)


def shardy_rung(
    plan: Plan, collectives: Sequence[tuple[str, float, float, int]], tolerances: Tolerances
) -> Rung:
    """Compare the plan with Shardy's partitioning, whose ``collectives`` are (kind, count, payload
    bytes, members)."""
    planner_rows = [row for row in plan.collectives if row.cause != REGION]
    compared = dataclasses.replace(plan, collectives=tuple(planner_rows))
    rows = communication_rows(compared, _by_kind(collectives), tolerances.communication)
    notes = [f"without the lowering: {plan.lowering}"] if not plan.lowering.as_written else []
    if len(planner_rows) < len(plan.collectives):
        notes.append("collectives that the user wrote, inside of shard_map, are left out")
    if not plan.cluster.startswith("cpu"):
        notes.append(
            "before XLA, which reduces the sum of products once and, on TPU, sends their float32 "
            "operands as bfloat16"
        )
    return Rung("shardy", rows, tuple(notes))
