"""A problem and its solution as text."""

from __future__ import annotations

import math

from planner.cost.pricing import Priced
from planner.debug.text.items import number
from planner.search.problem import FORBIDDEN, Array, Solution
from planner.spec import MeshSpec


def problem_text(priced: Priced) -> str:
    """The problem of a mesh: one line per node, edge and usage, with the range of its numbers."""
    problem = priced.problem
    limit = number(problem.limit_bytes) if math.isfinite(problem.limit_bytes) else "unlimited"
    lines = [
        f"problem on {priced.mesh}: {len(problem.names)} nodes, {len(problem.edges)} edges, "
        f"{len(problem.usages)} usages; limit {limit} bytes"
    ]
    for name, cost in zip(problem.names, problem.cost_s, strict=True):
        lines.append(f"  node {name}: {cost.size} strategies, {_span(cost)} s")
    for edge in problem.edges:
        rows, columns = edge.cost_s.shape
        free = int((edge.cost_s == 0).sum())
        lines.append(
            f"  edge {edge.a} - {edge.b}: {rows}x{columns}, {free} free, {_span(edge.cost_s)} s"
        )
    for usage in problem.usages:
        lines.append(
            f"  usage of {usage.node}: moments {usage.start} to {usage.end - 1}, "
            f"{_span(usage.bytes)} bytes"
        )
    return "\n".join(lines)


def solution_text(priced: Priced, solution: Solution) -> str:
    """A solution: its cost, bound and peak, the strategy and the seconds of every node, and the
    seconds of every edge that is not free."""
    problem, choice = priced.problem, solution.choice
    lines = [
        f"solution on {priced.mesh} by {solution.search}: {solution.verdict}",
        f"  cost {number(solution.cost_s)} s, bound {number(solution.lower_bound_s)} s, peak "
        f"{number(solution.peak_bytes)} bytes at moment {solution.peak_moment}",
        f"  stopped: {solution.reason}",
    ]
    for node, (name, chosen, s) in enumerate(zip(problem.names, priced.sets, choice, strict=True)):
        split = _row(priced.mesh, chosen.store[s].tolist(), chosen.use[s].tolist())
        more = "".join(
            f", {name} {int(k)}"
            for name, k in zip(chosen.decisions, chosen.options[s], strict=True)
        )
        lines.append(
            f"  node {name}: strategy {s} of {chosen.count}, {split}{more}, "
            f"{number(float(problem.cost_s[node][s]))} s"
        )
    for edge in problem.edges:
        cost = float(edge.cost_s[choice[edge.a], choice[edge.b]])
        if cost:
            lines.append(f"  edge {edge.a} - {edge.b}: {number(cost)} s")
    return "\n".join(lines)


def _row(mesh: MeshSpec, store: list[int], use: list[int]) -> str:
    """The factors that the axes of a mesh split under one strategy."""
    parts = []
    for axis, stored, used in zip(mesh.names, store, use, strict=True):
        if stored >= 0:
            parts.append(f"{axis} splits f{stored}{'' if used == stored else ' in the store'}")
    return ", ".join(parts) or "replicated"


def _span(table: Array) -> str:
    """The smallest and the largest number that is not forbidden."""
    allowed = table[table < FORBIDDEN]
    if not allowed.size:
        return "all forbidden,"
    low, high = float(allowed.min()), float(allowed.max())
    text = number(low) if low == high else f"{number(low)} to {number(high)}"
    lost = int(table.size - allowed.size)
    return text if not lost else f"{text} ({lost} forbidden)"
