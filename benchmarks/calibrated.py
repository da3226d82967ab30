"""Measured step time over predicted, with constants that were measured here.

For each example the plan that AUTO_PARALLEL chooses and the data-parallel one, planned with the
profile's constants, on 8 virtual CPU devices. Steps of both are interleaved; the time is the median
of the rounds, "spread" the middle half of the rounds over it. Target: within 20 %.

    planner calibrate --cluster cpu:8 --out profile.toml
    python benchmarks/calibrated.py profile.toml

Without a profile it measures one first. `--processor` takes the processor seconds of this process
over the cores instead of wall seconds, for the constants and the steps alike: what both would be on
a machine that nothing else uses, if no core waits. It is for a machine that others use.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from common import EXAMPLES, example
from rich.console import Console
from rich.table import Table

from costmodels import parse_cluster
from costmodels.calibrate import fit
from costmodels.files import write_whole
from costmodels.profile import Origin, profile_text
from executor.calibrate.sampling import run_probes
from executor.run.compile import CompiledStep
from planner import make_plan
from planner.graph.trace import abstract, trace
from planner.plan.plan import Plan

MODES = ("AUTO_PARALLEL", "DATA_PARALLEL")
CLUSTER = "cpu:8"
TARGET = 0.2
Clock = Callable[[], float]


class Runner:
    """A planned example, warmed up."""

    def __init__(self, name: str, mode: str, profile: str, clock: Clock) -> None:
        module = example(name)
        batch, state = next(iter(module.batches())), module.make_state()
        shapes = abstract((state, batch))
        self.plan: Plan = make_plan(
            module.train_step, *shapes, cluster=profile, mode=mode, donate_argnums=0
        )
        traced = trace(module.train_step, shapes)
        self.step = CompiledStep(traced, self.plan, donate_argnums=0)
        self.state, self.batch = self.step.place(state, batch)
        self.times: list[float] = []
        self.clock = clock
        for _ in range(2):
            self.run()
        self.times.clear()

    def run(self) -> None:
        begun = self.clock()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.times.append(self.clock() - begun)


def measured(name: str, profile: str, rounds: int, clock: Clock) -> list[tuple[str, ...]]:
    """A row of the table per mode."""
    runners: dict[str, Any] = {mode: Runner(name, mode, profile, clock) for mode in MODES}
    for _ in range(rounds):
        for runner in runners.values():
            runner.run()
    rows = []
    for mode, runner in runners.items():
        low, middle, high = statistics.quantiles(runner.times, n=4)
        p = runner.plan.prediction
        ratio = middle / p.step_s
        rows.append(
            (
                name,
                mode,
                str(runner.plan.mesh),
                f"{1e3 * middle:.1f}",
                f"{(high - low) / middle:.0%}",
                f"{1e3 * p.step_s:.1f}",
                f"{1e3 * p.compute_s:.1f}",
                f"{1e3 * p.communication_s:.1f}",
                f"{ratio:.2f}" + ("" if abs(ratio - 1.0) <= TARGET else " (missed)"),
            )
        )
    return rows


def processor_seconds() -> float:
    """Processor seconds of this process over the cores that it may use."""
    return time.process_time() / len(os.sched_getaffinity(0))


def calibrated(clock: Clock, rounds: int) -> str:
    """Path of a profile, measured with a clock; prints its residuals."""
    sampled = run_probes(parse_cluster(CLUSTER), rounds=rounds, clock=clock)
    found = fit(CLUSTER, sampled.samples)
    for r in found.residuals:
        print(f"{r.kind:15} {r.samples:3} median {r.median:.0%} worst {r.worst:.0%} {r.worst_name}")
    print(f"noise {sampled.noise:.0%}", *found.constants, sep="\n", flush=True)
    path = Path(tempfile.mkdtemp()) / "profile.toml"
    origin = Origin("cpu", "", "", {}, rounds, sampled.noise)
    write_whole(path, profile_text(CLUSTER, found, origin, path.name))
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile", nargs="?", help="a file that planner calibrate wrote for cpu:8")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--processor", action="store_true", help="processor seconds, not wall")
    parser.add_argument("--examples", nargs="*", default=EXAMPLES)
    args = parser.parse_args()
    clock = processor_seconds if args.processor else time.perf_counter
    profile = args.profile or calibrated(clock, args.rounds)
    table = Table(
        title=f"step, 8 virtual CPU devices ({'processor' if args.processor else 'wall'} ms)"
    )
    left = ("example", "mode", "mesh")
    for column in (*left, "measured", "spread", "predicted", "compute", "communication", "ratio"):
        table.add_column(column, justify="left" if column in left else "right")
    for name in args.examples:
        for row in measured(name, profile, args.rounds, clock):
            print(*row, flush=True)
            table.add_row(*row)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
