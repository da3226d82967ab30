"""Cost of a step through ``parallelize`` against hand-written ``jax.jit``, same shardings.

The hand-written step has the plan's in and out shardings and the plan's constraints inside
(it is the same program); what differs is our call path. Target: at most 1.02.

    python benchmarks/step_overhead.py
    planner launch -n 2 --devices-per-process 4 benchmarks/step_overhead.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
from common import EXAMPLES, example
from rich.console import Console
from rich.table import Table

from executor import initialize, parallelize


def main() -> None:
    role = initialize()
    title = f"a step through parallelize / hand-written jax.jit, {role.processes} processes"
    table = Table(title=title)
    for column in ("example", "jax.jit (ms)", "parallelize (ms)", "ratio"):
        table.add_column(column, justify="right")
    for name in EXAMPLES:
        module = example(name)
        batch = next(iter(module.batches()))
        ours = parallelize(module.train_step, donate_argnums=0)
        compiled = ours.prepare(module.make_state(), batch)
        hand: Any = jax.jit(
            lambda s, b, f=compiled.jitted: f(s, b),
            donate_argnums=0,
            in_shardings=compiled.in_shardings,
        )
        entries = {}
        for key, step in (("jit", hand), ("ours", ours)):
            state, placed = compiled.place(module.make_state(), batch)
            for _ in range(3):
                state, _ = step(state, placed)
            entries[key] = [step, state, placed]
        times: dict[str, list[float]] = {"jit": [], "ours": []}
        for _ in range(30):
            for key, entry in entries.items():
                begun = time.perf_counter()
                entry[1], metrics = entry[0](entry[1], entry[2])
                jax.block_until_ready((entry[1], metrics))
                times[key].append(time.perf_counter() - begun)
        a, b = statistics.median(times["jit"]), statistics.median(times["ours"])
        table.add_row(name, f"{1e3 * a:.2f}", f"{1e3 * b:.2f}", f"{b / a:.3f}")
    if role.process == 0:
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
