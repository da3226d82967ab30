"""Published training runs, predicted: error, rank correlation and regret for every table.

    python benchmarks/published.py [FOLDER] [--tables NAME ...] [--every N] [--rows] [--choose]

FOLDER holds the tables (default: ../shared/published beside the project): any CSV with the columns
``framework``, ``num_devices`` and ``step_time_seconds``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import published_choose as choosing
import published_tables as tables
from published_predict import Step, predict
from published_residuals import residuals_text

from costmodels import ClusterError
from planner import MeshwrightError

LARGE = 400
"""Rows of a table from which on ``--every`` leaves some out."""
FOLDER = Path(__file__).resolve().parents[2] / "shared" / "published"


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-a of (measured, predicted); 1 when both order all runs alike."""
    count = len(pairs)
    score = sum(
        (1 if d > 0 else -1 if d < 0 else 0)
        for i in range(count)
        for j in range(i)
        for d in ((pairs[i][0] - pairs[j][0]) * (pairs[i][1] - pairs[j][1]),)
    )
    return score / (count * (count - 1) / 2)


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """Measured time of the run that the prediction likes best, over the best one, minus 1."""
    chosen = min(pairs, key=lambda p: p[1])
    return chosen[0] / min(p[0] for p in pairs) - 1.0


@dataclasses.dataclass(frozen=True)
class Figures:
    """How well a set of rows is predicted. ``error``, ``regret``: means; ``tau`` in groups."""

    rows: int
    error: float
    median: float
    signed: float
    tau: float
    groups: int
    tau_in_groups: float
    regret: float
    worst: float

    def line(self, name: str) -> str:
        """A row of the summary; errors and regrets in percent."""
        within = f"{self.groups:4} {'':24}"
        if self.groups:
            within = f"{self.groups:4} {self.tau_in_groups:6.3f} {100 * self.regret:8.2f} "
            within += f"{100 * self.worst:8.1f}"
        return (
            f"{name:26} {self.rows:5} {100 * self.error:6.1f} {100 * self.median:6.1f} "
            f"{100 * self.signed:+6.1f} {self.tau:6.3f} {within}"
        )


HEADER = (
    f"{'table':26} {'rows':>5} {'mean %':>6} {'median':>6} {'signed':>6} {'tau':>6} "
    f"{'groups':>4} {'tau':>4} "
    f"{'regret %':>8} {'worst %':>8}"
)


def grouped(found: Sequence[tuple[tables.Run, Step]]) -> list[list[tuple[float, float]]]:
    """(measured, predicted) seconds a sequence of the plans of every group with more than one;
    a plan that was measured several times counts once, with the mean."""
    groups: dict[str, dict[tables.Plan, list[tuple[float, float]]]] = defaultdict(dict)
    for r, s in found:
        pair = (r.step_s / r.sequences, s.total_s / r.sequences)
        groups[r.group].setdefault(r.plan, []).append(pair)
    out = []
    for plans in groups.values():
        means = [
            (sum(m for m, _ in p) / len(p), sum(q for _, q in p) / len(p)) for p in plans.values()
        ]
        if len(means) > 1:
            out.append(means)
    return out


def judge(found: Sequence[tuple[tables.Run, Step]]) -> Figures:
    """The figures of some rows."""
    errors = [s.total_s / r.step_s - 1 for r, s in found]
    pairs = [(r.step_s / r.sequences, s.total_s / r.sequences) for r, s in found]
    several = grouped(found)
    count = max(len(several), 1)
    return Figures(
        len(found),
        sum(abs(e) for e in errors) / len(errors),
        statistics.median(map(abs, errors)),
        sum(errors) / len(errors),
        kendall(pairs) if len(pairs) > 1 else 1.0,
        len(several),
        sum(map(kendall, several)) / count,
        sum(map(regret, several)) / count,
        max(map(regret, several), default=0.0),
    )


