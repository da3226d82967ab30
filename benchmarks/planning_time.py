"""Planning time against JAX's own trace + lower of the same step, in one run.

The step is the unrolled GPT train step (AdamW). Planning is all of ``make_plan``, recipes for what
does not fit included, less the trace, which both need. Target: ratio at most 1.0. CPU seconds; both
sides are measured in turn and the medians compared.
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

from planner.planning import plan_step


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
                begun = time.process_time()
                traced = jax.jit(step).trace(*arguments)
                tracing = time.process_time() - begun
                traced.lower(lowering_platforms=("cpu",))
                lower.append(time.process_time() - begun)
                jax.clear_caches()
                begun = time.process_time()
                planned = plan_step(step, *arguments, cluster=cluster, search=args.search)
                planning.append(time.process_time() - begun - tracing)
            plan = planned.plan
            a, b = statistics.median(lower), statistics.median(planning)
            table.add_row(
                str(layers),
                cluster,
                str(len(plan.op_index)),
                f"{a:.2f}",
                f"{b:.2f}",
                f"{b / a:.2f}",
                ", ".join(filter(None, (str(plan.mesh), str(plan.recipe)))),
                f"{100 * plan.search.gap:.3g} %",
            )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
