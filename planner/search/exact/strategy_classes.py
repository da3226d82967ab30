"""Strategy classes: an edge table has far fewer distinct rows than its node has strategies.

An edge table is often a function of a few properties (the layout a strategy produces), so many of
its rows are equal.  With r < S distinct rows, an edge E[s, u] of node a becomes a table over
(class, u) and a node z of r classes, tied to a by T[s, z] = 0 if s is in class z, infinity
otherwise.  The minimum is unchanged; an elimination then builds tables over classes instead of
strategies.  Edges of a node with the same classes share one z.

Complexity: O(S^2) per distinct table.
Paper: Freuder, "Eliminating interchangeable values in constraint satisfaction problems", AAAI 1991
(strategies of one class are interchangeable along the edge).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.search.exact.tables import Pool
from planner.search.problem import Array

WORTH = 0.75
"""Classes are introduced if their number is at most this share of the strategies."""


@dataclass(frozen=True, eq=False)
class Classed:
    """A graph with class nodes after the original ones.

    Attributes:
        sizes: domain size per node, the class nodes last.
        unary: id of the costs per node (zeros for class nodes).
        pairs: (i, j), i < j, to the id of the edge table.
    """

    sizes: list[int]
    unary: list[int]
    pairs: dict[tuple[int, int], int]


def add_classes(pool: Pool, unary: list[int], pairs: dict[tuple[int, int], int]) -> Classed:
    """Introduce class nodes wherever an edge has few distinct rows or columns.

    Args:
        pool: where the tables are interned.
        unary: id of each node's costs.
        pairs: (i, j), i < j, to the id of the edge table.

    Returns:
        The graph; it equals the given graph if no classes are worth introducing.
    """
    graph = Classed([pool.tables[cost].size for cost in unary], list(unary), {})
    seats: dict[tuple[int, int], int] = {}

    def seat(node: int, label: int, count: int) -> int:
        if count > WORTH * graph.sizes[node]:
            return node
        if (node, label) not in seats:
            at = seats[node, label] = len(graph.sizes)
            graph.sizes.append(count)
            graph.unary.append(pool.intern(np.zeros(count)))
            tie = pool.derive(("tie", label, count), lambda: _tie(pool.tables[label], count))
            graph.pairs[node, at] = tie
        return seats[node, label]

    for (i, j), table in pairs.items():
        rows, columns = _labels(pool, table), _labels(pool, pool.transposed(table))
        a, b = seat(i, *rows), seat(j, *columns)
        if a != i:
            table = pool.take(table, _firsts(pool, rows[0]), 0)
        if b != j:
            table = pool.take(table, _firsts(pool, columns[0]), 1)
        graph.pairs[min(a, b), max(a, b)] = table if a < b else pool.transposed(table)
    return graph


def _labels(pool: Pool, table: int) -> tuple[int, int]:
    """Id of the class of every row, and the number of classes."""

    def make() -> tuple[int, int]:
        seen: dict[bytes, int] = {}
        rows = pool.tables[table]
        labels = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows])
        return pool.intern(labels), len(seen)

    return pool.note(("labels", table), make)


def _firsts(pool: Pool, labels: int) -> int:
    """Id of the first strategy of every class."""
    return pool.derive(
        ("firsts", labels), lambda: np.unique(pool.tables[labels], return_index=True)[1]
    )


def _tie(labels: Array, count: int) -> Array:
    """The table that ties a node to its classes."""
    return np.where(labels[:, None] == np.arange(count), 0.0, np.inf)
