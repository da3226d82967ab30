"""The least memory peak, and plans near it."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from planner.search import Edge, Problem, Usage, brute, evaluate
from planner.search.local.memory_limit import least_memory
from tests.planner.search.search_cases import random_problem


def tried(problem: Problem) -> float:
    """The least peak of all choices, one after the other."""
    choices = itertools.product(*(range(cost.size) for cost in problem.cost_s))
    found = (evaluate(problem, choice) for choice in choices)
    return min((peak for cost, peak, _ in found if math.isfinite(cost)), default=math.inf)


@pytest.mark.long
@pytest.mark.parametrize("forbidden", [0.0, 0.1])
def test_least_memory_is_never_below_its_bound_nor_the_truth(forbidden: float) -> None:
    exact = 0
    for seed in range(60):
        problem = random_problem(seed, forbidden=forbidden)
        if math.prod(cost.size for cost in problem.cost_s) > 500:
            continue
        least = tried(problem)
        if math.isinf(least):
            with pytest.raises(ValueError, match="no choice avoids"):
                least_memory(problem)
            continue
        found = least_memory(problem)
        cost, peak, moment = evaluate(problem, found.choice)
        assert math.isfinite(cost)
        assert (found.peak_bytes, found.peak_moment) == (peak, moment)
        assert found.lower_bytes <= least * (1 + 1e-9) and least <= found.peak_bytes
        exact += found.peak_bytes == least
    assert exact >= 25


def test_least_memory_reaches_a_peak_that_costs_hide() -> None:
    cheap, small = np.array([0.0, 9.0, 9.0]), np.array([30.0, 20.0, 10.0])
    usages = tuple(Usage(node, 0, 2, small) for node in range(4))
    free = np.zeros((3, 3))
    edges = tuple(Edge(node, node + 1, free) for node in range(3))
    problem = Problem(tuple("abcd"), (cheap,) * 4, edges, usages, 1e9)
    found = least_memory(problem)
    assert found.choice == (2, 2, 2, 2)
    assert found.peak_bytes == found.lower_bytes == 40 and found.proved
    tight = dataclasses.replace(problem, limit_bytes=found.peak_bytes)
    assert brute(tight).feasible
    assert not brute(dataclasses.replace(problem, limit_bytes=39.9)).feasible


def test_least_memory_where_a_choice_needs_none() -> None:
    usage = Usage(0, 0, 3, np.array([5.0, 0.0]))
    found = least_memory(Problem(("a",), (np.array([1.0, 2.0]),), (), (usage,), 5.0))
    assert (found.choice, found.peak_bytes) == ((1,), 0)


def test_least_memory_without_usages() -> None:
    problem = Problem(("a",), (np.zeros(2),), (), (), 5.0)
    found = least_memory(problem)
    assert found.peak_bytes == found.lower_bytes == 0 and found.proved
