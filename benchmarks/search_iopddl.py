"""The public IOPDDL instances (ASPLOS 2025 / EuroSys 2025 contest) under the contest's limits.

Time counts from the first byte read; the compiled kernels are loaded (and on a machine's first run
compiled) before, as a contest's build would be. Scores to compare with are the published final
results: the winner's (C++, 8 processes), the best of 20 teams, and the best lower bound known.

    python benchmarks/search_iopddl.py --share 1.0 --instances ../shared/iopddl
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import common  # noqa: F401
import numpy as np
from rich.console import Console
from rich.table import Table

from planner.search import SEARCHES, Edge, Problem, Usage, read_iopddl
from planner.search.registry import solve

# id: (contest limit in seconds, winner, best of 20 teams, best known lower bound)
PUBLISHED = {
    "A": (60, 6569457676, 6548641531, 6.51e9),
    "B": (60, 532843, 532843, 532843),
    "C": (60, 84102445260, 84102445260, 8.25e10),
    "M": (180, 49928460991, 49928460991, 4.94e10),
    "P": (240, 662197407330, 651833115436, 6.16e11),
    "S": (240, 1534613444, 1534613444, 1.51e9),
}


def warm() -> None:
    """Load the compiled kernels on a small problem that needs them all."""
    rng = np.random.default_rng(0)
    count, size = 40, 6
    edges = tuple(
        Edge(i, j, rng.random((size, size)))
        for i in range(count)
        for j in range(i + 1, count)
        if rng.random() < 0.3
    )
    usages = tuple(Usage(i, i, i + 9, rng.random(size)) for i in range(count))
    costs = tuple(rng.random(size) for _ in range(count))
    problem = Problem(tuple(map(str, range(count))), costs, edges, usages, 4.5)
    SEARCHES["dynamic_programming"](problem, time_limit_s=2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=Path, default=Path("../shared/iopddl"))
    parser.add_argument("--only", nargs="*", default=list(PUBLISHED))
    parser.add_argument("--share", type=float, default=1.0, help="of the contest's time limit")
    parser.add_argument("--search", default="dynamic_programming")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    warm()
    table = Table(title=f"{args.search}, {args.share:g} x the contest's time limits")
    columns = (
        "id, nodes, limit s, used s, cost, / winner, / best team, bound / cost, feasible, proved"
    )
    for column in columns.split(", "):
        table.add_column(column, justify="right")
    ratios = []
    for name in args.only:
        limit, winner, best, _ = PUBLISHED[name]
        begun = time.monotonic()
        problem = read_iopddl(args.instances / f"asplos-2025-iopddl-{name}.json.gz")
        left = args.share * limit - (time.monotonic() - begun)
        found = solve(args.search, problem, left, {"threads": args.threads})
        used = time.monotonic() - begun
        ratio = found.cost_s / winner if found.feasible else math.inf
        ratios.append(ratio)
        table.add_row(
            name,
            f"{len(problem.names)}",
            f"{args.share * limit:g}",
            f"{used:.1f}",
            f"{found.cost_s:.0f}",
            f"{ratio:.5f}",
            f"{found.cost_s / best:.5f}",
            f"{found.lower_bound_s / found.cost_s:.5f}",
            "yes" if found.feasible else "NO",
            "yes" if found.proved else "no",
        )
    console = Console(width=130)
    console.print(table)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    console.print(f"geometric mean of cost / winner's: {mean:.5f}")


if __name__ == "__main__":
    main()
