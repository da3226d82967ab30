"""How planning grows: seconds and memory against operations and devices.

Every row is planned in a process of its own, so that the peak of memory is its own. "trace + lower"
is JAX's own, of the same step in the same process; the ratio compares processor seconds of one
process, since wall time swings on shared machines. Peak memory is that of the process once the step
is traced, and what planning adds to it. The steps are those of ``decoders.py`` and, for "gpt-flax",
of ``examples/gpt.py``.

Targets: ratio at most 1.0 (GPT); 5 s and 2 GB (GPT-3, 16,384 devices); 2 s and 1 GiB (Llama-3-8B).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: a model, its layers, a cluster, a search, and a fixed mesh if any."""

    model: str
    layers: int
    cluster: str
    search: str = "auto"
    mesh: str | None = None


CLUSTERS = ("h100:8", "h100:8x8", "h100:8x64", "h100:8x2048")
QUICK = (
    Case("gpt-flax", 4, "h100:8"),
    Case("gpt", 4, "h100:8x64"),
    Case("llama", 4, "h100:8", mesh="data=2,model=4"),
)
CASES = (
    *(Case("gpt-flax", 12, c) for c in CLUSTERS),
    *(Case("gpt", n, c) for n in (12, 48, 96) for c in CLUSTERS),
    Case("gpt3", 96, "h100:8x2048", "recursive_programming"),
    Case("llama", 32, "h100:8"),
    Case("llama", 32, "h100:8x8"),
    Case("llama", 32, "h100:8x8", mesh="data=8,model=8"),
)
COLUMNS = (
    "model",
    "layers",
    "operations",
    "cluster",
    "search",
    "trace + lower s",
    "planning s",
    "ratio",
    "peak MB",
    "planning MB",
    "mesh",
    "gap",
)


def program(case: Case) -> tuple[Any, tuple[Any, ...]]:
    """The step and the shapes of its arguments."""
    import common  # noqa: F401
    import decoders
    import jax

    from costmodels import parse_cluster

    devices = parse_cluster(case.cluster).num_devices
    if case.model == "llama":
        return decoders.build(decoders.Llama(layers=case.layers, batch=max(8, devices)))
    if case.model == "gpt3":
        return decoders.build(decoders.GPT(layers=case.layers))
    if case.model == "gpt":
        batch = min(64, 4 * devices)  # 96 layers of 64 samples don't fit on 8 devices
        sizes = {"dim": 768, "heads": 12, "batch": batch, "seq": 1024, "remat": False}
        return decoders.build(decoders.GPT(layers=case.layers, **sizes))
    import gpt

    config = gpt.Config(layers=case.layers, width=768, heads=12, seq=1024, batch=64, vocab=50304)
    make_state, step, batch = gpt.build(config)
    return step, (jax.eval_shape(make_state), batch)


def measure(case: Case) -> dict[str, Any]:
    """Plan one case in this process."""
    step, arguments = program(case)
    import jax

    from planner.graph.trace import trace
    from planner.planning import plan_traced
    from planner.request.parsed import parse_request

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    begun = time.process_time()
    traced = trace(step, arguments)
    before, middle = peak(), time.process_time()
    request = parse_request(case.cluster, search=case.search, mesh=case.mesh)
    plan = plan_traced(traced, arguments, request, 0, time.perf_counter()).plan
    planning, after = time.process_time() - middle, peak()
    jax.clear_caches()
    begun = time.process_time()
    jax.jit(step).trace(*arguments).lower(lowering_platforms=("cpu",))
    return {
        "operations": len(traced.graph.ops),
        "devices": request.cluster.num_devices,
        "lower_s": time.process_time() - begun,
        "planning_s": planning,
        "peak_mb": after,
        "planning_mb": after - before,
        "mesh": str(plan.mesh),
        "gap": plan.search.gap,
    }


def measured_apart(case: Case) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    command = [sys.executable, __file__, "--case", json.dumps(dataclasses.asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"{case} failed")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def plot(rows: list[tuple[Case, dict[str, Any]]], path: str) -> None:
    """Planning seconds against operations and against devices, log axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for pane, key, other in (
        (panes[0], "operations", "devices"),
        (panes[1], "devices", "operations"),
    ):
        lines: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
        for case, row in rows:
            point = (row[key], row["planning_s"], row["lower_s"])
            lines.setdefault((case.model, row[other]), []).append(point)
        for (model, fixed), points in sorted(lines.items()):
            points.sort()
            xs, ys, lower = zip(*points, strict=True)
            label = f"{model}, {fixed:,} {other}"
            pane.plot(xs, ys, "o-", label=label, markersize=4, linewidth=1)
            if key == "operations":
                pane.plot(xs, lower, "x", color="grey", markersize=4)
        pane.set(xscale="log", yscale="log", xlabel=key)
        pane.grid(True, which="both", alpha=0.25)
        pane.legend(fontsize=6)
    panes[0].set_ylabel("processor seconds (grey: JAX's trace + lower)")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three small cases")
    parser.add_argument("--plot", help="path of a PNG to write (needs matplotlib)")
    parser.add_argument("--models", nargs="*", help="only these models")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(Case(**json.loads(args.case)))))
        return
    cases = [
        c for c in (QUICK if args.quick else CASES) if not args.models or c.model in args.models
    ]
    table = Table(title="planning after tracing / JAX's trace + lower")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    rows = []
    for case in cases:
        row = measured_apart(case)
        rows.append((case, row))
        print(case, row, file=sys.stderr, flush=True)
        table.add_row(
            case.model,
            str(case.layers),
            str(row["operations"]),
            case.cluster,
            case.search,
            f"{row['lower_s']:.2f}",
            f"{row['planning_s']:.2f}",
            f"{row['planning_s'] / row['lower_s']:.2f}",
            f"{row['peak_mb']:.0f}",
            f"{row['planning_mb']:.0f}",
            row["mesh"] + (" (given)" if case.mesh else ""),
            f"{100 * row['gap']:.2g} %",
        )
    Console(width=160).print(table)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
