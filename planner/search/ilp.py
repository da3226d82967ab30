"""The integer linear program, solved by HiGHS.

Binary x_i[s] picks a strategy per node, y_e[s, u] >= 0 prices an edge:

    min  sum c_i[s] x_i[s] + sum E_e[s, u] y_e[s, u]
    s.t. sum_s x_i[s] = 1,   sum_u y_e[s, u] = x_a[s],   sum_s y_e[s, u] = x_b[u],
         sum over live usages of bytes[s] x[s] <= limit     for every moment that could pass the
         limit.

With binary x the y are integral by themselves.  Parallel edges are added and forbidden entries have
no variable.  Memory rows are written over bytes above each usage's least, on non-dominated moments;
when those rows would be too many entries, a running variable per moment carries the sum instead.

HiGHS can't be interrupted, so it runs in a thread of its own.  Asked to stop, the search leaves it
there (it ends by its time limit or with the process) and answers with the choice of
`recursive_programming`, since HiGHS tells nobody what it has found so far.

Complexity: exponential in the worst case; O(edges * S^2) variables.
Paper: Zheng et al., "Alpa: Automating inter- and intra-operator parallelism for distributed deep
learning", OSDI 2022; Huangfu and Hall, "Parallelizing the dual revised simplex method", Math. Prog.
Computation 10, 2018 (HiGHS).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from scipy.optimize import (
    Bounds,
    LinearConstraint,
    milp,
)
from scipy.sparse import csr_matrix

from planner.search.dynamic_programming import forbidden_solution
from planner.search.memory import Timeline
from planner.search.problem import Array, Problem, Solution, make_solution, verify
from planner.search.progress import Monitor, current, monitored
from planner.search.recursive_programming import recursive_programming
from planner.search.reduction import reduce_problem

NAME = "ilp"
_POLL_S = 0.05
"""Seconds between two looks at whether to stop."""
_QUICK_S = 10.0
"""Seconds for the choice that is given when asked to stop."""
_DENSE = 3_000_000
"""Entries of memory rows above which running sums are used."""


@dataclass
class _Rows:
    """Constraint rows in coordinate form."""

    row: list[Array] = field(default_factory=list)
    column: list[Array] = field(default_factory=list)
    value: list[Array] = field(default_factory=list)
    low: list[Array] = field(default_factory=list)
    high: list[Array] = field(default_factory=list)
    count: int = 0

    def entries(self, row: Array, column: Array, value: Array) -> None:
        """Add entries; rows count from the present block's first row."""
        self.row.append(row + self.count)
        self.column.append(column)
        self.value.append(value)

    def close(self, low: Array, high: Array) -> None:
        """End a block of rows with its bounds."""
        self.low.append(low)
        self.high.append(high)
        self.count += low.size


def ilp(problem: Problem, *, time_limit_s: float = 60.0) -> Solution:
    """Solve a problem as an integer linear program.

    Args:
        problem: the problem.
        time_limit_s: HiGHS's time limit.

    Returns:
        The incumbent with HiGHS's dual bound; infeasible, with HiGHS's words, when there is none.
        When HiGHS says optimal (within its tolerances) and its bound is within 1e-7, the cost
        itself is the bound.  When asked to stop, what `recursive_programming` finds in ten seconds.

    Raises:
        ValueError: when the problem is malformed.
    """
    verify(problem)
    begun = time.monotonic()
    reduction = reduce_problem(problem, keep_memory=True, dead_ends=False)
    if reduction.dead is not None:
        return forbidden_solution(problem, reduction.dead, NAME, begun)
    part = reduction.problem
    rows = _Rows()
    timeline = Timeline(part)
    offsets = timeline.offsets
    edge_cost, upper = _linking(part, offsets, rows)
    costs = np.concatenate([*part.cost_s, *edge_cost])
    binary = np.zeros(costs.size)
    binary[: offsets[-1]] = 1
    costs, binary = _memory(timeline, part.limit_bytes, rows, costs, binary)
    scale, shift = _scaling(part)
    left = max(0.01, time_limit_s - (time.monotonic() - begun))
    result = _unless_stopped(
        milp,
        costs * scale,
        integrality=binary,
        bounds=Bounds(0.0, np.append(upper, np.full(costs.size - upper.size, np.inf))),
        constraints=_constraint(rows, costs.size),
        options={"time_limit": left, "mip_rel_gap": 0.0},
    )
    if result is None:
        return _quick(problem, begun)
    dual = result.mip_dual_bound
    lower = shift if dual is None or not math.isfinite(dual) else max(shift, dual / scale)
    if result.x is None:
        reason = f"no choice found; HiGHS status {result.status}: {result.message}"
        if result.status == 2:
            reason += _shortage(timeline, part.limit_bytes)
            lower = math.inf
        least = [int(cost.argmin()) for cost in part.cost_s]
        return make_solution(problem, reduction.decode(least), lower, NAME, reason, begun)
    picks = np.split(result.x[: offsets[-1]], offsets[1:-1])
    full = reduction.decode([int(np.argmax(pick)) for pick in picks])
    solution = make_solution(problem, full, lower, NAME, "", begun)
    if result.status == 0 and solution.feasible and solution.gap < 1e-7:
        lower = solution.cost_s
    reason = f"HiGHS status {result.status}: {result.message}"
    return make_solution(problem, full, lower, NAME, reason, begun)


