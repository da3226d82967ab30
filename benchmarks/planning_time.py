"""Planning time against JAX's own trace + lower of the same step, in one run.

The step is the unrolled GPT train step (AdamW). Planning excludes the trace, which both
need. Target: ratio at most 1.0. Wall time swings on shared machines; both sides are
measured in turn and the medians compared.
"""

from __future__ import annotations

import argparse
import statistics
import time

import common  # noqa: F401
import gpt
import jax
from rich.console import Console
from rich.table import Table

from planner.graph.trace import trace
from planner.planning import plan_traced
from planner.request.options import parse_request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[12])
    parser.add_argument("--clusters", nargs="*", default=["h100:8", "h100:8x8"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--search", default="auto")
    args = parser.parse_args()
    table = Table(title="planning after tracing / JAX's trace + lower")
    for column in (
        "layers",
        "cluster",
        "operations",
        "trace + lower (s)",
        "planning (s)",
        "ratio",
        "mesh",
        "gap",
    ):
        table.add_column(column, justify="right")
    for layers in args.layers:
        config = gpt.Config(layers=layers, width=768, heads=12, seq=1024, batch=64, vocab=50304)
        make_state, step, batch = gpt.build(config)
        arguments = (jax.eval_shape(make_state), batch)
        for cluster in args.clusters:
            lower, planning = [], []
            for _ in range(args.repeats):
                jax.clear_caches()
                begun = time.perf_counter()
                jax.jit(step).trace(*arguments).lower(lowering_platforms=("cpu",))
                lower.append(time.perf_counter() - begun)
                traced = trace(step, arguments)
                begun = time.perf_counter()
                plan = plan_traced(
                    traced, arguments, parse_request(cluster, search=args.search), 0, begun
                ).plan
                planning.append(time.perf_counter() - begun)
            a, b = statistics.median(lower), statistics.median(planning)
            table.add_row(
                str(layers),
                cluster,
                str(len(traced.graph.ops)),
                f"{a:.2f}",
                f"{b:.2f}",
                f"{b / a:.2f}",
                str(plan.mesh),
                f"{100 * plan.search.gap:.3g} %",
            )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
