"""Published training runs, predicted: error, rank correlation and regret for every table.

    python benchmarks/published.py [FOLDER] [--tables NAME ...] [--rows] [--parts]

FOLDER holds the tables (default: ../shared/published beside the project).
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import published_tables as tables
from published_predict import Step, predict

from costmodels import ClusterError
from planner import MeshwrightError

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


def judge(table: str, found: Sequence[tuple[tables.Run, Step]], left: Counter[str]) -> None:
    """Print one table's figures."""
    errors = [s.total_s / r.step_s - 1 for r, s in found]
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for r, s in found:
        groups[r.group].append((r.step_s / r.sequences, s.total_s / r.sequences))
    several = [g for g in groups.values() if len(g) > 1]
    print(f"{table}: {len(found)} rows", end="")
    if errors:
        mean = sum(abs(e) for e in errors) / len(errors)
        signed = sum(errors) / len(errors)
        pairs = [(r.step_s / r.sequences, s.total_s / r.sequences) for r, s in found]
        print(f", mean error {100 * mean:.1f} %, signed {100 * signed:+.1f} %", end="")
        if len(pairs) > 1:
            print(f", tau {kendall(pairs):.3f}", end="")
    if several:
        print(
            f"; {len(several)} groups: tau {sum(map(kendall, several)) / len(several):.3f}, "
            f"regret mean {100 * sum(map(regret, several)) / len(several):.2f} %, "
            f"worst {100 * max(map(regret, several)):.1f} %",
            end="",
        )
    print()
    for reason, count in left.most_common():
        print(f"    left out {count}: {reason}")


def line(run: tables.Run, step: Step) -> str:
    """One row: what it is, measured, predicted, parts in percent of the prediction."""
    d = run.degrees
    parts = " ".join(
        f"{name[:-2]} {100 * getattr(step, name) / step.total_s:.0f}"
        for name in Step.__dataclass_fields__
    )
    return (
        f"  {run.row.split('#')[1]:>5} {run.hardware[:9]} L{run.model.layers} h{run.model.hidden} "
        f"s{run.model.seq} d{d.data} z{d.zero} f{d.fsdp} c{d.context} t{d.model} p{run.pp} "
        f"b{run.micro}x{run.grad_accum} {run.recompute:.9} {run.kernels.matmul[:6]} "
        f"{run.step_s:.4g} -> {step.total_s:.4g} ({100 * (step.total_s / run.step_s - 1):+.0f}%) "
        f"[{parts}]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--tables", nargs="*", default=list(tables.TABLES))
    parser.add_argument("--rows", action="store_true", help="print every row")
    args = parser.parse_args()
    for name in args.tables:
        begun = time.process_time()
        found: list[tuple[tables.Run, Step]] = []
        left: Counter[str] = Counter()
        for run in tables.read(args.folder, [name]):
            if isinstance(run, tables.LeftOut):
                left[run.reason] += 1
                continue
            try:
                step = predict(run)
            except (ClusterError, MeshwrightError) as error:
                left[str(error).splitlines()[0][:110]] += 1
                continue
            if not math.isfinite(step.total_s):
                left["no finite time"] += 1
                continue
            found.append((run, step))
        if args.rows:
            for run, step in found:
                print(line(run, step))
        judge(name, found, left)
        print(f"    {time.process_time() - begun:.0f} s of processor time")


if __name__ == "__main__":
    main()
