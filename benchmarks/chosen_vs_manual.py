"""Measured step time on 8 virtual CPU devices: the chosen plan against plans by hand.

For each example: pure data parallel, FSDP, Megatron-style tensor parallel on 2, 4 and 8, and
the plan that AUTO_PARALLEL chose. Steps of all of them are interleaved in rounds, in another
order every round (a step leaves the cores and caches in a state that the next one feels), so a
slow moment of the machine hits all alike; the ratio is of medians. Target: at most 1.05.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import jax
from common import EXAMPLES, example, manual_shardings
from rich.console import Console
from rich.table import Table

from executor import parallelize

MANUAL = ("data", "fsdp", "tensor2", "tensor4", "tensor8")


def runners(name: str) -> dict[str, Any]:
    """One [step, state, batch] per plan, warmed up."""
    module = example(name)
    batch = next(iter(module.batches()))
    out: dict[str, Any] = {}
    for kind in MANUAL:
        state = module.make_state()
        s, b = manual_shardings(name, kind, state, batch)
        step = jax.jit(
            module.train_step, in_shardings=(s, b), out_shardings=(s, None), donate_argnums=0
        )
        out[kind] = [step, jax.device_put(state, s), jax.device_put(batch, b)]
    chosen = parallelize(module.train_step, donate_argnums=0)
    state = module.make_state()
    compiled = chosen.prepare(state, batch)
    state, placed = compiled.place(state, batch)
    out["chosen"] = [chosen, state, placed]
    for entry in out.values():
        for _ in range(2):
            entry[1], _ = entry[0](entry[1], entry[2])
    out["chosen"].append(chosen.plan)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("examples", nargs="*", default=EXAMPLES)
    args = parser.parse_args()
    table = Table(title="measured step time, 8 virtual CPU devices (ms, median of rounds)")
    for column in ("example", *MANUAL, "chosen", "mesh", "predicted", "chosen / best manual"):
        table.add_column(column, justify="left" if column in ("example", "mesh") else "right")
    for name in args.examples or EXAMPLES:
        entries = runners(name)
        times: dict[str, list[float]] = {k: [] for k in entries}
        order = random.Random(0)
        for _ in range(args.rounds):
            for kind in order.sample(sorted(entries), len(entries)):
                entry = entries[kind]
                begun = time.perf_counter()
                entry[1], metrics = entry[0](entry[1], entry[2])
                jax.block_until_ready((entry[1], metrics))
                times[kind].append(time.perf_counter() - begun)
        median = {k: statistics.median(v) for k, v in times.items()}
        best = min(median[k] for k in MANUAL)
        plan = entries["chosen"][3]
        table.add_row(
            name,
            *(f"{1e3 * median[k]:.1f}" for k in (*MANUAL, "chosen")),
            str(plan.mesh),
            f"{1e3 * plan.prediction.step_s:.1f}",
            f"{median['chosen'] / best:.2f}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
