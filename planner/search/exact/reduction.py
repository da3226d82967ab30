"""Exact reduction of a problem before any search: the reduced problem has the same optimum.

Rules, repeated until nothing changes:

* arc consistency: drop a strategy that is forbidden, or has only forbidden pairs along some edge;
* a node with one strategy left adds its rows to its neighbors and loses its edges;
* an edge E[s, u] = f[s] + g[u] is split into its two sides;
* an edge whose finite entries form a bijection merges its two nodes into one;
* dead ends (`dead_ends`): drop a strategy that another one beats whatever the neighbors choose.

Parallel edges are summed at the start.  All table work is hash-consed, so a repeated layer is
reduced once.  Complexity: O(edges * S^2) table entries per round for S strategies, times the share
of distinct tables.

Papers: Mackworth, "Consistency in networks of relations", AI 8, 1977; Desmet et al., "The dead-end
elimination theorem and its use in protein side-chain positioning", Nature 356, 1992.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import numpy as np

from planner.search.exact.dead_ends import beaten
from planner.search.exact.tables import Pool
from planner.search.problem import Array, Edge, Problem, Usage


class Shape(Enum):
    """The structure of an edge table."""

    SPLIT = auto()
    """E[s, u] = f[s] + g[u]."""
    TIE = auto()
    """Its finite entries form a bijection."""
    OTHER = auto()


@dataclass(frozen=True, eq=False)
class ReducedProblem:
    """A smaller problem and the mapping back to the original.

    Attributes:
        problem: the reduced problem; its node k stands for the original nodes in ``members[k]``.
        members: per reduced node, (original node, original strategy of each reduced strategy).
        pool: the interned tables; ``unary[k]`` and ``pairs[(i, j)]`` (i < j) are their ids.
        dead: name of an original node that has no allowed strategy left, or None.
    """

    problem: Problem
    members: list[list[tuple[int, Array]]]
    pool: Pool
    unary: list[int]
    pairs: dict[tuple[int, int], int]
    dead: str | None
    count: int

    def decode(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The original choice that a choice of the reduced problem stands for."""
        full = [0] * self.count
        for members, taken in zip(self.members, choice, strict=True):
            for node, original in members:
                full[node] = int(original[taken])
        return tuple(full)


def reduce_problem(
    problem: Problem,
    *,
    keep_memory: bool,
    domains: Sequence[Array] | None = None,
    share: bool = True,
    dead_ends: bool = True,
) -> ReducedProblem:
    """Shrink a problem.

    Args:
        problem: the problem.
        keep_memory: if True, a strategy is a dead end only if the better one uses no more bytes in
            every usage. This preserves the optimum under the memory limit and under any price of
            memory.
        domains: the strategies allowed per node, as sorted index arrays; None allows all.
        share: whether equal tables share their work.
        dead_ends: whether to look for dead ends.

    Returns:
        The reduction.  If ``dead`` is set, no choice has a finite cost and the rest is
        unfinished.
    """
    work = _Work(problem, keep_memory, share)
    if domains is not None:
        for node, domain in enumerate(domains):
            if len(domain) < problem.cost_s[node].size:
                work.keep(node, np.asarray(domain))
    while work.dirty and work.dead is None:
        work.arc_consistency()
        if work.dead is None:
            work.simplify_edges()
        if work.dead is None and dead_ends and not work.dirty:
            work.drop_dead_ends()
    return work.finish()


