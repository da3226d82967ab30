"""The quotient of a problem by color refinement: repeated parts are solved once.

Nodes get the same color if their costs are equal and, for each edge table, their neighbors' colors
are equal (1-dimensional Weisfeiler-Leman, run to its fixed point).  The classes are an equitable
partition, so

* a choice of the quotient (one strategy per class) is a choice of the problem with the same cost:
  equal layers get equal plans;
* any reparametrization bound of the quotient, with edges of different tables kept separate, is a
  bound of the problem: its messages, divided evenly among the members, are messages there.

Classes with an edge inside are split into single nodes, because the second statement fails there.

Complexity: O(rounds * edges * log edges); rounds are few (a layer's depth in groups).
Papers: Weisfeiler and Leman, 1968; Grohe, Kersting, Mladenov and Selman, "Dimension reduction via
colour refinement", ESA 2014; Mladenov, Globerson and Kersting, "Lifted message passing as
reparametrization of graphical models", UAI 2014.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.folding.colors import numbered, stable_colors
from planner.search.problem import Array, Edge, Problem, Usage


@dataclass(frozen=True, eq=False)
class Folded:
    """A quotient.  ``color[i]`` is the quotient's node that stands for node i."""

    problem: Problem
    color: tuple[int, ...]

    def unfold(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice of the whole problem that a choice of the quotient stands for."""
        return tuple(choice[c] for c in self.color)


class _Digests:
    """Content digests of arrays, cached by object."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Array, bytes]] = {}

    def of(self, table: Array) -> bytes:
        """A digest that equal tables share."""
        entry = self.known.get(id(table))
        if entry is None:
            text = hashlib.blake2b(table.tobytes(), digest_size=12, key=str(table.shape).encode())
            entry = self.known[id(table)] = (table, text.digest())
        return entry[1]


def fold(problem: Problem) -> Folded:
    """Merge the nodes that color refinement can't distinguish.

    Args:
        problem: any problem; parallel edges are added up first.  A problem with ``counts`` is
            already a quotient and is returned unchanged.

    Returns:
        The quotient; it has one edge per distinct table between two nodes.
    """
    if problem.counts is not None:
        return Folded(problem, tuple(range(len(problem.cost_s))))
    digests = _Digests()
    edges = _merged(problem.edges)
    tables = [digests.of(edge.cost_s) for edge in edges]
    names = {table: k for k, table in enumerate(dict.fromkeys(tables))}
    kinds = [names[table] for table in tables]
    levels = problem.levels or (None,) * len(problem.cost_s)
    first = [
        (digests.of(cost), b"" if level is None else digests.of(level))
        for cost, level in zip(problem.cost_s, levels, strict=True)
    ]
    left = np.array([edge.a for edge in edges], np.int64)
    right = np.array([edge.b for edge in edges], np.int64)
    color = stable_colors(numbered(first), left, right, np.array(kinds, np.int64)).tolist()
    return Folded(_quotient(problem, edges, kinds, color), tuple(color))


def _merged(edges: Sequence[Edge]) -> list[Edge]:
    """Parallel edges added up; equal sums share one array."""
    between: dict[tuple[int, int], list[Array]] = {}
    flipped: dict[int, Array] = {}
    for edge in edges:
        if edge.a <= edge.b:
            between.setdefault((edge.a, edge.b), []).append(edge.cost_s)
        else:
            table = flipped.setdefault(id(edge.cost_s), edge.cost_s.T)
            between.setdefault((edge.b, edge.a), []).append(table)
    sums: dict[tuple[int, ...], Array] = {}
    merged = []
    for (a, b), parts in between.items():
        key = tuple(sorted(map(id, parts)))
        if key not in sums:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            sums[key] = total
        merged.append(Edge(a, b, sums[key]))
    return merged


def _quotient(
    problem: Problem, edges: Sequence[Edge], kinds: Sequence[int], color: Sequence[int]
) -> Problem:
    """One node per class: costs times members; one edge per class of edges."""
    count = max(color, default=-1) + 1
    members = [0] * count
    one = [-1] * count
    for node, c in enumerate(color):
        members[c] += 1
        one[c] = one[c] if one[c] >= 0 else node
    tally: dict[tuple[int, int, int], int] = {}
    table: dict[tuple[int, int, int], Array] = {}
    for edge, kind in zip(edges, kinds, strict=True):
        key = (color[edge.a], color[edge.b], kind)
        tally[key] = tally.get(key, 0) + 1
        table[key] = edge.cost_s
    return Problem(
        names=tuple(
            problem.names[node] + (f" x{n}" if n > 1 else "")
            for node, n in zip(one, members, strict=True)
        ),
        cost_s=tuple(
            problem.cost_s[node] * n if n > 1 else problem.cost_s[node]
            for node, n in zip(one, members, strict=True)
        ),
        edges=tuple(
            Edge(a, b, table[a, b, k] * n) if a <= b else Edge(b, a, (table[a, b, k] * n).T)
            for (a, b, k), n in tally.items()
        ),
        usages=tuple(Usage(color[u.node], u.start, u.end, u.bytes, u.pool) for u in problem.usages),
        limit_bytes=problem.limit_bytes,
        levels=None if problem.levels is None else tuple(problem.levels[node] for node in one),
        counts=tuple(members),
        pools=problem.pools,
    )
