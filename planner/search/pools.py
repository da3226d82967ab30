"""Combines several memories into one: pools side by side in time.

At every moment, the live bytes of a pool must stay under its limit. The moments of each pool follow
those of the previous one, and its bytes are scaled to the first pool's limit. This gives one limit
for all moments: a problem with one pool, as in IOPDDL, with the same feasible choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.search.problem import Array, Pool, Problem, Usage, memory_profile


def side_by_side(
    usages: Sequence[Usage], limits: Sequence[tuple[str, float]]
) -> tuple[tuple[Usage, ...], float, tuple[Pool, ...]]:
    """Lay the usages of several pools out for one limit.

    Args:
        usages: the usages, each in moments and bytes of its pool.
        limits: name and limit in bytes of each pool, by number; infinity: none.

    Returns:
        The usages, the limit and the pools of a `Problem`. Pools without limit or usages are left
        out, except the first. The pools are empty if only the first is left.
    """
    used = {usage.pool for usage in usages}
    pool_ids = [
        k for k, (_, limit) in enumerate(limits) if not k or (k in used and limit < math.inf)
    ]
    if len(pool_ids) == 1 or limits[0][1] == math.inf:
        return tuple(u for u in usages if u.pool == 0), limits[0][1], ()
    limit = limits[0][1]
    pools, first = [], 0
    for k in pool_ids:
        name, pool_limit = limits[k]
        pools.append(Pool(name, pool_limit, first, limit / pool_limit))
        first += max((u.end for u in usages if u.pool == k), default=0) + 1
    number = {k: n for n, k in enumerate(pool_ids)}
    known: dict[tuple[int, int], tuple[Array, Array]] = {}  # equal arrays stay one object
    out = []
    for u in usages:
        if u.pool not in number:
            continue
        pool = pools[number[u.pool]]
        taken = u.bytes
        if pool.scale != 1.0:
            key = (id(u.bytes), u.pool)
            taken = known.setdefault(key, (u.bytes * pool.scale, u.bytes))[0]
        start, end = u.start + pool.first, u.end + pool.first
        out.append(Usage(u.node, start, end, taken, number[u.pool]))
    return tuple(out), limit, tuple(pools)


def pool_peaks(problem: Problem, choice: Sequence[int]) -> dict[str, float]:
    """The peak of each pool under a choice, by pool name, in unscaled bytes; empty for one pool."""
    if not problem.pools:
        return {}
    moments, profile = memory_profile(problem, choice)
    out = {}
    for pool, after in zip(problem.pools, (*problem.pools[1:], None), strict=True):
        inside = moments >= pool.first
        if after is not None:
            inside &= moments < after.first
        out[pool.name] = float(profile[inside].max(initial=0.0)) / pool.scale
    return out
