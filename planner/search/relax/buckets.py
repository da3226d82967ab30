"""Compiled variable elimination over a factor graph, with conditioning if it would be too wide.

Nodes are eliminated in min-degree order (degrees weighted by the logarithms of the domain sizes).
A node's factors are joined and the node is minimized out; the result is a factor over its
neighbors.  If the cheapest remaining join would exceed ``cap`` entries, the node with the heaviest
neighborhood is fixed at its current value and the run continues.  Backtracking gives a choice that
is optimal for all nodes that were not fixed.

Complexity: O(nodes * width^2) bookkeeping and at most ``cap`` entries per join.
Papers: Bertele and Brioschi, "Nonserial Dynamic Programming", 1972; Dechter, "Enhancement schemes
for constraint processing: backjumping, learning, and cutset decomposition", AI 41, 1990.
"""

from __future__ import annotations

import heapq

import numpy as np

from planner.search.problem import Array
from planner.search.relax.compiled import compiled


@compiled
def _grown(array: Array, needed: int) -> Array:
    """The array itself, or a copy with room for ``needed`` elements."""
    if needed <= array.size:
        return array
    bigger = np.empty(max(needed, 2 * array.size), array.dtype)
    bigger[: array.size] = array
    return bigger


@compiled
def _join(
    data: Array,
    top: int,
    base: Array,
    step: Array,
    stride: Array,
    count: int,
    sizes: Array,
    width: int,
    domain_size: int,
) -> int:
    """Minimize the sum of ``count`` factors over a node with ``domain_size`` strategies.

    Factor f reads ``data[base[f] + s * step[f] + sum_j index_j * stride[f, j]]``; the result is
    written to ``data`` from ``top`` on, row-major over ``sizes[:width]``.
    """
    total = 1
    for j in range(width):
        total *= sizes[j]
    inner = sizes[width - 1] if width > 0 else 1
    index = np.zeros(max(width, 1), np.int64)
    row = np.empty(inner)
    best = np.empty(inner)
    for start in range(0, total, inner):
        best[:] = np.inf
        for s in range(domain_size):
            constant = 0.0
            row[:] = 0.0
            for f in range(count):
                at = base[f] + s * step[f]
                hop = stride[f, width - 1] if width > 0 else 0
                if hop == 0:
                    constant += data[at]
                elif hop == 1:
                    for k in range(inner):
                        row[k] += data[at + k]
                else:
                    for k in range(inner):
                        row[k] += data[at + k * hop]
            if constant < np.inf:
                for k in range(inner):
                    value = row[k] + constant
                    if value < best[k]:
                        best[k] = value
        for k in range(inner):
            data[top + start + k] = best[k]
        j = width - 2
        while j >= 0:
            index[j] += 1
            for f in range(count):
                base[f] += stride[f, j]
            if index[j] < sizes[j]:
                break
            for f in range(count):
                base[f] -= stride[f, j] * sizes[j]
            index[j] = 0
            j -= 1
    return total


@compiled
def _backtrack(
    sizes: Array,
    scope_at: Array,
    scope: Array,
    data_at: Array,
    table: Array,
    order: Array,
    used_at: Array,
    used: Array,
    choice: Array,
) -> None:
    """Set the best strategy of every eliminated node, in reverse order of elimination."""
    for i in range(order.size - 1, -1, -1):
        x = order[i]
        total = np.zeros(sizes[x])
        for k in range(used_at[i], used_at[i + 1]):
            f = used[k]
            hop = 1
            base = data_at[f]
            step = 0
            for j in range(scope_at[f + 1] - 1, scope_at[f] - 1, -1):
                v = scope[j]
                if v == x:
                    step = hop
                else:
                    base += hop * choice[v]
                hop *= sizes[v]
            for s in range(sizes[x]):
                total[s] += table[base + s * step]
        choice[x] = np.argmin(total)


