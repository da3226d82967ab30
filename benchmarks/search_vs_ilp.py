"""dynamic_programming against the integer program, on problems of the six examples.

For each example and cluster the step is traced, the mesh that the planner picks is priced, and both
searches solve the same `Problem` (the whole step, nothing folded). Target: the same optimum, or a
gap that both bounds certify, at least 50 times faster; recursive_programming (rp) within 1.10 of
its cost. Wall time swings on shared machines; all are timed in turn in one process.

    python benchmarks/search_vs_ilp.py --clusters h100:8 h100:8x8 --ilp-limit 60
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from common import EXAMPLES, example
from rich.console import Console
from rich.table import Table

from planner.graph.trace import Traced, trace
from planner.planning import plan_traced
from planner.request.parsed import parse_request
from planner.search import SEARCHES, Problem, Solution


def problem_of(traced: Traced, arguments: tuple[Any, ...], cluster: str) -> tuple[str, Problem]:
    """The mesh that the planner picks, and the whole step's problem there."""
    request = parse_request(cluster)
    planned = plan_traced(traced, arguments, request, None, time.perf_counter())
    return str(planned.plan.mesh), planned.extraction.priced.problem


def timed(name: str, problem: Problem, limit_s: float, repeats: int) -> tuple[Solution, float]:
    """A solution and the median of the seconds it took."""
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        found = SEARCHES[name](problem, time_limit_s=limit_s)
        seconds.append(time.perf_counter() - begun)
    return found, statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", nargs="*", default=list(EXAMPLES))
    parser.add_argument("--clusters", nargs="*", default=["h100:8", "h100:8x8"])
    parser.add_argument("--ilp-limit", type=float, default=60.0)
    args = parser.parse_args()
    table = Table(title="dynamic_programming / ilp on the same problem")
    columns = "example, mesh, nodes, entries, dp s, ilp s, faster, dp / ilp cost, dp gap, ilp gap"
    columns += ", rp s, rp / dp cost"
    for column in columns.split(", "):
        table.add_column(column, justify="right")
    for name in args.examples:
        module = example(name)
        arguments = module.example_args()
        traced = trace(module.train_step, arguments)
        for cluster in args.clusters:
            mesh, problem = problem_of(traced, arguments, cluster)
            fast, fast_s = timed("dynamic_programming", problem, 60.0, 3)
            exact, exact_s = timed("ilp", problem, args.ilp_limit, 1)
            quick, quick_s = timed("recursive_programming", problem, 60.0, 3)
            ratio = fast.cost_s / exact.cost_s if exact.feasible else float("nan")
            table.add_row(
                name,
                mesh,
                f"{len(problem.names)}",
                f"{sum(edge.cost_s.size for edge in problem.edges):.2g}",
                f"{fast_s:.3f}",
                f"{exact_s:.2f}",
                f"{exact_s / fast_s:.0f}x",
                f"{ratio:.9f}",
                f"{100 * fast.gap:.2g} %",
                f"{100 * exact.gap:.2g} %",
                f"{quick_s:.3f}",
                f"{quick.cost_s / fast.cost_s:.6f}",
            )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
