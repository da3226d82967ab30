"""Vectorized color refinement: groups the nodes of a graph that are indistinguishable.

Nodes get the same color if their first colors are equal and, for each edge kind, so are the colors
of their neighbors (1-dimensional Weisfeiler-Leman, run to its fixed point).  A round compares
64-bit sums of mixed neighbor codes.  The nodes that these merge are compared exactly at the end,
and split and refined again after a collision, so the result does not depend on the hash.

Complexity: O(edges log edges) per round; rounds are few (the depth of a layer).
Papers: Weisfeiler and Leman, 1968; Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014 (the mixing function).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def numbered(signatures: Iterable[Hashable]) -> IntArray:
    """Dense numbers in order of first appearance."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(s, len(seen)) for s in signatures], np.int64)


def stable_colors(first: IntArray, left: IntArray, right: IntArray, kinds: IntArray) -> IntArray:
    """The coarsest stable coloring in which no color has an edge inside.

    Args:
        first: [nodes] first colors.
        left, right: [edges] end nodes; direction counts.
        kinds: [edges] kinds of edges.

    Returns:
        [nodes] colors, dense, in order of first appearance.  Colors that would have an edge
        inside are split into single nodes.
    """
    near = _Near.of(len(first), left, right, kinds)
    color = _refined(_dense(first), near)
    while True:
        inside = np.unique(color[left[(color[left] == color[right]) & (left != right)]])
        if not inside.size:
            return color
        alone = np.isin(color, inside)
        apart = np.where(alone, len(color) + np.arange(len(color)), color)
        color = _refined(_dense(apart), near)


@dataclass(frozen=True, eq=False)
class _Near:
    """Half edges sorted by node: ``kind`` (with direction) and ``other`` end of each.

    ``start`` [nodes + 1] is where the half edges of each node begin.
    """

    kind: IntArray
    other: IntArray
    start: IntArray

    @staticmethod
    def of(count: int, left: IntArray, right: IntArray, kinds: IntArray) -> _Near:
        """The half edges of a graph without loops; the first colors must account for those."""
        real = left != right
        a, b, k = left[real], right[real], kinds[real]
        node = np.concatenate([a, b])
        order = np.argsort(node, kind="stable")
        start = np.searchsorted(node[order], np.arange(count + 1))
        return _Near(
            np.concatenate([2 * k, 2 * k + 1])[order], np.concatenate([b, a])[order], start
        )

    def codes(self, color: IntArray) -> IntArray:
        """[half edges] kind and color of the other end as one number."""
        return self.kind * (int(color.max(initial=0)) + 1) + color[self.other]


def _dense(labels: IntArray) -> IntArray:
    """Labels renumbered in order of first appearance."""
    _, where, back = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(where), np.int64)
    rank[np.argsort(where, kind="stable")] = np.arange(len(where))
    return rank[back]


def _mixed(codes: IntArray) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: equal codes, equal numbers; others look random."""
    z = codes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _refined(color: IntArray, near: _Near) -> IntArray:
    """Refine until stable."""
    while True:
        count = int(color.max(initial=-1)) + 1
        sums = np.concatenate([[np.uint64(0)], np.cumsum(_mixed(near.codes(color) + 1))])
        around = sums[near.start[1:]] - sums[near.start[:-1]]
        color = _dense(_joined(color, around))
        if int(color.max(initial=-1)) + 1 == count:
            split = _compared(color, near)
            if split is None:
                return color
            color = split


def _joined(color: IntArray, around: NDArray[np.uint64]) -> IntArray:
    """One label per distinct pair of color and sum."""
    _, back = np.unique(around, return_inverse=True)
    joined: IntArray = color * (int(back.max(initial=0)) + 1) + back
    return joined


def _compared(color: IntArray, near: _Near) -> IntArray | None:
    """None if every node has exactly the neighbors of its class's first member, else a coloring
    that separates those that don't."""
    node = np.repeat(np.arange(len(color)), np.diff(near.start))
    codes = near.codes(color)
    codes = codes[np.lexsort((codes, node))]
    _, first = np.unique(color, return_index=True)
    model = first[color]
    degree = np.diff(near.start)
    same = degree == degree[model]
    at = np.arange(len(node)) - near.start[node] + near.start[model[node]]
    valid = same[node]
    wrong = np.zeros(len(node), bool)
    wrong[valid] = codes[valid] != codes[at[valid]]
    same[node[wrong]] = False
    if same.all():
        return None
    return _dense(np.where(same, color, len(color) + color))
