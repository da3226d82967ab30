"""A looser memory limit never leads to a costlier plan, and work is counted, not timed."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from planner.search import SEARCHES, Edge, Problem, Usage
from planner.search.anytime import rounds as anytime
from planner.search.exact.reduction import reduce_problem
from tests.planner.search.search_cases import random_problem

SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)


def medium_problem(seed: int, count: int, size: int) -> Problem:
    """Too many combinations to try them all; a random band of edges, one usage per node."""
    rng = np.random.default_rng(seed)
    pairs = [(i, j) for i in range(count) for j in range(i + 1, min(count, i + 5))]
    edges = tuple(Edge(i, j, rng.random((size, size))) for i, j in pairs if rng.random() < 0.5)
    starts = rng.integers(0, count, count)
    usages = tuple(
        Usage(i, int(at), int(at + rng.integers(2, count // 2)), rng.uniform(1, 100, size))
        for i, at in enumerate(starts)
    )
    costs = tuple(rng.random(size) for _ in range(count))
    return Problem(tuple(map(str, range(count))), costs, edges, usages, np.inf)


def check(problem: Problem, search: str, time_limit_s: float) -> None:
    top = SEARCHES["recursive_programming"](problem).peak_bytes
    cheapest = np.inf
    for share in SHARES:
        limited = dataclasses.replace(problem, limit_bytes=share * top)
        found = SEARCHES[search](limited, time_limit_s=time_limit_s)
        if found.feasible:
            assert found.cost_s <= cheapest * (1 + 1e-9), share
            cheapest = found.cost_s
        else:
            assert cheapest == np.inf, share


@pytest.mark.long
@pytest.mark.parametrize("search", sorted(SEARCHES))
def test_a_looser_limit_is_no_costlier(search: str) -> None:
    for seed in range(6):
        check(random_problem(seed), search, 10.0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_a_looser_limit_is_no_costlier_for_the_fast_search(seed: int) -> None:
    check(medium_problem(seed, 24, 6), "recursive_programming", 30.0)


@pytest.mark.long
def test_an_effort_gives_the_same_answer_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dataclasses.replace(medium_problem(0, 60, 8), limit_bytes=900.0)
    options = {"time_limit_s": 300.0, "effort_s": 0.05}
    first = SEARCHES["dynamic_programming"](problem, **options)
    assert "rounds done" in first.reason
    now, begun = time.monotonic, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: begun + 8 * (now() - begun))
    second = SEARCHES["dynamic_programming"](problem, **options)
    assert (second.choice, second.reason) == (first.choice, first.reason)


@pytest.mark.long
def test_rounds_go_on_until_the_time_is_up_or_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anytime, "IDLE", 5)
    problem = dataclasses.replace(medium_problem(1, 60, 8), limit_bytes=900.0)
    reduction, begun = reduce_problem(problem, keep_memory=True), time.monotonic()
    found = anytime.anytime(reduction, begun + 4.0, begun, threads=1)
    assert found.reason in ("out of time", "the bound meets the cost")
