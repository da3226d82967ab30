"""Cuts the forward pass of a microbatch into stages."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from planner import compat
from planner.graph.flat import Call, nbytes
from planner.remat.frontier import call_cost, product_flop
from planner.stages.errors import refused

WINDOW = 0.25
"""A cut is narrow if no cut within this share of a stage's work, on either side, is narrower."""
SLACK = 1.05
"""Maximum ratio of the bytes that cross a narrow cut to those of the narrowest."""


def named_begins(labels: Sequence[Sequence[str]], manual: Sequence[tuple[str, int]]) -> list[int]:
    """Where manual stages begin: at the first call that one of their patterns matches.

    Args:
        labels: per call of the forward pass, in order, its line and the paths of the arrays of the
            state that it reads.
        manual: (pattern, stage).

    Raises:
        NoStagesError: a pattern matches nothing, or a stage does not begin after the previous one.
    """
    begins: dict[int, int] = {}
    for pattern, stage in manual:
        matches = [k for k, texts in enumerate(labels) if any(re.search(pattern, t) for t in texts)]
        if not matches:
            known = [t for texts in labels for t in texts]
            some = ", ".join(dict.fromkeys(known[:: max(1, len(known) // 6)]))
            raise refused(
                f"{pattern!r} (stage {stage}) matches no line of the forward pass and no path "
                f"that it reads, such as {some}"
            )
        begins[stage] = min(matches[0], begins.get(stage, matches[0]))
    begins[0] = 0
    order = [begins[stage] for stage in sorted(begins)]
    for stage, (first, second) in enumerate(itertools.pairwise(order)):
        if second <= first:
            where = [texts[0] if texts else "an unknown line" for texts in labels]
            raise refused(
                f"stage {stage + 1} begins at {where[second]}, which is not behind the beginning "
                f"of stage {stage} at {where[first]}"
            )
    return order


def narrow_places(calls: Sequence[Call], count: int) -> list[int]:
    """Where calls, the forward pass in order, may be cut: the beginning, narrow cuts, and the end.

    Raises:
        NoStagesError: there are too few places for ``count`` groups.
    """
    products = [product_flop(c.eqn) for c in calls]
    costs = products if any(products) else [call_cost(c) for c in calls]
    work = np.cumsum([0.0, *costs])
    across = crossing(calls)
    reach = WINDOW * work[-1] / count
    places = [0]
    for at in range(1, len(calls)):
        begin, end = (
            bisect.bisect_left(work, work[at] - reach),
            bisect.bisect(work, work[at] + reach),
        )
        around = across[max(begin, 1) : min(end, len(calls))]
        if across[at] <= SLACK * min(around):
            places.append(at)
    places.append(len(calls))
    if len(places) <= count:
        raise refused(f"{count} stages were requested, and it has {len(places) - 1} blocks")
    return places


def cut_blocks(seconds: Sequence[float], across: Sequence[float], count: int) -> list[int]:
    """Cut blocks into consecutive groups: minimizes the longest, then the bytes that cross.

    Args:
        seconds: per block.
        across: per block, bytes that enter it.
        count: number of groups.

    Returns:
        The first block of each group.

    Source: the interval program of Alpa (Zheng et al., 2022, section 5.2).

    >>> cut_blocks([1.0, 1.0, 1.0, 3.0], [0, 1, 1, 1], 2)
    [0, 3]
    """
    ends = np.cumsum([0.0, *seconds])
    row = [(0.0, 0.0, 0)] + [(math.inf, 0.0, 0)] * len(seconds)
    rows = [row]
    for _ in range(count):
        before, row = rows[-1], [(math.inf, 0.0, 0)]
        for j in range(1, len(ends)):
            row.append(
                min(
                    (max(before[i][0], ends[j] - ends[i]), before[i][1] + across[i], i)
                    for i in range(j)
                )
            )
        rows.append(row)
    begins, j = [], len(seconds)
    for k in range(count, 0, -1):
        j = rows[k][j][2]
        begins.append(j)
    return begins[::-1]


def crossing(calls: Sequence[Call]) -> list[int]:
    """Per call, the bytes that are made before it and read by it or later."""
    last: dict[int, int] = {}
    for at, call in enumerate(calls):
        last.update((v, at) for v in call.ins if isinstance(v, int))
    change = [0] * (len(calls) + 2)
    for at, call in enumerate(calls):
        for v, var in zip(call.outs, call.eqn.outvars, strict=False):
            if last.get(v, at) > at:
                change[at + 1] += nbytes(var.aval)
                change[last[v] + 1] -= nbytes(var.aval)
    return list(itertools.accumulate(change))[: len(calls)]


def slice_part(call: Call, count: int) -> int | None:
    """The index of the part that a call slices from ``count`` equal parts of its operand's first
    dimension; None if it does not."""
    if call.kind != "slice":
        return None
    shape = compat.aval_shape(call.eqn.invars[0].aval)
    begin, end, strides = (
        call.eqn.params[k] for k in ("start_indices", "limit_indices", "strides")
    )
    if not shape or shape[0] % count or (strides and any(s != 1 for s in strides)):
        return None
    size = shape[0] // count
    whole = all(b == 0 and e == n for b, e, n in list(zip(begin, end, shape, strict=True))[1:])
    if not whole or begin[0] % size or end[0] - begin[0] != size:
        return None
    return int(begin[0]) // size
