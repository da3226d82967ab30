"""Seeded random problems for the tests of the searches."""

import dataclasses
import math

import numpy as np

from planner.search import Edge, Problem, Usage, brute


def random_problem(seed: int, *, tight: bool = False, forbidden: float = 0.0) -> Problem:
    """Up to 7 nodes of up to 4 strategies, with parallel edges, ties and several usages."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    sizes = [int(rng.integers(1, 5)) for _ in range(count)]
    edges: list[Edge] = []
    for i in range(count):
        for j in range(i + 1, count):
            for _ in range(int(rng.random() < 0.5) + int(rng.random() < 0.1)):
                table = rng.uniform(0, 1, (sizes[i], sizes[j]))
                if rng.random() < 0.2 and sizes[i] == sizes[j]:
                    match = np.eye(sizes[i])[rng.permutation(sizes[i])]
                    table = np.where(match > 0, 0.1, np.inf)
                table = np.where(rng.random(table.shape) < forbidden, 1e18, table)
                flip = rng.random() < 0.5
                edges.append(Edge(j, i, table.T.copy()) if flip else Edge(i, j, table))
    usages: list[Usage] = []
    for node in range(count):
        for _ in range(int(rng.integers(0, 3))):
            start = int(rng.integers(0, 10))
            taken = rng.integers(0, 20, sizes[node]).astype(float)
            usages.append(Usage(node, start, start + int(rng.integers(1, 6)), taken))
    problem = Problem(
        names=tuple(f"op{node}" for node in range(count)),
        cost_s=tuple(rng.uniform(0, 1, size) for size in sizes),
        edges=tuple(edges),
        usages=tuple(usages),
        limit_bytes=math.inf,
        levels=tuple(rng.integers(0, 3, (size, 2)) for size in sizes),
    )
    if tight:
        limit = float(brute(problem).peak_bytes * rng.uniform(0.4, 1.0))
        problem = dataclasses.replace(problem, limit_bytes=limit)
    return problem


def layered_problem(layers: int, per: int, size: int, *, seed: int = 0) -> Problem:
    """A ladder of equal layers that share their table objects; edges depend on a few layouts."""
    rng = np.random.default_rng(seed)
    costs = [rng.uniform(0, 1, size) for _ in range(per)]
    taken = [rng.integers(1, 100, size).astype(float) for _ in range(per)]
    codes = [rng.integers(0, 3, (size, 3)) for _ in range(per)]
    tables: dict[tuple[int, int], np.ndarray] = {}
    few = max(3, size // 5)
    for at in range(per):
        for step in (1, 2):
            rows, columns = rng.integers(0, few, size), rng.integers(0, few, size)
            tables[at, step] = rng.uniform(0, 1, (few, few))[rows][:, columns]
    count = layers * per
    return Problem(
        names=tuple(f"op{node}" for node in range(count)),
        cost_s=tuple(costs[node % per] for node in range(count)),
        edges=tuple(
            Edge(node, node + step, tables[node % per, step])
            for node in range(count)
            for step in (1, 2)
            if node + step < count
        ),
        usages=tuple(
            Usage(node, node, min(count, node + per), taken[node % per]) for node in range(count)
        ),
        limit_bytes=math.inf,
        levels=tuple(codes[node % per] for node in range(count)),
    )
