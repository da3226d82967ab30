"""Reading and writing the public IOPDDL contest form (ASPLOS 2025 / EuroSys 2025).

An instance is ``{"problem": {"name", "nodes": {"intervals", "costs", "usages"}, "edges": {"nodes",
"costs"}, "usage_limit"}}``: one interval and one usage per strategy for each node, edge costs
row-major over the strategies of the nodes they name, 1e18 for a forbidden pair.  The form allows
one usage a node; a further usage is written as an alias node, tied by an edge that is infinite off
its diagonal.

Paper: Moffitt and Fegade, "The ASPLOS 2025 / EuroSys 2025 Contest on Intra-Operator Parallelism for
Distributed Deep Learning", 2025.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from planner.search.problem import FORBIDDEN, Array, Edge, Problem, Usage, verify


def read_iopddl(path: str | Path) -> Problem:
    """Read an instance; a name that ends in ``.gz`` is decompressed.

    Args:
        path: the file.

    Returns:
        The problem; nodes are named n0, n1, ...

    Raises:
        ValueError: when the instance is malformed or an edge names more than two nodes.
    """
    file = Path(path)
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    body = json.loads(raw)["problem"]
    nodes, links = body["nodes"], body["edges"]
    costs = [np.array(cost, dtype=np.float64) for cost in nodes["costs"]]
    edges: list[Edge] = []
    for ends, flat in zip(links["nodes"], links["costs"], strict=True):
        table = np.array(flat, dtype=np.float64)
        if len(ends) == 1:
            costs[ends[0]] = costs[ends[0]] + table
        elif len(ends) == 2:
            shape = (costs[ends[0]].size, costs[ends[1]].size)
            edges.append(Edge(ends[0], ends[1], table.reshape(shape)))
        else:
            raise ValueError(f"edge {ends}: more than two nodes")
    usages = [
        Usage(node, int(start), int(end), np.array(taken, dtype=np.float64))
        for node, ((start, end), taken) in enumerate(
            zip(nodes["intervals"], nodes["usages"], strict=True)
        )
        if start < end and any(taken)
    ]
    limit = body.get("usage_limit")
    names = tuple(f"n{node}" for node in range(len(costs)))
    problem = Problem(
        names,
        tuple(costs),
        tuple(edges),
        tuple(usages),
        math.inf if limit is None else float(limit),
    )
    verify(problem)
    return problem


def write_iopddl(problem: Problem, path: str | Path) -> None:
    """Write an instance; names and levels have no place in the form and are left out.

    Args:
        problem: the problem.
        path: the file; a name that ends in ``.gz`` is compressed.
    """
    count = len(problem.names)
    costs = [_numbers(cost) for cost in problem.cost_s]
    intervals: list[list[int]] = [[0, 0] for _ in range(count)]
    usages = [[0.0] * cost.size for cost in problem.cost_s]
    ends = [[edge.a, edge.b] for edge in problem.edges]
    tables = [_numbers(edge.cost_s.ravel()) for edge in problem.edges]
    written: set[int] = set()
    for usage in problem.usages:
        span, taken = [usage.start, usage.end], _numbers(usage.bytes)
        if usage.node not in written:
            intervals[usage.node], usages[usage.node] = span, taken
            written.add(usage.node)
            continue
        size = usage.bytes.size
        ends.append([usage.node, len(costs)])
        tables.append(_numbers(np.where(np.eye(size, dtype=bool), 0.0, FORBIDDEN).ravel()))
        costs.append([0.0] * size)
        intervals.append(span)
        usages.append(taken)
    body: dict[str, Any] = {
        "name": Path(path).name.split(".")[0],
        "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
        "edges": {"nodes": ends, "costs": tables},
    }
    if math.isfinite(problem.limit_bytes):
        body["usage_limit"] = _number(problem.limit_bytes)
    raw = json.dumps({"problem": body}).encode()
    Path(path).write_bytes(gzip.compress(raw) if str(path).endswith(".gz") else raw)


def _number(value: float) -> float:
    """A float as the form holds it: forbidden becomes 1e18, whole numbers become integers."""
    value = min(float(value), FORBIDDEN)
    return int(value) if value.is_integer() else value


def _numbers(values: Array) -> list[float]:
    """A flat array as the form holds it."""
    return [_number(value) for value in values.tolist()]
