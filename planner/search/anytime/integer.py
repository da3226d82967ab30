"""The integer program of a flat problem, solved by HiGHS with memory rows added as needed.

Binary x_i[s] picks a strategy per node, y_e[s, u] >= 0 prices an edge:

    min  sum c_i[s] x_i[s] + sum E_e[s, u] y_e[s, u]
    s.t. sum_s x_i[s] = 1,   sum_u y_e[s, u] = x_a[s],   sum_s y_e[s, u] = x_b[u],
         sum over live usages of bytes[s] x[s] <= limit     for every moment.

With binary x, the y are integral.  Forbidden entries have no variable.  A memory row is added only
after an answer violates it: without the row the program is a relaxation, so its bound holds, and an
answer that violates no row is optimal for the full program.

Complexity: exponential in the worst case; O(table entries) variables, few memory rows.
Papers: Zheng et al., "Alpa: Automating inter- and intra-operator parallelism for distributed deep
learning", OSDI 2022; Dantzig, Fulkerson and Johnson, "Solution of a large-scale traveling-salesman
problem", Oper. Res. 2, 1954 (rows as needed); Huangfu and Hall, "Parallelizing the dual revised
simplex method", Math. Prog. Computation 10, 2018 (HiGHS).
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import highspy
import numpy as np

from planner.search.local.memory import local_peaks
from planner.search.problem import Array, fits
from planner.search.relax.flat import FlatProblem

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_ROW_SCALE = 1e4
"""The memory limit in the units of a row: HiGHS's tolerances are absolute."""
_PEAKS = 24
"""Moments added after an answer that exceeds the limit."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The result of HiGHS: a choice (which may exceed the limit if time ran out) or None.

    Attributes:
        choice: strategies of the free nodes.
        lower_s: a lower bound for every choice within the limit; infinite if there is none.
        finished: whether HiGHS finished and no memory row is violated.
        message: the status that HiGHS reports.
    """

    choice: Array | None
    lower_s: float
    finished: bool
    message: str


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
        """Add entries; rows count from the current block's first row."""
        self.row.append(row + self.count)
        self.column.append(column)
        self.value.append(value)

    def close(self, low: Array, high: Array) -> None:
        """End a block of rows with its bounds."""
        self.low.append(low)
        self.high.append(high)
        self.count += low.size

    def matrix(self, columns: int) -> csr_matrix:
        """All rows."""
        where = (np.concatenate(self.row), np.concatenate(self.column))
        from scipy.sparse import csr_matrix

        return csr_matrix((np.concatenate(self.value), where), shape=(self.count, columns))


