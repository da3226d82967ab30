"""Compiled local moves under a memory limit: repair of a choice, then descent within the limit.

`repair_walk` lowers the memory peak with the move of least extra cost per byte freed at the peak
that lets no other moment rise above the limit.  `descend_walk` moves single nodes to cheaper
strategies that stay within the limit until none is left.

Complexity: O(live usages + their edges' rows) per repair move, O(table rows) per descent pass.
Papers: Dantzig, "Discrete-variable extremum problems", Operations Research 5, 1957 (the ratio
rule); Besag, "On the statistical analysis of dirty pictures", J. Royal Stat. Soc. B 48, 1986.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from planner.search.problem import Array
from planner.search.relax.compiled import compiled

Graph: TypeAlias = tuple[Array, ...]
"""`flat.FlatProblem.graph`."""
Memory: TypeAlias = tuple[Array, Array, Array, Array, Array, Array, float]
"""`flat.FlatMoments.arrays`."""

_BLOCK = 64
"""Moments per block; the largest value of each block is cached."""
_FIRST, _TRIES = 8, 4000
"""A repair selects its first ``_FIRST`` moves one by one and sorts the others; it tries at most
``_TRIES`` moves."""


@compiled
def _conditional(graph: Graph, choice: Array, v: int, row: Array) -> None:
    """Write the cost of every strategy of node v into ``row``, with the other nodes fixed."""
    at, unary, ends, table_at, table, near_at, near = graph
    size = at[v + 1] - at[v]
    for s in range(size):
        row[s] = unary[at[v] + s]
    for i in range(near_at[v], near_at[v + 1]):
        e = near[i]
        begin = table_at[e]
        if ends[e, 0] == v:
            other = ends[e, 1]
            width = at[other + 1] - at[other]
            begin += choice[other]
            for s in range(size):
                row[s] += table[begin + s * width]
        else:
            begin += choice[ends[e, 0]] * size
            for s in range(size):
                row[s] += table[begin + s]


@compiled
def _tops(profile: Array) -> Array:
    """The largest value of every block of the profile."""
    tops = np.empty((profile.size + _BLOCK - 1) // _BLOCK)
    for block in range(tops.size):
        tops[block] = profile[block * _BLOCK : (block + 1) * _BLOCK].max()
    return tops


@compiled
def _top(profile: Array, tops: Array, low: int, high: int) -> float:
    """The largest value of ``profile[low:high]``."""
    top = -np.inf
    first, last = (low + _BLOCK - 1) // _BLOCK, high // _BLOCK
    if first >= last:
        for k in range(low, high):
            top = max(top, profile[k])
        return top
    for k in range(low, first * _BLOCK):
        top = max(top, profile[k])
    for block in range(first, last):
        top = max(top, tops[block])
    for k in range(last * _BLOCK, high):
        top = max(top, profile[k])
    return top


@compiled
def _shift(memory: Memory, v: int, old: int, new: int, profile: Array) -> None:
    """Update the memory profile with one node's move."""
    low, high, bytes_at, taken, used_at, used, _ = memory
    for i in range(used_at[v], used_at[v + 1]):
        u = used[i]
        change = taken[bytes_at[u] + new] - taken[bytes_at[u] + old]
        if change != 0.0:
            profile[low[u] : high[u]] += change


