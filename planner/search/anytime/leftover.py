"""The integer program over what reduced-cost fixing leaves of a problem, run beside the search.

Under the dual's prices and messages every strategy has a least extra cost (`trws.Messages.extra`).
A strategy is dropped if that exceeds the gap between the best choice and the bound. The rest is
reduced again; once it is small, HiGHS solves it in a separate thread.

Complexity: one reduction per start, plus HiGHS.
Papers: Crowder, Johnson and Padberg, Oper. Res. 31, 1983 (reduced-cost fixing); Savchynskyy et al.,
"Global MAP-optimality by shrinking the combinatorial search area with convex relaxation", NIPS
2013.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable

import numpy as np

from planner.search.anytime.incumbent import Incumbent
from planner.search.anytime.integer import solve_integer
from planner.search.exact.reduction import ReducedProblem, reduce_problem
from planner.search.local.levels import nearest_reduced
from planner.search.problem import Array
from planner.search.relax.dual import Dual
from planner.search.relax.flat import FlatProblem, flatten
from planner.search.relax.trws import Messages

SMALL = 400_000
"""The integer program runs if fixing leaves at most this many table entries."""
FIRST_SHARE = 0.4
"""Share of the remaining time for the first run of the integer program. If cut off, it may start
again: on the problem that a better choice leaves, or with all the remaining time."""
THREAD = "integer program"
"""Name of the thread."""
PART_S = 1.5e-4
"""Estimated seconds of a reduction per node or edge, until the first one is timed."""


class Program:
    """Runs the integer program over what the bound leaves, in a thread.

    Args:
        best: the incumbent.
        reduction: the reduced problem.
        messages: at the dual's prices, with ``extra`` up to date.
        dual: the dual.
        deadline: monotonic time to stop at.
    """

    def __init__(
        self,
        best: Incumbent,
        reduction: ReducedProblem,
        messages: Messages,
        dual: Dual,
        deadline: float,
    ) -> None:
        self.best, self.reduction, self.deadline = best, reduction, deadline
        self.extra, self.lower = messages.extra, messages.bound() + dual.shift
        memory = best.flat.memory
        self.times = memory.moments[np.array(dual.moments, np.int64)]
        self._cost, self._finished = math.inf, False
        self._thread: threading.Thread | None = None
        self._tried, self._next = -math.inf, 0.0
        parts = len(reduction.problem.cost_s) + len(reduction.problem.edges)
        self._took = PART_S * parts
        self._stop = threading.Event()

    @property
    def running(self) -> bool:
        """Whether HiGHS is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def pending(self) -> bool:
        """Whether HiGHS is running or may start again."""
        if self.running:
            return True
        if time.monotonic() + 2.0 * self._took >= self.deadline:
            return False
        if self._thread is not None and not self.best.cost < self._cost:
            return not self._finished
        return self.best.cost != self._tried

    def start(self) -> None:
        """Start HiGHS if it is idle, something changed, and the reduced problem is small enough.

        Reductions may take a tenth of the time; none starts that could pass the deadline.
        """
        now, cost = time.monotonic(), self.best.cost
        if self.running or now < self._next or now + 2.0 * self._took >= self.deadline:
            return
        again = self._thread is not None and not cost < self._cost
        if (again and self._finished) or (not again and cost == self._tried):
            return
        inner, self._tried = self._left(cost), cost
        done = time.monotonic()
        self._took = max(done - now, 0.5 * self._took)
        self._next = done + max(1.0, 10.0 * (done - now))
        if inner.dead is not None:
            self.best.bound(cost, "fixing")
            return
        if sum(edge.cost_s.size for edge in inner.problem.edges) > SMALL:
            return
        small = flatten(inner.problem)
        self._cost = cost
        until = self.deadline if again else done + FIRST_SHARE * (self.deadline - done)
        arguments = (inner, small, cost, until)
        # the interpreter aborts if it exits while HiGHS runs, so it must wait for this thread
        self._thread = threading.Thread(target=self._run, args=arguments, name=THREAD, daemon=False)
        self._thread.start()

    def wait(self, over: Callable[[], bool]) -> None:
        """Wait until HiGHS is done or time is up."""
        while self.running and not over():
            time.sleep(0.02)

    def finish(self, over: Callable[[], bool]) -> None:
        """Start HiGHS whenever it has work to do, until time is up."""
        while self.pending and not self.best.proved and not over():
            self.start()
            time.sleep(0.02)

    def close(self) -> None:
        """Signal HiGHS to stop, without waiting for it."""
        self._stop.set()

    def _left(self, cost: float) -> ReducedProblem:
        """The problem without the strategies that the bound excludes below ``cost``."""
        flat, problem = self.best.flat, self.reduction.problem
        if math.isinf(cost):  # nothing is excluded
            whole = [[(node, np.arange(costs.size))] for node, costs in enumerate(problem.cost_s)]
            return dataclasses.replace(self.reduction, members=whole, count=len(whole))
        mask = self.extra <= cost - self.lower + 1e-9 * abs(cost)
        domains = [np.arange(costs.size) for costs in problem.cost_s]
        for node, low, high in zip(flat.free, flat.at[:-1], flat.at[1:], strict=True):
            domains[node] = np.flatnonzero(mask[low:high])
        return reduce_problem(problem, keep_memory=True, domains=domains)

    def _run(self, inner: ReducedProblem, small: FlatProblem, cost: float, until: float) -> None:
        """Solve, and offer the results to the incumbent."""
        best, count = self.best, len(self.reduction.problem.cost_s)

        def widened(choice: Array) -> Array:
            whole = inner.decode(small.whole(choice, len(inner.problem.cost_s)))
            return np.array(whole, np.int64)[best.flat.free]

        def offer(choice: Array) -> None:
            best.offer(widened(choice), "integer program")

        moments = np.searchsorted(small.memory.moments, self.times, side="right") - 1
        start = np.array(nearest_reduced(inner, best.flat.whole(best.choice, count)), np.int64)
        answer = solve_integer(
            small,
            until,
            [int(moment) for moment in np.unique(moments) if moment >= 0],
            start=start[small.free],
            stopped=lambda: self._stop.is_set() or best.monitor.should_stop(),
            on_choice=offer,
        )
        lower, self._finished = min(answer.lower_s, cost), answer.finished
        if answer.choice is not None:
            offer(answer.choice)
            value = best.flat.cost(widened(answer.choice))
            if answer.finished and value - lower <= 1e-7 * abs(value):
                lower = min(value, cost)
        best.bound(lower, "integer program")
