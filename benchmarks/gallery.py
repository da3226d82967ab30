"""Published packages, planned at real size and run at a small one: `make gallery`.

    python benchmarks/gallery.py [NAME ...]

Each file of ``examples/gallery`` imports a package and builds a train step of a model in it, with
no line of the package changed. At real size the step is traced from shapes and planned for a
cluster; beside the plan stands FSDP over all devices, the usual choice, under the same cost model
(with the recipe that fits). At the small size it runs on 8 virtual CPU devices under a plan that
splits whatever can be split (links that are almost free), and its numbers are compared with the
unsharded step's.

``error`` is the largest difference relative to the largest value of an array, or to 1;
``fallbacks`` counts operations without a sharding rule. A package that is not installed is left
out, and named.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gallery"))

import jax
from rich.console import Console
from rich.table import Table

from planner import make_plan
from planner.errors import MeshwrightError
from planner.report.units import bytes_text, time_text
from tests.test_gallery import NAMES, tiny
from tests.zoo.running import outcome

HEAD = "program,cluster,operations,strategy,recipe,step,peak,FSDP,fallbacks,planning,error"


def real(module: Any) -> list[str]:
    """The cells of a program at real size."""
    make_state, step, make_batch = module.build(True)
    args = jax.eval_shape(make_state), jax.eval_shape(make_batch)
    options: dict[str, Any] = {"cluster": module.CLUSTER, "donate_argnums": 0}
    begun = time.process_time()
    try:
        plan = make_plan(step, *args, **options)
    except MeshwrightError as error:
        return [module.CLUSTER, "", str(error).splitlines()[0], *[""] * 6]
    planning_s = time.process_time() - begun
    try:
        usual = make_plan(
            step,
            *args,
            mode="DATA_PARALLEL",
            zero=3,
            microbatches=plan.microbatches,
            remat=plan.remat,
            **options,
        ).prediction.step_s
        beside = f"{plan.prediction.step_s / usual:.3f}"
    except MeshwrightError:
        beside = "does not fit"
    recipe = [f"{plan.microbatches} microbatches"] if plan.microbatches > 1 else []
    recipe += [f"remat {plan.remat}"] if plan.remat != "none" else []
    return [
        module.CLUSTER,
        str(len(plan.op_index)),
        plan.strategy,
        ", ".join(recipe),
        time_text(plan.prediction.step_s),
        bytes_text(plan.prediction.peak_bytes),
        beside,
        str(len(plan.fallbacks)),
        f"{planning_s:.1f} s",
    ]


def main() -> int:
    """Print the table; 1 where a program was not planned or not equal."""
    table = Table(title="Published packages", caption="FSDP: time over that of FSDP")
    for column in HEAD.split(","):
        table.add_column(column)
    missing, good, rows = [], 0, 0
    for name in sys.argv[1:] or NAMES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name}: {error}")
            continue
        found = outcome(tiny(name), "recursive_programming")
        cells = real(module)
        rows, good = rows + 1, good + (not found.fault and bool(cells[4]))
        table.add_row(name, *cells, found.fault or f"{found.error:.0e}")
        print(name, *cells, found.fault or f"{found.error:.0e}", sep=" | ", flush=True)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(f"{good} of {rows} planned at real size and equal at a small one")
    for line in missing:
        print(f"left out: {line}")
    return 0 if good == rows else 1


if __name__ == "__main__":
    sys.exit(main())