@compiled
def _move(memory: Memory, v: int, old: int, new: int, profile: Array, tops: Array) -> None:
    """`_shift`, and update the largest value of each block."""
    low, high, bytes_at, taken, used_at, used, _ = memory
    _shift(memory, v, old, new, profile)
    for i in range(used_at[v], used_at[v + 1]):
        u = used[i]
        if taken[bytes_at[u] + new] != taken[bytes_at[u] + old]:
            for block in range(low[u] // _BLOCK, (high[u] - 1) // _BLOCK + 1):
                tops[block] = profile[block * _BLOCK : (block + 1) * _BLOCK].max()


@compiled
def _allowed(
    memory: Memory, v: int, old: int, new: int, profile: Array, tops: Array, ceiling: float
) -> bool:
    """Whether a node's move leaves every moment that grows at or below the ceiling."""
    low, high, bytes_at, taken, used_at, used, _ = memory
    more, less = 0.0, 0.0
    for i in range(used_at[v], used_at[v + 1]):
        u = used[i]
        change = taken[bytes_at[u] + new] - taken[bytes_at[u] + old]
        if change > 0.0:
            more += change
        else:
            less += change
    if more == 0.0:
        return True
    sure = True
    for i in range(used_at[v], used_at[v + 1]):
        u = used[i]
        change = taken[bytes_at[u] + new] - taken[bytes_at[u] + old]
        if change > 0.0:
            top = _top(profile, tops, low[u], high[u])
            if top + change + less > ceiling:
                return False
            if top + more > ceiling:
                sure = False
    if sure:
        return True
    _shift(memory, v, old, new, profile)
    good = True
    for i in range(used_at[v], used_at[v + 1]):
        u = used[i]
        if good and taken[bytes_at[u] + new] > taken[bytes_at[u] + old]:
            good = profile[low[u] : high[u]].max() <= ceiling
    _shift(memory, v, new, old, profile)
    return good


@compiled
def descend_walk(
    graph: Graph, memory: Memory, choice: Array, profile: Array, order: Array, passes: int
) -> int:
    """Move single nodes to cheaper strategies within the limit; returns the number of moves.

    After the first pass, only nodes that moved, or whose neighbors moved, are visited again.
    """
    at, _, ends, _, _, near_at, near = graph
    limit = memory[6]
    row = np.empty((at[1:] - at[:-1]).max() if at.size > 1 else 1)
    stale = np.ones(at.size, np.bool_)
    tops = _tops(profile)
    moves = 0
    for _ in range(passes):
        before = moves
        for v in order:
            if not stale[v]:
                continue
            stale[v] = False
            size = at[v + 1] - at[v]
            _conditional(graph, choice, v, row)
            while True:
                best = choice[v]
                now = row[best]
                tolerance = 1e-12 * abs(now) if now < np.inf else 0.0
                for s in range(size):
                    if row[s] < row[best] and row[s] < now - tolerance:
                        best = s
                if best == choice[v]:
                    break
                if _allowed(memory, v, choice[v], best, profile, tops, limit):
                    _move(memory, v, choice[v], best, profile, tops)
                    choice[v] = best
                    moves += 1
                    stale[v] = True
                    for i in range(near_at[v], near_at[v + 1]):
                        stale[ends[near[i], 0]] = True
                        stale[ends[near[i], 1]] = True
                    break
                row[best] = np.inf
        if moves == before:
            break
    return moves


@compiled
def _priced(
    at: Array, nodes: Array, saved: Array, cost: Array, over: float
) -> tuple[Array, Array, Array]:
    """Strategies that save bytes at the peak, their nodes, and their extra cost per byte."""
    count = 0
    for v in nodes:
        count += at[v + 1] - at[v]
    spots, owners = np.empty(count, np.int64), np.empty(count, np.int64)
    rates = np.empty(count)
    count = 0
    for v in nodes:
        for s in range(at[v], at[v + 1]):
            if saved[s] > 0.0 and cost[s] < np.inf:
                spots[count], owners[count] = s, v
                rates[count] = cost[s]
                if cost[s] > 0.0:
                    rates[count] /= min(saved[s], over)
                count += 1
    return spots[:count], owners[:count], rates[:count]


@compiled
def repair_walk(
    graph: Graph, memory: Memory, home: Array, choice: Array, profile: Array, most: int
) -> bool:
    """Move until the peak is within the limit; False if no single move helps any more.

    The few thousand moves that save the most per cost are tried.
    """
    at = graph[0]
    low, high, bytes_at, taken, _, _, limit = memory
    saved = np.zeros(at[-1])
    cost = np.empty(at[-1])
    nodes = np.empty(at.size, np.int64)
    seen = np.zeros(at.size, np.bool_)
    row = np.empty((at[1:] - at[:-1]).max() if at.size > 1 else 1)
    tops = _tops(profile)
    for _ in range(most):
        moment = np.argmax(profile)
        top = profile[moment]
        if top <= limit:
            return True
        count = 0
        for u in range(low.size):
            if low[u] <= moment < high[u]:
                v = home[u]
                now = taken[bytes_at[u] + choice[v]]
                if not seen[v]:
                    seen[v] = True
                    nodes[count] = v
                    count += 1
                    saved[at[v] : at[v + 1]] = 0.0
                for s in range(at[v + 1] - at[v]):
                    saved[at[v] + s] += now - taken[bytes_at[u] + s]
        for i in range(count):
            v = nodes[i]
            seen[v] = False
            some = False
            for s in range(at[v], at[v + 1]):
                if saved[s] > 0.0:
                    some = True
            if not some:
                continue
            _conditional(graph, choice, v, row)
            now = row[choice[v]] if row[choice[v]] < np.inf else 0.0
            for s in range(at[v + 1] - at[v]):
                cost[at[v] + s] = row[s] - now
        spots, owners, rates = _priced(at, nodes[:count], saved, cost, top - limit)
        moved = False
        for tries in range(min(spots.size, _TRIES)):
            if tries == _FIRST:  # most often one of the first few is allowed
                order = tries + np.argsort(rates[tries:], kind="mergesort")
                spots[tries:], owners[tries:] = spots[order], owners[order]
            elif tries < _FIRST:
                best = tries + np.argmin(rates[tries:])
                spots[tries], spots[best] = spots[best], spots[tries]
                owners[tries], owners[best] = owners[best], owners[tries]
                rates[best] = rates[tries]
            node = owners[tries]
            s = spots[tries] - at[node]
            if _allowed(memory, node, choice[node], s, profile, tops, limit):
                _move(memory, node, choice[node], s, profile, tops)
                choice[node] = s
                moved = True
                break
        if not moved:
            return False
    return False


@compiled
def balls(graph: Graph, starts: Array, size: int, shuffle: Array, inside: Array) -> None:
    """Mark ``size`` nodes around the first of ``starts``, breadth first, in a shuffled order of
    edges; if its component is smaller, also nodes around the next ones."""
    ends, near_at, near = graph[2], graph[5], graph[6]
    queue = np.empty(inside.size, np.int64)
    head, tail = 0, 0
    for start in starts:
        if tail >= size:
            break
        if inside[start]:
            continue
        queue[tail] = start
        inside[start] = True
        tail += 1
        while head < tail and tail < size:
            v = queue[head]
            head += 1
            count = near_at[v + 1] - near_at[v]
            turn = shuffle[v] % count if count > 0 else 0
            for i in range(count):
                e = near[near_at[v] + (i + turn) % count]
                u = ends[e, 0] + ends[e, 1] - v
                if not inside[u] and tail < size:
                    inside[u] = True
                    queue[tail] = u
                    tail += 1
