"""Memory over time, with repeated layers folded: only moments that can be the peak are kept.

Usages of one *kind* take the same bytes under the same choice, so the memory at a moment is a
linear function of the number of usages of each kind that are live there (its *row*). Two kinds of
moments can then be dropped for every choice:

* those that are dominated (``maximal_moments``);
* those whose row lies midway between the rows a period before and a period after: a linear
  function is largest at an end of an arithmetic progression. Along repeated layers the rows are
  such progressions (each layer saves the same activations, frees the same, ...), so the number of
  kept moments does not grow with the number of layers.

Rows are compared by their product with one random 64-bit number per kind, modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.graph.labels.blocks import periods
from planner.search.local.memory import maximal_moments

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Moments:
    """The kept moments, [K] in operation indices, and their usages.

    ``runs``: (kind, first, stop, count): ``count`` usages of a kind are live at the kept
    moments first to stop - 1 (positions in ``kept``).
    """

    kept: IntArray
    runs: tuple[tuple[int, int, int, int], ...]


def worst_moments(kinds: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Moments:
    """The moments that can be the peak, and the usages that are live there.

    Args:
        kinds: per usage, its kind, numbered from zero.
        starts, ends: per usage, its interval [start, end) in operation indices.

    Complexity: O(U log U) for U usages, plus kept moments times kinds.
    """
    kind, start, end = (np.asarray(x, np.int64) for x in (kinds, starts, ends))
    moments = maximal_moments(start, end)
    moments = moments[~_between(_hashes(kind, start, end, moments))]
    count = int(kind.max(initial=-1)) + 1
    live = np.zeros((count, len(moments) + 2), np.int64)
    np.add.at(live, (kind, np.searchsorted(moments, start) + 1), 1)
    np.subtract.at(live, (kind, np.searchsorted(moments, end) + 1), 1)
    live = np.cumsum(live, axis=1)
    live[:, -1] = 0
    rows, at = np.nonzero(np.diff(live, axis=1))
    runs = []
    for k, first, after, stop in zip(rows[:-1], at[:-1], rows[1:], at[1:], strict=True):
        number = int(live[k, first + 1])
        if number and k == after:
            runs.append((int(k), int(first), int(stop), number))
    return Moments(moments, tuple(runs))


def _hashes(
    kind: IntArray, start: IntArray, end: IntArray, moments: IntArray
) -> NDArray[np.uint64]:
    """[moments] the row of each moment times one random number per kind, modulo 2^64."""
    count = int(kind.max(initial=-1)) + 1
    secret = np.random.default_rng(0).integers(0, 2**64, count, np.uint64)
    change = np.zeros(len(moments) + 1, np.uint64)
    np.add.at(change, np.searchsorted(moments, start), secret[kind])
    np.subtract.at(change, np.searchsorted(moments, end), secret[kind])
    rows: NDArray[np.uint64] = np.cumsum(change)[:-1]
    return rows


def _between(rows: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Mask of the moments midway between two others (see the module's second point).

    All may be dropped together: if one of them is a peak, so is the moment a period later, and
    this chain ends at a kept moment.
    """
    out = np.zeros(len(rows), bool)
    if len(rows) < 3:
        return out
    _, steps = np.unique(np.diff(rows), return_inverse=True)
    for period in periods(steps.astype(np.int64)):
        middle = rows[period:-period]
        out[period:-period] |= middle + middle == rows[: -2 * period] + rows[2 * period :]
    return out