class _Work:
    """The problem while it shrinks."""

    def __init__(self, problem: Problem, keep_memory: bool, share: bool) -> None:
        self.problem = problem
        self.pool = Pool(share)
        self.dead: str | None = None
        self.unary = [self.pool.intern_costs(cost) for cost in problem.cost_s]
        count = len(self.unary)
        self.maps: list[list[tuple[int, int]]] = []
        self.gone = [False] * count
        for node in range(count):
            whole = np.arange(problem.cost_s[node].size)
            self.maps.append([(node, self.pool.intern(whole))])
        self.near: list[dict[int, int]] = [{} for _ in range(count)]
        for edge in problem.edges:
            self.connect(edge.a, edge.b, self.pool.intern_costs(edge.cost_s))
        self.rows: list[list[int]] = [[] for _ in range(count)]
        if keep_memory:
            for usage in problem.usages:
                self.rows[usage.node].append(self.pool.intern(usage.bytes))
        self.dirty: dict[int, None] = dict.fromkeys(range(count))
        self.stale: dict[int, None] = dict.fromkeys(range(count))

    def connect(self, a: int, b: int, table: int) -> None:
        """Add an edge, summed with an existing one; ``table`` has a's strategies as rows."""
        if b in self.near[a]:
            table = self.pool.add(self.near[a][b], table)
        self.near[a][b] = table
        self.near[b][a] = self.pool.transposed(table)

    def disconnect(self, a: int, b: int) -> None:
        """Remove an edge."""
        del self.near[a][b]
        del self.near[b][a]

    def touch(self, node: int) -> None:
        """Mark a node and its neighbors for another visit."""
        for at in (node, *self.near[node]):
            self.dirty[at] = None
            self.stale[at] = None

    def keep(self, node: int, strategies: Array) -> None:
        """Restrict a node to some ``strategies``."""
        pool, indices = self.pool, self.pool.intern(strategies)
        if not strategies.size:
            self.dead = self.problem.names[self.maps[node][0][0]]
            return
        self.unary[node] = pool.take(self.unary[node], indices, 0)
        self.maps[node] = [(at, pool.take(old, indices, 0)) for at, old in self.maps[node]]
        self.rows[node] = [pool.take(row, indices, 0) for row in self.rows[node]]
        for other, table in self.near[node].items():
            self.near[node][other] = pool.take(table, indices, 0)
            self.near[other][node] = pool.take(self.near[other][node], indices, 1)
        self.touch(node)

    def arc_consistency(self) -> None:
        """Drop strategies without support until every one left has some along every edge."""
        pool = self.pool
        while self.dirty and self.dead is None:
            batch, self.dirty = list(self.dirty), {}
            for node in batch:
                if self.gone[node] or self.dead is not None:
                    continue
                tables = tuple(sorted({self.unary[node], *self.near[node].values()}))
                good = pool.note(("allowed", tables), partial(self._supported, tables))
                if good is not None:
                    self.keep(node, good)

    def _supported(self, tables: tuple[int, ...]) -> Array | None:
        """Strategies with a finite entry in every table, or None when all have one."""
        good: Array | None = None
        for index in tables:
            table = self.pool.tables[index]
            finite = np.isfinite(table)
            mask: Array = finite if table.ndim == 1 else np.asarray(finite.any(axis=1))
            good = mask if good is None else good & mask
        return None if good is None or good.all() else np.flatnonzero(good)

    def simplify_edges(self) -> None:
        """Apply single-strategy, separable and bijection rules to every edge."""
        for a in range(len(self.near)):
            for b in sorted(self.near[a]):
                if a < b and b in self.near[a]:
                    self._simplify(a, b)

    def _simplify(self, a: int, b: int) -> None:
        """Remove or fold one edge if a rule allows it."""
        pool, table = self.pool, self.near[a][b]
        kind, left, right = pool.note(("shape", table), lambda: _shape_of(pool, table))
        if kind is Shape.SPLIT:
            self.disconnect(a, b)
            self.unary[a] = pool.add(self.unary[a], left)
            self.unary[b] = pool.add(self.unary[b], right)
            for at in (a, b):
                self.stale[at] = None
        elif kind is Shape.TIE:
            self._fold(a, b, left, right)

    def _fold(self, a: int, b: int, partner: int, cost: int) -> None:
        """Make b a member of a: strategy s of a means ``partner[s]`` of b, at ``cost[s]`` more.

        The node with fewer neighbors and members becomes the member.
        """
        pool = self.pool
        if len(self.near[b]) + len(self.maps[b]) > len(self.near[a]) + len(self.maps[a]):
            inverse = pool.derive(("inverse", partner), lambda: np.argsort(pool.tables[partner]))
            a, b, partner, cost = b, a, inverse, pool.take(cost, inverse, 0)
        self.disconnect(a, b)
        self.unary[a] = pool.add(
            pool.add(self.unary[a], pool.take(self.unary[b], partner, 0)), cost
        )
        self.maps[a] += [(at, pool.take(old, partner, 0)) for at, old in self.maps[b]]
        self.rows[a] += [pool.take(row, partner, 0) for row in self.rows[b]]
        for other, table in list(self.near[b].items()):
            self.disconnect(b, other)
            self.connect(a, other, pool.take(table, partner, 0))
            self.dirty[other] = self.stale[other] = None
        self.gone[b] = True
        self.dirty[a] = self.stale[a] = None

    def drop_dead_ends(self) -> None:
        """Drop beaten strategies; nodes next to a change are visited again."""
        pool = self.pool
        stale, self.stale = list(self.stale), {}
        for node in stale:
            if self.gone[node] or pool.tables[self.unary[node]].size == 1:
                continue
            tables = tuple(sorted(self.near[node].values()))
            rows = tuple(sorted(set(self.rows[node])))
            seen = self.unary[node], tables, rows
            left = pool.note(("dead", *seen), partial(self._survivors, *seen))
            if left is not None:
                self.keep(node, left)

    def _survivors(
        self, unary: int, tables: tuple[int, ...], rows: tuple[int, ...]
    ) -> Array | None:
        """Strategies that no other one beats, or None when all survive."""
        at = self.pool.tables
        distinct = sorted(set(tables))
        lost = beaten(
            at[unary],
            [at[table] for table in distinct],
            [tables.count(table) for table in distinct],
            [at[row] for row in rows],
        )
        return np.flatnonzero(~lost) if lost.any() else None

    def finish(self) -> ReducedProblem:
        """Assemble the reduced problem."""
        at = self.pool.tables
        left = [node for node, gone in enumerate(self.gone) if not gone]
        number = {node: index for index, node in enumerate(left)}
        members = [[(k, at[m]) for k, m in self.maps[node]] for node in left]
        pairs = {
            (number[a], number[b]): table
            for a in left
            for b, table in sorted(self.near[a].items())
            if a < b
        }
        if self.dead is not None:
            pairs = {}
        reduced = Problem(
            names=tuple(self.problem.names[node] for node in left),
            cost_s=tuple(at[self.unary[node]] for node in left),
            edges=tuple(Edge(i, j, at[table]) for (i, j), table in pairs.items()),
            usages=self._usages(members),
            limit_bytes=self.problem.limit_bytes,
        )
        unary = [self.unary[node] for node in left]
        return ReducedProblem(reduced, members, self.pool, unary, pairs, self.dead, len(self.gone))

    def _usages(self, members: list[list[tuple[int, Array]]]) -> tuple[Usage, ...]:
        """Usages in terms of the reduced nodes; those of one node and interval are added."""
        home = {node: (k, m) for k, group in enumerate(members) for node, m in group}
        sums: dict[tuple[int, int, int], Array] = {}
        for usage in self.problem.usages:
            if usage.start < usage.end:
                group, strategies = home[usage.node]
                key, taken = (group, usage.start, usage.end), usage.bytes[strategies]
                sums[key] = sums[key] + taken if key in sums else taken
        return tuple(Usage(*key, taken) for key, taken in sums.items())


def _shape_of(pool: Pool, index: int) -> tuple[Shape, int, int]:
    """The structure of an edge table: (SPLIT, f, g), (TIE, partner, cost) or (OTHER, -1, -1)."""
    table = pool.tables[index]
    finite = np.isfinite(table)
    if finite.all():
        left, right = table[:, 0] - table[0, 0], table[0]
        size = np.abs(table) + np.abs(left)[:, None] + np.abs(right)
        if (np.abs(table - left[:, None] - right) <= 4e-16 * size).all():
            return Shape.SPLIT, pool.intern(left), pool.intern(right)
    elif table.shape[0] == table.shape[1]:
        partner = finite.argmax(axis=1)
        if (finite.sum(axis=1) == 1).all() and (finite.sum(axis=0) == 1).all():
            cost = table[np.arange(partner.size), partner]
            return Shape.TIE, pool.intern(partner), pool.intern(cost)
    return Shape.OTHER, -1, -1
