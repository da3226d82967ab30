"""Tries every combination of a small problem: the reference for the other searches.

Combinations are numbered in mixed radix. Costs and memory profiles are computed for one block of
combinations at a time. The result is the cheapest combination within the limit, or, if there is
none, the one with the lowest peak.

Complexity: O(combinations * (nodes + edges + usages * moments)), vectorized over blocks.
Paper: none; exhaustive enumeration.
"""

from __future__ import annotations

import math
import time

import numpy as np

from planner.search.local.memory import MemoryTimeline
from planner.search.problem import Array, Problem, Solution, is_forbidden, make_solution, verify
from planner.search.progress import SearchProgress, current, time_is_up

MOST = 2_000_000
"""Maximum number of combinations that the search accepts."""


def combinations(problem: Problem) -> int:
    """The number of choices of a problem."""
    return math.prod(cost.size for cost in problem.cost_s)


def brute(problem: Problem, *, time_limit_s: float = math.inf, block: int = 1 << 15) -> Solution:
    """Try every combination.

    Args:
        problem: the problem.
        time_limit_s: seconds to stop after; the lower bound is then minus infinity.
        block: combinations at a time.

    Returns:
        The optimum, or the choice with the lowest peak if nothing is feasible.

    Raises:
        ValueError: there are more than two million combinations, or the problem is malformed.
    """
    verify(problem)
    begun, total = time.monotonic(), combinations(problem)
    if total > MOST:
        raise ValueError(f"{total} combinations, more than the {MOST} that brute force takes")
    timeline = MemoryTimeline(problem)
    best, best_key, stopped = 0, (math.inf, math.inf), False
    for first in range(0, total, block):
        if time_is_up(begun + time_limit_s):
            stopped = True
            break
        known = best_key[1] if best_key[0] == 0 else math.inf
        note = f"{first} of {total} combinations"
        elapsed = time.monotonic() - begun
        current().report(SearchProgress(elapsed, known, -math.inf, math.isfinite(known), note))
        numbers = np.arange(first, min(first + block, total))
        cost, peak = _block(problem, timeline, numbers)
        over = np.maximum(peak - problem.limit_bytes * (1 + 1e-12), 0.0)
        over[~np.isfinite(cost)] = math.inf
        least = int(np.lexsort((cost, over))[0])
        key = (float(over[least]), float(cost[least]))
        if key < best_key:
            best, best_key = int(numbers[least]), key
    choice = [int(row[0]) for row in _digits(problem, np.array([best]))]
    reason = f"all {total} combinations tried"
    if math.isinf(best_key[0]):
        reason += "; every one uses a forbidden entry"
    elif best_key[0] > 0:
        reason += f"; the least memory peak misses the limit by {best_key[0]:.6g} bytes"
    if stopped:
        reason = "stopped before all combinations were tried"
    lower = -math.inf if stopped else (best_key[1] if best_key[0] == 0 else math.inf)
    return make_solution(problem, choice, lower, "brute", reason, begun)


def _digits(problem: Problem, numbers: Array) -> list[Array]:
    """Per node, the strategy in each numbered combination (mixed radix, last node fastest)."""
    digits: list[Array] = []
    for cost in reversed(problem.cost_s):
        numbers, digit = np.divmod(numbers, cost.size)
        digits.append(digit)
    return digits[::-1]


def _block(problem: Problem, timeline: MemoryTimeline, numbers: Array) -> tuple[Array, Array]:
    """Costs and peaks of numbered combinations."""
    digits = _digits(problem, numbers)
    cost = np.zeros(numbers.size)
    for table, digit in zip(problem.cost_s, digits, strict=True):
        cost += np.where(is_forbidden(table), np.inf, table)[digit]
    for edge in problem.edges:
        table = np.where(is_forbidden(edge.cost_s), np.inf, edge.cost_s)
        cost += table[digits[edge.a], digits[edge.b]]
    peak = np.zeros(numbers.size)
    if timeline.moments.size:
        live = np.zeros((timeline.moments.size, numbers.size))
        for k, node in enumerate(timeline.node):
            begin = int(timeline.flat_at[k])
            taken = timeline.flat_bytes[begin : begin + int(timeline.lengths[k])]
            live[int(timeline.low[k]) : int(timeline.high[k])] += taken[digits[node]]
        peak = live.max(axis=0)
    return cost, peak
