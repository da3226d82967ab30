"""The result and the progress of a search over a bare problem, as text or JSON. No jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.report.units import bytes_text, count_text, percent_text, time_text
from planner.search.problem import Problem, Solution
from planner.search.progress import SearchProgress


@dataclass(frozen=True)
class Searched:
    """A search that was run from the command line.

    Attributes:
        name: the problem's file.
        problem: what was read from it.
        solution: what the search returned.
        read_s: seconds that reading took.
        interrupted: whether it was interrupted before it was done.
        written: the file that holds the choice, if any.
    """

    name: str
    problem: Problem
    solution: Solution
    read_s: float
    interrupted: bool
    written: str | None


def search_rows(searched: Searched) -> tuple[tuple[str, str], ...]:
    """The rows of the report, as names and texts."""
    problem, solution = searched.problem, searched.solution
    sizes = [cost.size for cost in problem.cost_s]
    limit = problem.limit_bytes
    peak = f"{bytes_text(solution.peak_bytes)}, no limit"
    if math.isfinite(limit):
        share = solution.peak_bytes / limit if limit else math.inf
        peak = f"{bytes_text(solution.peak_bytes)} of {bytes_text(limit)} ({percent_text(share)})"
    rows = [
        ("problem", searched.name),
        ("nodes", count_text(len(sizes))),
        ("edges", count_text(len(problem.edges))),
        ("strategies", f"{sum(sizes)}, at most {max(sizes)} of a node"),
        ("cost", cost_text(solution.cost_s) + ("" if solution.feasible else " (infeasible)")),
        ("lower bound", cost_text(solution.lower_bound_s)),
        ("gap", gap_text(solution.gap) if solution.feasible else "unknown"),
        ("peak usage", f"{peak} at moment {solution.peak_moment}"),
        ("feasible", "yes" if solution.feasible else "no"),
        ("proved optimal", "yes" if solution.proved else "no"),
        ("search", solution.search),
        ("stopped because", ("interrupted; " if searched.interrupted else "") + solution.reason),
        ("wall time", f"{time_text(solution.wall_s)}, and {time_text(searched.read_s)} to read"),
    ]
    return (*rows, ("choice", searched.written)) if searched.written else tuple(rows)


def search_text(searched: Searched) -> str:
    """One plain line for each row."""
    rows = search_rows(searched)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def render_search(searched: Searched, console: Console) -> None:
    """Print the rows as a table on a console."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    good = {"yes": "green", "no": "red"}
    for name, text in search_rows(searched):
        table.add_row(Text(name), Text(text, style=good.get(text, "")))
    console.print(table)


def search_json(searched: Searched) -> Mapping[str, object]:
    """The same as plain data; infinite and unknown values are None."""
    problem, solution = searched.problem, searched.solution
    return {
        "problem": searched.name,
        "nodes": len(problem.cost_s),
        "edges": len(problem.edges),
        "strategies": sum(cost.size for cost in problem.cost_s),
        "cost": _finite(solution.cost_s),
        "lower_bound": _finite(solution.lower_bound_s),
        "gap": _finite(solution.gap) if solution.feasible else None,
        "peak_usage": solution.peak_bytes,
        "peak_moment": solution.peak_moment,
        "usage_limit": _finite(problem.limit_bytes),
        "feasible": solution.feasible,
        "proved": solution.proved,
        "search": solution.search,
        "reason": solution.reason,
        "interrupted": searched.interrupted,
        "wall_s": solution.wall_s,
        "read_s": searched.read_s,
    }


def progress_text(progress: SearchProgress | None, elapsed_s: float, limit_s: float) -> str:
    """One line on the progress of a search.

    Args:
        progress: the last report, if there was one.
        elapsed_s: seconds since the search began.
        limit_s: its time limit.
    """
    clock = f"{elapsed_s:.0f} s of {limit_s:.0f} s"
    if progress is None:
        return clock
    cost, lower = progress.cost_s, progress.lower_bound_s
    gap = (cost - lower) / max(abs(cost), 1e-300) if math.isfinite(cost) else math.inf
    best = cost_text(cost) + ("" if progress.feasible or math.isinf(cost) else " (infeasible)")
    parts = [clock, f"best {best}", f"bound {cost_text(lower)}", f"gap {gap_text(gap)}"]
    return ", ".join([*parts, progress.note] if progress.note else parts)


def cost_text(cost: float) -> str:
    """Integers in full, other numbers with ten digits, "-" if it is not finite."""
    if not math.isfinite(cost):
        return "-"
    return f"{cost:.0f}" if float(cost).is_integer() and abs(cost) < 1e15 else f"{cost:.10g}"


def gap_text(gap: float) -> str:
    """``0.00123`` -> ``"0.123 %"``; "unknown" if it is not finite."""
    return f"{100 * max(gap, 0.0):.3g} %" if math.isfinite(gap) else "unknown"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
