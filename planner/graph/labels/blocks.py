"""Repeated blocks: parts of a program that repeat the same operations (its layers)."""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from planner.graph.ir import Block, Graph

MIN_LENGTH = 8
"""Smallest number of operations in a block; a power of two, as k-grams are built by doubling."""
CANDIDATES = 64
"""Number of periods tried: the most frequent distances between equal k-grams."""
REACH = 4
"""Distances are measured to this many next occurrences, for blocks with repeated parts inside."""

Codes = NDArray[np.int64]


def repeated_blocks(graph: Graph) -> tuple[Block, ...]:
    """Tandem repeats of operation texts: unrolled layers, found without names or hints.

    Two operations are equal if their ``Graph.op_text`` is. Equal k-grams get one number by
    prefix doubling (Karp, Miller and Rosenberg 1972). The most frequent distances between
    equal k-grams are the candidate periods. Every candidate is extended to its maximal runs,
    and runs are taken greedily, the longest coverage first; overlaps are trimmed. At equal
    coverage, the shorter period wins, then the earlier run.

    Complexity: O(n log n) time for the k-grams and O(n) for each of at most ``CANDIDATES``
    periods, O(n) memory, for n operations; less than 0.1 s for 7,000.

    Returns:
        Non-overlapping blocks of at least ``MIN_LENGTH`` operations and two repetitions, in
        program order.
    """
    return blocks_of(np.asarray(graph.codes, np.int64))


def blocks_of(codes: Codes) -> tuple[Block, ...]:
    """``repeated_blocks`` of operations that are equal if their codes are."""
    free: list[tuple[int, int, int, int]] = []  # (-coverage, period, start, stop)
    for period in periods(codes):
        for start, stop in _runs(codes, period):
            _offer(free, period, start, stop)
    heapq.heapify(free)
    taken: list[tuple[int, int]] = []
    blocks: list[Block] = []
    while free:
        coverage, period, start, stop = heapq.heappop(free)
        pieces = list(_outside(taken, start, stop))
        if pieces == [(start, stop)]:
            blocks.append(Block(start, period, -coverage // period))
            insort(taken, (start, start - coverage))
            pieces = [(start - coverage, stop)]
        rest: list[tuple[int, int, int, int]] = []
        for piece in pieces:
            _offer(rest, period, *piece)
        for item in rest:
            heapq.heappush(free, item)
    return tuple(sorted(blocks, key=lambda b: b.start))


def _offer(out: list[tuple[int, int, int, int]], period: int, start: int, stop: int) -> None:
    """Add the run to ``out`` if it has at least two repetitions."""
    if stop - start >= 2 * period:
        out.append((-((stop - start) // period * period), period, start, stop))


def _outside(taken: list[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of [start, stop) that no interval of ``taken`` (sorted, disjoint) covers."""
    at = max(bisect_right(taken, (start, start)) - 1, 0)
    for low, high in taken[at:]:
        if low >= stop:
            break
        if high <= start:
            continue
        if low > start:
            yield start, low
        start = high
    if start < stop:
        yield start, stop


def periods(codes: Codes) -> list[int]:
    """Candidate periods, the most frequent first."""
    grams, width = codes, 1
    while width < MIN_LENGTH and len(grams) > width:
        pairs = grams[:-width] * (int(grams.max()) + 1) + grams[width:]
        grams = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
        width *= 2
    if width < MIN_LENGTH or len(grams) < 2:
        return []
    order = np.argsort(grams, kind="stable")
    votes = np.zeros(len(codes) + MIN_LENGTH, np.int64)
    for step in range(1, min(REACH, len(order) - 1) + 1):
        far, near = order[step:], order[:-step]
        distance = (far - near)[grams[far] == grams[near]]
        # a block shorter than the smallest length counts as a multiple of itself
        distance = distance * -(-MIN_LENGTH // np.maximum(distance, 1))
        votes += np.bincount(distance, minlength=len(votes))[: len(votes)]
    best = np.lexsort((np.arange(len(votes)), -votes))[:CANDIDATES]
    return [int(p) for p in best if votes[p] and MIN_LENGTH <= p <= len(codes) // 2]


def _runs(codes: Codes, period: int) -> Iterator[tuple[int, int]]:
    """Maximal [start, stop) in which every operation equals the one a period later."""
    same = np.zeros(len(codes) - period + 2, bool)
    same[1:-1] = codes[:-period] == codes[period:]
    edges = np.flatnonzero(same[1:] != same[:-1])
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if stop - start >= period:
            yield start, stop + period