def _unless_stopped(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a function that can't be interrupted returns, or None once asked to stop."""
    results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def call() -> None:
        try:
            results.put((function(*args, **options), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=call, name="HiGHS", daemon=True).start()
    while not current().should_stop():
        try:
            found, error = results.get(timeout=_POLL_S)
        except Empty:
            continue
        if error is not None:
            raise error
        return found
    return None


def _quick(problem: Problem, begun: float) -> Solution:
    """The answer when HiGHS was not waited for."""
    with monitored(Monitor()):  # or the wish to stop would stop this, too
        found = recursive_programming(problem, time_limit_s=_QUICK_S)
    reason = f"stopped while HiGHS was running; choice of {found.search}: {found.reason}"
    return make_solution(problem, found.choice, found.lower_bound_s, NAME, reason, begun)


def _linking(part: Problem, offsets: Array, rows: _Rows) -> tuple[list[Array], Array]:
    """Rows of one choice per node and of the edges; the y costs and all upper bounds."""
    sizes = np.diff(offsets)
    every = np.arange(int(offsets[-1]))
    rows.entries(np.repeat(np.arange(sizes.size), sizes), every, np.ones(every.size))
    rows.close(np.ones(sizes.size), np.ones(sizes.size))
    at, costs = int(offsets[-1]), list[Array]()
    for edge in part.edges:
        kept = np.argwhere(np.isfinite(edge.cost_s))
        s, u = kept[:, 0], kept[:, 1]
        y = at + np.arange(s.size)
        height, width = edge.cost_s.shape
        rows.entries(s, y, np.ones(s.size))
        rows.entries(np.arange(height), offsets[edge.a] + np.arange(height), -np.ones(height))
        rows.entries(height + u, y, np.ones(s.size))
        rows.entries(height + np.arange(width), offsets[edge.b] + np.arange(width), -np.ones(width))
        rows.close(np.zeros(height + width), np.zeros(height + width))
        costs.append(edge.cost_s[s, u])
        at += s.size
    return costs, np.ones(at)


def _memory(
    line: Timeline, limit: float, rows: _Rows, costs: Array, binary: Array
) -> tuple[Array, Array]:
    """Memory rows; the costs and integrality with any running variables added."""
    tight = np.flatnonzero(line.envelope() > limit)
    if not tight.size:
        return costs, binary
    least = np.minimum.reduceat(line.flat_bytes, line.flat_at)
    room = (limit - line.accumulate(least)) / max(limit, 1.0)
    above = (line.flat_bytes - np.repeat(least, line.lengths)) / max(limit, 1.0)
    low, high = np.repeat(line.low, line.lengths), np.repeat(line.high, line.lengths)
    used = np.flatnonzero(above > 0)
    spans = np.searchsorted(tight, high[used]) - np.searchsorted(tight, low[used])
    factor = 1e4
    if int(spans.sum()) <= _DENSE:
        first = np.searchsorted(tight, low[used])
        within = np.arange(int(spans.sum())) - np.repeat(np.cumsum(spans) - spans, spans)
        rows.entries(
            np.repeat(first, spans) + within,
            np.repeat(line.flat_home[used], spans),
            np.repeat(above[used], spans) * factor,
        )
        rows.close(np.full(tight.size, -np.inf), room[tight] * factor)
        return costs, binary
    count = line.moments.size
    running = costs.size + np.arange(count)
    rows.entries(np.arange(count), running, np.ones(count))
    rows.entries(np.arange(1, count), running[:-1], -np.ones(count - 1))
    rows.entries(low[used], line.flat_home[used], -above[used] * factor)
    ends = used[high[used] < count]
    rows.entries(high[ends], line.flat_home[ends], above[ends] * factor)
    rows.close(np.zeros(count), np.zeros(count))
    rows.entries(np.arange(tight.size), running[tight], np.ones(tight.size))
    rows.close(np.full(tight.size, -np.inf), room[tight] * factor)
    return np.append(costs, np.zeros(count)), np.append(binary, np.zeros(count))


def _constraint(rows: _Rows, columns: int) -> Any:
    """The rows as scipy takes them."""
    matrix = csr_matrix(
        (np.concatenate(rows.value), (np.concatenate(rows.row), np.concatenate(rows.column))),
        shape=(rows.count, columns),
    )
    return LinearConstraint(matrix, np.concatenate(rows.low), np.concatenate(rows.high))


def _scaling(part: Problem) -> tuple[float, float]:
    """A factor that brings costs to HiGHS's absolute tolerances, and the sum of all minima."""
    minima = [float(cost.min()) for cost in part.cost_s]
    minima += [float(edge.cost_s.min()) for edge in part.edges]
    tops = [float(cost.max()) for cost in part.cost_s]
    tops += [float(edge.cost_s[np.isfinite(edge.cost_s)].max()) for edge in part.edges]
    reference = max(abs(math.fsum(minima)), 1e-3 * max(map(abs, tops), default=0.0))
    return (1e5 / reference if reference > 0 else 1.0), math.fsum(minima)


def _shortage(line: Timeline, limit: float) -> str:
    """How much memory is missing even when every usage takes its least."""
    if not line.node.size:
        return ""
    floor = float(line.accumulate(np.minimum.reduceat(line.flat_bytes, line.flat_at)).max())
    text = f"; the usages' least bytes alone peak at {floor:.6g} under a limit of {limit:.6g}"
    return text + (f", {floor - limit:.6g} too many" if floor > limit else "")