def solve_integer(
    flat: FlatProblem,
    deadline: float,
    moments: Sequence[int] = (),
    *,
    start: Array | None = None,
    stopped: Callable[[], bool] = lambda: False,
    on_choice: Callable[[Array], None] = lambda _: None,
) -> Answer:
    """Solve a flat problem.

    Args:
        flat: the problem.
        deadline: monotonic time to stop at.
        moments: indices into the memory's moments whose rows are included from the start.
        start: an initial choice.
        stopped: polled during the run; True stops it early.
        on_choice: called with every improving choice, which may exceed the memory limit.

    Returns:
        The answer.
    """
    if not flat.nodes:
        fit = flat.memory.excess(flat.memory.base) <= 0
        lower = flat.constant_s if fit else math.inf
        return Answer(np.zeros(0, np.int64) if fit else None, lower, True, "nothing to decide")
    rows = _Rows()
    costs, upper = _linking(flat, rows)
    scale, lower = _scaling(flat)
    active = list(dict.fromkeys(int(moment) for moment in moments))
    for moment in active:
        _memory_row(flat, moment, rows)
    choice = start
    while True:
        solver = _solver(costs * scale, upper, rows, flat.unary.size, deadline)
        _listen(solver, flat, stopped, on_choice)
        if choice is not None:
            values = np.ones(flat.nodes)
            solver.setSolution(flat.nodes, (flat.at[:-1] + choice).astype(np.int32), values)
        solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        message = f"HiGHS: {solver.modelStatusToString(status)}"
        if status == highspy.HighsModelStatus.kInfeasible:
            return Answer(None, math.inf, True, message)
        if math.isfinite(info.mip_dual_bound):
            lower = max(lower, info.mip_dual_bound / scale + flat.constant_s)
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Answer(choice if choice is not start else None, lower, False, message)
        choice = _choice(flat, np.array(solver.getSolution().col_value))
        done = status == highspy.HighsModelStatus.kOptimal
        profile = flat.memory.profile(choice)
        if not profile.size or fits(float(profile.max()), flat.memory.limit):
            return Answer(choice, lower, done, message)
        peaks = local_peaks(profile, flat.memory.limit, _PEAKS, max(1, profile.size // 64))
        more = [moment for moment in peaks if moment not in active]
        if not more or stopped() or time.monotonic() >= deadline:
            return Answer(choice, lower, False, message)
        active += more
        for moment in more:
            _memory_row(flat, moment, rows)


@functools.cache
def _greeted() -> None:
    """HiGHS 1.16 prints its version and license when the first solver is created, regardless of
    its options; this keeps them out of the output."""
    try:
        stdout_copy = os.dup(1)
    except OSError:  # there is no output
        return
    try:
        sys.stdout.flush()
        with open(os.devnull, "wb") as away:
            os.dup2(away.fileno(), 1)
            highspy.Highs()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def _solver(costs: Array, upper: Array, rows: _Rows, binary: int, deadline: float) -> highspy.Highs:
    """HiGHS with the program; the first ``binary`` columns are integers."""
    _greeted()
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("time_limit", max(0.01, deadline - time.monotonic()))
    matrix = rows.matrix(costs.size)
    solver.passModel(
        costs.size,
        rows.count,
        matrix.nnz,
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        costs,
        np.zeros(costs.size),
        upper,
        np.concatenate(rows.low),
        np.concatenate(rows.high),
        matrix.indptr.astype(np.int32),
        matrix.indices.astype(np.int32),
        matrix.data,
        (np.arange(costs.size) < binary).astype(np.int32),
    )
    return solver


def _listen(
    solver: highspy.Highs,
    flat: FlatProblem,
    stopped: Callable[[], bool],
    on_choice: Callable[[Array], None],
) -> None:
    """Register callbacks that stop HiGHS and pass on its improving choices."""

    def check(event: highspy.HighsCallbackEvent) -> None:
        if stopped():
            event.interrupt()

    def improved(event: highspy.HighsCallbackEvent) -> None:
        on_choice(_choice(flat, np.array(event.data_out.mip_solution)))

    solver.cbMipInterrupt.subscribe(check)
    solver.cbSimplexInterrupt.subscribe(check)
    solver.cbMipImprovingSolution.subscribe(improved)


def _choice(flat: FlatProblem, values: Array) -> Array:
    """The strategies that the program's values pick."""
    picks = np.split(values[: flat.unary.size], flat.at[1:-1])
    return np.array([int(np.argmax(pick)) for pick in picks], np.int64)


def _linking(flat: FlatProblem, rows: _Rows) -> tuple[Array, Array]:
    """Add the rows of nodes (one strategy each) and edges; returns all costs and upper bounds."""
    sizes, offsets = flat.sizes, flat.at
    every = np.arange(flat.unary.size)
    rows.entries(np.repeat(np.arange(sizes.size), sizes), every, np.ones(every.size))
    rows.close(np.ones(sizes.size), np.ones(sizes.size))
    at, costs = flat.unary.size, [np.where(np.isfinite(flat.unary), flat.unary, 0.0)]
    for (a, b), begin in zip(flat.ends, flat.table_at, strict=True):
        height, width = int(sizes[a]), int(sizes[b])
        table = flat.table[begin : begin + height * width]
        finite = np.flatnonzero(np.isfinite(table))
        s, u = finite // width, finite % width
        y = at + np.arange(finite.size)
        rows.entries(s, y, np.ones(finite.size))
        rows.entries(np.arange(height), offsets[a] + np.arange(height), -np.ones(height))
        rows.entries(height + u, y, np.ones(finite.size))
        rows.entries(height + np.arange(width), offsets[b] + np.arange(width), -np.ones(width))
        rows.close(np.zeros(height + width), np.zeros(height + width))
        costs.append(table[finite])
        at += finite.size
    upper = np.ones(at)
    upper[: flat.unary.size] = np.isfinite(flat.unary)
    return np.concatenate(costs), upper


def _memory_row(flat: FlatProblem, moment: int, rows: _Rows) -> None:
    """Add the row of one moment, in units where the limit is 1e4."""
    memory = flat.memory
    live = np.flatnonzero((memory.low <= moment) & (moment < memory.high))
    lengths = np.diff(np.append(memory.bytes_at, memory.taken.size))[live]
    begin = np.repeat(memory.bytes_at[live], lengths)
    at = begin + np.arange(begin.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    taken = np.bincount(memory.home[at], memory.taken[at], flat.unary.size)
    used = np.flatnonzero(taken)
    unit = _ROW_SCALE / max(memory.limit, 1.0)
    rows.entries(np.zeros(used.size, np.int64), used, taken[used] * unit)
    room = (memory.limit - memory.base[moment]) * unit
    rows.close(np.full(1, -np.inf), np.full(1, room))


def _scaling(flat: FlatProblem) -> tuple[float, float]:
    """A factor that brings costs to HiGHS's absolute tolerances, and the sum of all minima."""
    parts = [flat.unary[a:b] for a, b in pairwise(flat.at)]
    entries = flat.sizes[flat.ends].prod(axis=1)
    bounds = zip(flat.table_at, flat.table_at + entries, strict=True)
    parts += [flat.table[a:b] for a, b in bounds]
    least = math.fsum(float(part.min()) for part in parts)
    tops = [float(part[np.isfinite(part)].max()) for part in parts]
    reference = max(abs(least), 1e-3 * max(map(abs, tops), default=0.0))
    return (1e5 / reference if reference > 0 else 1.0), least + flat.constant_s