@compiled
def eliminate(
    sizes: Array,
    scope_at: Array,
    scope: Array,
    data_at: Array,
    table: Array,
    choice: Array,
    held: Array,
    cap: float,
    noise: Array,
) -> None:
    """Eliminate the nodes of a factor graph.

    Args:
        sizes: [n] strategies per node.
        scope_at, scope: [F + 1], [.] the ascending nodes of each factor.
        data_at: [F] where each factor's row-major table begins in ``table``.
        table: all tables.
        choice: [n] current strategies; overwritten by the best for all nodes that are not fixed.
        held: [n] nodes fixed from the start.
        cap: maximum entries of one join.
        noise: [n] positive weights that perturb which nodes are fixed.
    """
    n = sizes.size
    factors = data_at.size
    room = factors + n + 1
    s_at = np.zeros(room + 1, np.int64)
    s_at[: factors + 1] = scope_at
    s_all = np.empty(max(scope.size * 2, 16), np.int64)
    s_all[: scope.size] = scope
    d_at = np.zeros(room, np.int64)
    d_at[:factors] = data_at
    data = _grown(table, table.size + 1024)
    top = table.size
    usable = np.zeros(room, np.bool_)
    weight = np.log2(sizes.astype(np.float64))
    alive = ~held
    # factor lists
    head = np.full(n, -1, np.int64)
    link_factor = np.empty(max(2 * scope.size, 16), np.int64)
    link_next = np.empty(max(2 * scope.size, 16), np.int64)
    links = 0
    # neighbor lists, stored in a pool
    near_at = np.zeros(n, np.int64)
    near_count = np.zeros(n, np.int64)
    near_room = np.zeros(n, np.int64)
    degree = np.zeros(n, np.int64)
    for f in range(factors):
        width = 0
        for k in range(scope_at[f], scope_at[f + 1]):
            width += not held[scope[k]]
        for k in range(scope_at[f], scope_at[f + 1]):
            degree[scope[k]] += width
    at = 0
    for v in range(n):
        near_at[v] = at
        near_room[v] = degree[v] + 4
        at += near_room[v]
    pool = np.empty(2 * at + 16, np.int64)
    pool_top = at
    mark = np.full(n, -1, np.int64)
    load = weight.copy()
    for f in range(factors):
        usable[f] = True
        for k in range(scope_at[f], scope_at[f + 1]):
            v = scope[k]
            link_factor[links] = f
            link_next[links] = head[v]
            head[v] = links
            links += 1
    for v in range(n):
        if held[v]:
            continue
        mark[v] = v
        link = head[v]
        while link >= 0:
            f = link_factor[link]
            for k in range(scope_at[f], scope_at[f + 1]):
                u = scope[k]
                if mark[u] != v and not held[u]:
                    mark[u] = v
                    pool[near_at[v] + near_count[v]] = u
                    near_count[v] += 1
                    load[v] += weight[u]
            link = link_next[link]
    mark[:] = -1
    stamp = n
    heap = [(load[v], v) for v in range(n) if alive[v]]
    heapq.heapify(heap)
    order = np.empty(n, np.int64)
    used_at = np.zeros(n + 1, np.int64)
    used = np.empty(max(links, 16), np.int64)
    done = 0
    limit = np.log2(cap)
    left = 0
    for v in range(n):
        left += alive[v]
    base = np.empty(64, np.int64)
    step = np.empty(64, np.int64)
    stride = np.empty((64, 64), np.int64)
    out_sizes = np.empty(64, np.int64)
    fixed = held.copy()
    while left > 0:
        value, x = heapq.heappop(heap)
        if not alive[x] or value != load[x]:
            continue
        if load[x] > limit:
            heapq.heappush(heap, (value, x))
            worst = -1
            heaviest = -1.0
            for v in range(n):
                if alive[v] and load[v] * noise[v] > heaviest:
                    heaviest = load[v] * noise[v]
                    worst = v
            fixed[worst] = True
            alive[worst] = False
            left -= 1
            for k in range(near_at[worst], near_at[worst] + near_count[worst]):
                u = pool[k]
                for j in range(near_at[u], near_at[u] + near_count[u]):
                    if pool[j] == worst:
                        near_count[u] -= 1
                        pool[j] = pool[near_at[u] + near_count[u]]
                        break
                load[u] -= weight[worst]
                heapq.heappush(heap, (load[u], u))
            continue
        # the scope of the result
        width = near_count[x]
        out = np.sort(pool[near_at[x] : near_at[x] + width])
        for j in range(width):
            out_sizes[j] = sizes[out[j]]
            mark[out[j]] = j
        # the factors to join
        count = 0
        link = head[x]
        first = used_at[done]
        while link >= 0:
            f = link_factor[link]
            if usable[f]:
                usable[f] = False
                used = _grown(used, first + count + 1)
                used[first + count] = f
                count += 1
            link = link_next[link]
        if count > base.size:
            base = np.empty(2 * count, np.int64)
            step = np.empty(2 * count, np.int64)
            stride = np.empty((2 * count, 64), np.int64)
        stride[:count, :width] = 0
        entries = 1
        for j in range(width):
            entries *= out_sizes[j]
        for c in range(count):
            f = used[first + c]
            hop = 1
            base[c] = d_at[f]
            step[c] = 0
            for k in range(s_at[f + 1] - 1, s_at[f] - 1, -1):
                v = s_all[k]
                if v == x:
                    step[c] = hop
                elif fixed[v]:
                    base[c] += hop * choice[v]
                else:
                    stride[c, mark[v]] = hop
                hop *= sizes[v]
        data = _grown(data, top + entries)
        _join(data, top, base, step, stride, count, out_sizes, width, sizes[x])
        order[done] = x
        done += 1
        used_at[done] = first + count
        alive[x] = False
        left -= 1
        if width > 0:
            new = factors
            factors += 1
            usable[new] = True
            d_at[new] = top
            s_all = _grown(s_all, s_at[new] + width)
            for j in range(width):
                s_all[s_at[new] + j] = out[j]
            s_at[new + 1] = s_at[new] + width
            link_factor = _grown(link_factor, links + width)
            link_next = _grown(link_next, links + width)
            for j in range(width):
                link_factor[links] = new
                link_next[links] = head[out[j]]
                head[out[j]] = links
                links += 1
            top += entries
        for j in range(width):  # remove x from its neighbors and connect them with each other
            v = out[j]
            stamp += 1
            mark[v] = stamp
            spot = -1
            for k in range(near_at[v], near_at[v] + near_count[v]):
                mark[pool[k]] = stamp
                if pool[k] == x:
                    spot = k
            near_count[v] -= 1
            pool[spot] = pool[near_at[v] + near_count[v]]
            load[v] -= weight[x]
            for i in range(width):
                u = out[i]
                if mark[u] != stamp:
                    if near_count[v] == near_room[v]:
                        pool = _grown(pool, pool_top + 2 * near_room[v])
                        begin = near_at[v]
                        for k in range(near_count[v]):
                            pool[pool_top + k] = pool[begin + k]
                        near_at[v] = pool_top
                        near_room[v] *= 2
                        pool_top += near_room[v]
                    pool[near_at[v] + near_count[v]] = u
                    near_count[v] += 1
                    load[v] += weight[u]
            heapq.heappush(heap, (load[v], v))
    _backtrack(sizes, s_at, s_all, d_at, data, order[:done], used_at, used, choice)
