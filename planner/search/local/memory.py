"""Memory over time in compressed form, which has only moments that can be the peak.

The usages live at a moment form a clique of an interval graph.  Memory can only peak at a start
that is followed by an end before the next start (the maximal cliques); every other moment is
dominated, because bytes are not negative.  On K such moments each usage covers an index range [low,
high), so a profile and a price are prefix sums:

    memory_k(x) = sum of bytes over usages with low <= k < high,
    price(usage) = lambda_low + ... + lambda_(high - 1).

Complexity: O(U log U) to build, O(U + K) per profile, O(U * strategies + K) per pricing.
Paper: Fulkerson and Gross, "Incidence matrices and interval graphs", Pacific J. Math. 15, 1965.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.search.problem import Array, Problem


class MemoryTimeline:
    """The usages of a problem on its non-dominated moments.

    Attributes:
        moments: [K] the non-dominated moments.
        base: [K] bytes that belong to no usage: zeros.
        offsets: [nodes + 1] where each node's strategies begin in a flat array over all nodes.
        node, low, high: [U] per live usage, its node and index range.
        flat_bytes: bytes of all usages, concatenated; ``flat_at[u]`` is where usage u begins.
        flat_home: [len(flat_bytes)] position of each entry in the flat array over all nodes.
    """

    def __init__(self, problem: Problem) -> None:
        live = [usage for usage in problem.usages if usage.start < usage.end]
        starts = np.array([usage.start for usage in live], dtype=np.int64)
        ends = np.array([usage.end for usage in live], dtype=np.int64)
        self.moments = maximal_moments(starts, ends)
        self.base = np.zeros(self.moments.size)
        self.node = np.array([usage.node for usage in live], dtype=np.int64)
        self.low = np.searchsorted(self.moments, starts)
        self.high = np.searchsorted(self.moments, ends)
        sizes = np.array([cost.size for cost in problem.cost_s], dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        lengths = sizes[self.node] if live else np.zeros(0, dtype=np.int64)
        self.flat_at = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)[:-1]
        self.flat_bytes = (
            np.concatenate([usage.bytes for usage in live]).astype(np.float64)
            if live
            else np.zeros(0)
        )
        self.lengths = lengths
        within = np.arange(self.flat_bytes.size) - np.repeat(self.flat_at, lengths)
        self.flat_home = np.repeat(self.offsets[self.node], lengths) + within if live else within

    def profile(self, choice: Sequence[int] | Array) -> Array:
        """[K] bytes live at each moment under a choice."""
        taken = self.flat_bytes[self.flat_at + np.asarray(choice, dtype=np.int64)[self.node]]
        return self.accumulate(taken)

    def accumulate(self, taken: Array) -> Array:
        """[K] sums of one number per usage over the usages live at each moment."""
        return live_sums(self.low, self.high, taken, self.moments.size)

    def envelope(self) -> Array:
        """[K] the maximum of the live bytes of all choices at each moment."""
        if not self.node.size:
            return np.zeros(self.moments.size)
        return self.accumulate(np.maximum.reduceat(self.flat_bytes, self.flat_at))

    def prices(self, multipliers: Array) -> Array:
        """Flat price of every strategy of every node under one multiplier per moment.

        Args:
            multipliers: [K] seconds per byte.

        Returns:
            [all strategies] sum over the node's usages of bytes times the multipliers they live
            through.
        """
        weight = np.repeat(lived_through(self.low, self.high, multipliers), self.lengths)
        return np.bincount(self.flat_home, weight * self.flat_bytes, int(self.offsets[-1]))


def maximal_moments(starts: Array, ends: Array) -> Array:
    """Starts that are followed by an end no later than the next start."""
    rising = np.unique(starts)
    if not rising.size:
        return rising
    falling = np.unique(ends)
    following = falling[np.searchsorted(falling, rising, side="right")]
    after = np.append(rising[1:], np.iinfo(np.int64).max)
    maximal: Array = rising[following <= after]
    return maximal


def live_sums(low: Array, high: Array, taken: Array, count: int) -> Array:
    """[count] sums of one number per usage over the usages live at each moment.

    Args:
        low, high: [U] index range of each usage.
        taken: [U] the numbers.
        count: moments.
    """
    rise = np.bincount(low, taken, count + 1) - np.bincount(high, taken, count + 1)
    sums: Array = np.cumsum(rise, dtype=np.float64)[:count]
    return sums


def lived_through(low: Array, high: Array, multipliers: Array) -> Array:
    """[U] sum of the multipliers [K] of the moments that each usage lives through."""
    prefix = np.concatenate([[0.0], np.cumsum(multipliers)])
    total: Array = prefix[high] - prefix[low]
    return total


def local_peaks(profile: Array, above: float, most: int, span: int) -> list[int]:
    """The highest moments of a profile, more than ``span`` moments apart.

    Args:
        profile: [K] bytes.
        above: only moments with more bytes than this.
        most: maximum number of moments.
        span: moments on either side of a peak that count as the same one.

    Returns:
        Indices, highest first.
    """
    peaks, rest = list[int](), profile.copy()
    while len(peaks) < most:
        peak = int(np.argmax(rest))
        if not rest[peak] > above:
            break
        peaks.append(peak)
        rest[max(0, peak - span) : peak + span + 1] = -np.inf
    return peaks
