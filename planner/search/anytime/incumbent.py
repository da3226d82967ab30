"""The best choice and the best bound of a search, shared by its threads."""

from __future__ import annotations

import math
import threading
import time

import numpy as np

from planner.search.problem import Array
from planner.search.progress import Monitor, SearchProgress
from planner.search.relax.flat import FlatProblem

CLOSED = 1e-9
"""Relative gap at which a choice counts as proved optimal."""


class Incumbent:
    """The best choice so far and the best bound; safe to share between threads.

    Args:
        flat: the problem.
        begun: monotonic time of the start.
        monitor: receives a report of every gain.
    """

    def __init__(self, flat: FlatProblem, begun: float, monitor: Monitor) -> None:
        self.flat, self.begun, self.monitor = flat, begun, monitor
        self.choice = np.zeros(flat.nodes, np.int64)
        self.cost, self.peak, self.lower = math.inf, math.inf, -math.inf
        self._lock = threading.Lock()

    @property
    def proved(self) -> bool:
        """Whether the bound meets the cost, or is infinite (nothing fits)."""
        if math.isinf(self.cost):
            return self.lower == math.inf
        return self.cost - self.lower <= CLOSED * abs(self.cost)

    def offer(self, choice: Array, note: str) -> bool:
        """Keep a choice that fits and is cheaper or, while none fits, one with a lower peak."""
        profile = self.flat.memory.profile(choice)
        cost, peak = self.flat.cost(choice), float(profile.max(initial=0.0))
        with self._lock:
            if self.flat.memory.excess(profile) <= 0 and cost < math.inf:
                better = cost < self.cost
                if better:
                    self.cost = cost
            else:
                better = self.cost == math.inf and peak < self.peak
            if better:
                self.choice, self.peak = choice.copy(), peak
        if better:
            self.report(note)
        return better

    def bound(self, lower_s: float, note: str) -> None:
        """Update the lower bound and report a gain."""
        with self._lock:
            better = lower_s > self.lower
            self.lower = max(self.lower, lower_s)
        if better:
            self.report(note)

    def report(self, note: str) -> None:
        """Report to the monitor."""
        now = time.monotonic() - self.begun
        self.monitor.report(SearchProgress(now, self.cost, self.lower, self.cost < math.inf, note))
