"""Where the forward pass of a microbatch is cut."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import numpy as np

from planner.graph.flat import Call, nbytes
from planner.remat.frontier import call_cost
from planner.stages.errors import refused

WINDOW = 0.25
"""A cut is narrow if none in this share of a stage's work around it is narrower."""
SLACK = 1.05
"""How much more than the narrowest may cross a narrow cut."""


def cut_forward(calls: Sequence[Call], count: int) -> list[int]:
    """Cut calls into consecutive groups: the most work of a group is least, then what crosses.

    Args:
        calls: the forward pass, in order.
        count: groups.

    Returns:
        Per call, its group.

    Raises:
        NoStagesError: there are fewer places to cut at.

    Source: the interval program of Alpa (Zheng et al., 2022, section 5.2), over narrow places.
    """
    work = np.cumsum([0.0, *(call_cost(c) for c in calls)])
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
        raise refused(f"{count} stages were asked for, and it has {len(places) - 1} blocks")
    ends = work[places]
    # best[k][j]: the least (most work, bytes across) of places[:j] in k groups, and where to cut
    best: list[list[tuple[float, float, int]]] = [
        [(0.0, 0.0, 0)] + [(math.inf, 0.0, 0)] * (len(places) - 1)
    ]
    for _ in range(count):
        row = [(math.inf, 0.0, 0)]
        for j in range(1, len(places)):
            row.append(
                min(
                    (max(best[-1][i][0], ends[j] - ends[i]), best[-1][i][1] + across[places[i]], i)
                    for i in range(j)
                )
            )
        best.append(row)
    cuts, j = [], len(places) - 1
    for k in range(count, 0, -1):
        j = best[k][j][2]
        cuts.append(places[j])
    cuts.reverse()
    return [bisect.bisect(cuts, at) - 1 for at in range(len(calls))]


def crossing(calls: Sequence[Call]) -> list[int]:
    """Bytes made before each call and read by it or later."""
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