def line(run: tables.Run, step: Step) -> str:
    """One row: what it is, measured, predicted, parts in percent of the prediction."""
    d = run.degrees
    parts = " ".join(
        f"{name[:-2]} {100 * getattr(step, name) / step.total_s:.0f}"
        for name in Step.__dataclass_fields__
        if name in ("host_s", "odd_s", "hidden_s", "compute_s", "communication_s")
    )
    return (
        f"  {run.row.split('#')[1]:>5} {run.hardware[:9]} L{run.model.layers} h{run.model.hidden} "
        f"s{run.model.seq} d{d.data} z{d.zero} f{d.fsdp} c{d.context} t{d.model} p{run.pp} "
        f"b{run.micro}x{run.grad_accum} {run.recompute:.9} {run.kernels.matmul[:6]} "
        f"{run.step_s:.4g} -> {step.total_s:.4g} ({100 * (step.total_s / run.step_s - 1):+.0f}%) "
        f"[{parts}]"
    )


def one(run: tables.Run) -> tuple[tables.Run, Step | str]:
    """A run with its prediction, or why there is none."""
    try:
        step = predict(run)
    except (ClusterError, MeshwrightError) as error:
        return run, str(error).splitlines()[0][:110]
    return run, step if math.isfinite(step.total_s) else "no finite time"


def predicted(
    folder: Path, name: str, every: int = 1, jobs: int = 1
) -> tuple[list[tuple[tables.Run, Step]], Counter[str]]:
    """A table's rows with their predictions, and why rows were left out."""
    rows = tables.read(folder, [name])
    left = Counter(r.reason for r in rows if isinstance(r, tables.LeftOut))
    runs = [r for r in rows if isinstance(r, tables.Run)]
    runs = runs[::every] if len(runs) > LARGE else runs
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        results = pool.map(one, runs, chunksize=4) if jobs > 1 else list(map(one, runs))
    found = [(run, step) for run, step in results if isinstance(step, Step)]
    left.update(reason for _, reason in results if isinstance(reason, str))
    return found, left


def memory_line(name: str, found: Sequence[tuple[tables.Run, Step]]) -> str:
    """Predicted over measured bytes of a device, where a table has them."""
    ratios = [s.peak_bytes / r.memory_bytes for r, s in found if r.memory_bytes]
    if not ratios:
        return ""
    off = [abs(x - 1) for x in ratios]
    return (
        f"    memory of {len(ratios)} rows: median {statistics.median(ratios):.2f} of measured, "
        f"{100 * statistics.median(off):.0f} % off; {min(ratios):.2f} to {max(ratios):.2f}"
    )


def choices(folder: Path, name: str) -> None:
    """Print the planner's choice beside the fastest published plans of a table."""
    runs = [r for r in tables.read(folder, [name]) if isinstance(r, tables.Run)]
    for run in choosing.fastest(runs):
        try:
            print(choosing.line(choosing.choose(run)), flush=True)
        except (ClusterError, MeshwrightError) as error:
            print(f"  {run.row}: {str(error).splitlines()[0]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--tables", nargs="*", help="default: all of the folder")
    parser.add_argument("--residuals", type=Path, help="write the residuals to this file")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="every Nth row of tables of over 400"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument(
        "--choose", action="store_true", help="plan the fastest runs freely instead"
    )
    args = parser.parse_args()
    summary: list[str] = []
    every: list[tuple[tables.Run, Step]] = []
    for name in args.tables or tables.names(args.folder):
        if args.choose:
            print(name)
            choices(args.folder, name)
            continue
        begun = time.perf_counter()
        found, left = predicted(args.folder, name, args.every, args.jobs)
        every += found
        if args.rows:
            for run, step in found:
                print(line(run, step))
        parts = {f"{name}, pipelined": [f for f in found if f[0].pp > 1]}
        parts[f"{name}, all"] = found if parts[f"{name}, pipelined"] else []
        parts = {name: [f for f in found if f[0].pp == 1]} | parts
        summary += [judge(part).line(which) for which, part in parts.items() if part]
        seconds = time.perf_counter() - begun
        cpu_s = statistics.median(s.cpu_s for _, s in found) if found else 0.0
        print(f"{name}: {len(found)} rows, {seconds:.0f} s, {cpu_s:.2f} s of CPU each", flush=True)
        if text := memory_line(name, found):
            print(text)
        for reason, count in left.most_common():
            print(f"    left out {count}: {reason}")
    if summary:
        flat = [f for f in every if f[0].pp == 1]
        summary += [
            judge(part).line(n) for n, part in (("no pipelines", flat), ("all", every)) if part
        ]
        print("", HEADER, *summary, sep="\n")
    if args.residuals and every:
        args.residuals.write_text(residuals_text(every, grouped(every)))


if __name__ == "__main__":
    main()
