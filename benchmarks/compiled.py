"""Chosen plans beside manual ones, as the production TPU compiler compiles them.

Every manual plan of ``compiled_models.py`` and the chosen plan of each model are compiled ahead of
time; no TPU is needed, ``libtpu`` is (``pip install 'meshwright[aot-tpu]'``). Results go to a file
as they come, and what stands there is not compiled again. Printed, per model: the chosen plan's
step over the best manual one's, work and wire one after the other (cycles / clock, gathers and
scatters at memory speed, bytes over all links of a chip), then prediction over compiled for the
time and the peak.

    python benchmarks/compiled.py
    python benchmarks/compiled.py --models vit unet --ours
    python benchmarks/compiled.py --confirm
    python benchmarks/compiled.py --unseen --ours
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import common  # noqa: F401
from compiled_models import MODELS, Model
from compiled_unseen import UNSEEN
from rich.console import Console
from rich.table import Table

from costmodels import Cluster, parse_cluster
from executor.run.compile import rewritten
from executor.verify.aot import compile_step, devices_of, read_compiled, tpu_seconds
from executor.verify.predictions import planned_wire
from planner import make_plan
from planner.errors import RequestError
from planner.graph.trace import trace

RECORD = Path("build/compiled.jsonl")
EVERY: dict[str, Callable[[], Model]] = {**MODELS, **UNSEEN}
Row = dict[str, Any]


def measured(compiled: Any, cluster: Cluster) -> Row:
    """What a compiled step costs one device."""
    module = compiled.module
    links = 2 * sum(length > 1 for length in cluster.shape)
    work = tpu_seconds(module.cycles, cluster)
    work += module.unpriced_bytes / cluster.device.memory_bytes_per_s
    return {
        "work_s": work,
        "wire_s": module.wire_bytes / (links * cluster.link.bytes_per_s),
        "peak": compiled.peak_bytes,
        "fits": compiled.peak_bytes <= cluster.device.memory_bytes,
        "kinds": {k: t.wire_bytes for k, t in module.by_kind().items()},
    }


def manual(model: Model, name: str, cluster: Cluster) -> Row:
    """One manual plan."""
    lowered = model.lower(model.plans[name], devices_of(cluster))
    return measured(read_compiled(lowered.compile()), cluster)


def ours(model: Model, cluster: Cluster, confirm: bool) -> Row:
    """The planner's plan."""
    options = {"confirm": "tpu"} if confirm else {}
    begun = time.perf_counter()
    plan = make_plan(
        model.step, *model.args, cluster=model.cluster, donate_argnums=(0, 1), **options
    )
    planning = time.perf_counter() - begun
    traced = trace(rewritten(model.step, model.args, plan.recipe), model.args)
    compiled = compile_step(traced, plan, cluster, donate_argnums=(0, 1))
    p = plan.prediction
    return measured(compiled, cluster) | {
        "mesh": ", ".join(filter(None, (str(plan.mesh), str(plan.recipe)))),
        "lowering": str(plan.lowering),
        "planning_s": planning,
        "predicted_s": p.step_s,
        "predicted_compute_s": p.compute_s,
        "predicted_peak": p.peak_bytes,
        "planned_kinds": {k: sent for k, (_, sent) in planned_wire(plan).items()},
    }


def attempt(make: Callable[[], Row]) -> Row:
    """A row; of a step that the compiler refuses, its words."""
    begun = time.perf_counter()
    try:
        row = make()
    except (RequestError, RuntimeError) as error:
        row = {"fits": False, "error": str(error)[:300]}
    return row | {"compile_s": round(time.perf_counter() - begun, 1)}


def step_s(row: Row) -> float:
    """Work and wire, one after the other."""
    return float(row["work_s"] + row["wire_s"])


def table(rows: list[Row]) -> None:
    """Print the comparison."""
    out = Table(title="the chosen plan / the best manual plan, as compiled")
    for column in (
        "model, cluster, best manual, ms, chosen, ms, ratio, lowering, GB manual, chosen, "
        "predicted / compiled: compute, peak, wire"
    ).split(", "):
        out.add_column(column)
    ratios = []
    for name in EVERY:
        mine = [r for r in rows if r["model"] == name]
        made = [r for r in mine if r["plan"] not in ("ours", "confirmed") and r["fits"]]
        for row in (r for r in mine if r["plan"] in ("ours", "confirmed") and r["fits"]):
            if not made:
                continue
            best = min(made, key=step_s)
            ratios.append(step_s(row) / step_s(best))
            sent = sum(row["kinds"].values())
            out.add_row(
                name,
                row["cluster"],
                f"{best['plan']} of {len(made)}",
                f"{1e3 * step_s(best):.1f}",
                f"{row['plan']} {row['mesh']}",
                f"{1e3 * step_s(row):.1f}",
                f"{ratios[-1]:.3f}",
                row["lowering"],
                f"{best['peak'] / 1e9:.2f}",
                f"{row['peak'] / 1e9:.2f}",
                f"{row['predicted_compute_s'] / row['work_s']:.2f}",
                f"{row['predicted_peak'] / row['peak']:.2f}",
                f"{sum(row['planned_kinds'].values()) / max(1.0, sent):.2f}",
            )
    Console(width=180).print(out)
    if ratios:
        print(f"mean {statistics.mean(ratios):.3f}, worst {max(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=list(EVERY))
    parser.add_argument("--unseen", action="store_true", help="the second set of models")
    parser.add_argument("--ours", action="store_true", help="compile no manual plans")
    parser.add_argument("--confirm", action="store_true", help="plan with confirm='tpu', too")
    parser.add_argument("--record", type=Path, default=RECORD)
    args = parser.parse_args()
    args.record.parent.mkdir(parents=True, exist_ok=True)
    text = args.record.read_text() if args.record.exists() else ""
    rows: list[Row] = [json.loads(line) for line in text.splitlines()]
    known = {(r["model"], r["plan"]) for r in rows}
    for name in args.models or (UNSEEN if args.unseen else MODELS):
        model = EVERY[name]()
        cluster = parse_cluster(model.cluster)
        jobs: dict[str, Callable[[], Row]] = {"ours": lambda m=model, c=cluster: ours(m, c, False)}
        if args.confirm:
            jobs["confirmed"] = lambda m=model, c=cluster: ours(m, c, True)
        if not args.ours:
            jobs |= {p: lambda m=model, c=cluster, p=p: manual(m, p, c) for p in model.plans}
        for plan, job in jobs.items():
            if (name, plan) in known:
                continue
            row = {"model": name, "cluster": model.cluster, "plan": plan, **attempt(job)}
            rows.append(row)
            with args.record.open("a") as out:
                out.write(json.dumps(row) + "\n")
    table(rows)


if __name__ == "__main__":
    main()
