"""The order of a variable elimination, planned on sizes alone.

A table over the nodes in its scope is a *slot*.  Eliminating node x joins the slots that mention x
and minimizes x out; the result is a new slot over their other nodes.  The next node is the one with
the smallest result (min-degree, weighted by the logarithms of the domain sizes).  Ties go to the
lowest index, so that repeated layers are eliminated in the same pattern.

If the smallest result would exceed the cap, the plan *splits* the node's slots into mini-buckets
that each stay below the cap (the minimum is taken separately in each: a lower bound).

Complexity: O((n + steps * width^2) log n).
Papers: Bertele and Brioschi, "Nonserial Dynamic Programming", 1972; Dechter and Rish,
"Mini-buckets: a general scheme for bounded inference", JACM 50(2), 2003.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

CAP = 4_000_000
"""Entries of the largest table an elimination may build."""


@dataclass(frozen=True)
class EliminationStep:
    """Remove ``node``: each part joins its input slots into one output slot."""

    node: int
    parts: tuple[tuple[int, ...], ...]
    outs: tuple[int, ...]


@dataclass
class EliminationOrder:
    """Steps over slots.

    Attributes:
        sizes: domain size per node.
        scopes: the nodes of each slot, ascending; node costs first, then edges, then results.
        steps: in order of elimination.
        exact: whether no node was split.
        entries: table entries of all results together.
    """

    sizes: list[int]
    scopes: list[tuple[int, ...]]
    steps: list[EliminationStep] = field(default_factory=list)
    exact: bool = True
    entries: int = 0


def make_plan(
    sizes: Sequence[int],
    edges: Sequence[tuple[int, int]],
    cap: int = CAP,
) -> EliminationOrder:
    """Plan an elimination.

    Args:
        sizes: domain size per node.
        edges: pairs (i, j) with i < j, each at most once.
        cap: most entries of a result.

    Returns:
        The plan.
    """
    planner = _Planner(list(sizes), edges)
    limit = math.log2(max(cap, 1)) * _UNIT + 1
    while planner.left:
        node = planner.smallest()
        if planner.load[node] <= limit:
            planner.eliminate(node, [planner.slots_of(node)])
        else:
            planner.eliminate(node, planner.buckets(node, cap))
    return planner.plan


_UNIT = 1 << 20
"""Logarithms are stored as integer multiples of 1 / _UNIT, so that equal sums compare equal."""


class _Planner:
    """The interaction graph, from which nodes are eliminated."""

    def __init__(self, sizes: list[int], edges: Sequence[tuple[int, int]]) -> None:
        count = len(sizes)
        self.plan = EliminationOrder(sizes, [])
        self.weight = [round(math.log2(size) * _UNIT) for size in sizes]
        self.load = [0] * count
        self.near: list[dict[int, int]] = [{} for _ in range(count)]
        self.slots: list[dict[int, None]] = [{} for _ in range(count)]
        self.left = dict.fromkeys(range(count))
        self.heap: list[tuple[int, int]] = []
        for node in range(count):
            self.add((node,))
        for edge in edges:
            self.add(edge)
        self.heap = [(self.load[node], node) for node in range(count)]
        heapq.heapify(self.heap)

    def add(self, scope: tuple[int, ...]) -> int:
        """Add a slot and count its pairs."""
        slot = len(self.plan.scopes)
        self.plan.scopes.append(scope)
        for node in scope:
            self.slots[node][slot] = None
            near = self.near[node]
            for other in scope:
                if other != node:
                    if other not in near:
                        near[other] = 0
                        self.load[node] += self.weight[other]
                    near[other] += 1
        return slot

    def drop(self, slot: int) -> None:
        """Remove a slot."""
        scope = self.plan.scopes[slot]
        for node in scope:
            del self.slots[node][slot]
            near = self.near[node]
            for other in scope:
                if other != node:
                    near[other] -= 1
                    if not near[other]:
                        del near[other]
                        self.load[node] -= self.weight[other]

    def slots_of(self, node: int) -> tuple[int, ...]:
        """The slots that mention a node."""
        return tuple(self.slots[node])

    def smallest(self) -> int:
        """The remaining node whose elimination builds the smallest table."""
        while True:
            load, node = self.heap[0]
            if node in self.left and load == self.load[node]:
                return node
            heapq.heappop(self.heap)

    def eliminate(self, node: int, parts: list[tuple[int, ...]]) -> None:
        """Record the step and update the graph."""
        scopes, touched = self.plan.scopes, sorted(self.near[node])
        results = []
        for part in parts:
            scope = sorted({other for slot in part for other in scopes[slot]} - {node})
            results.append(tuple(scope))
            for slot in part:
                self.drop(slot)
        outs = tuple(self.add(scope) for scope in results)
        self.plan.entries += sum(
            math.prod(self.plan.sizes[other] for other in scope) for scope in results
        )
        self.plan.steps.append(EliminationStep(node, tuple(parts), outs))
        self.plan.exact &= len(parts) == 1
        del self.left[node]
        for other in touched:
            heapq.heappush(self.heap, (self.load[other], other))

    def buckets(self, node: int, cap: int) -> list[tuple[int, ...]]:
        """Pack slots first-fit, largest first, so that each joint result stays below the cap."""
        scopes, sizes = self.plan.scopes, self.plan.sizes
        packed: list[tuple[list[int], set[int]]] = []
        for slot in sorted(self.slots[node], key=lambda at: (-len(scopes[at]), at)):
            others = set(scopes[slot]) - {node}
            for members, union in packed:
                if math.prod(sizes[other] for other in union | others) <= cap:
                    members.append(slot)
                    union |= others
                    break
            else:
                packed.append(([slot], others))
        return [tuple(members) for members, _ in packed]
