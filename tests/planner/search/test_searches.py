"""Every search through one certificate, against brute force."""

import dataclasses
import math

import numpy as np
import pytest

from planner.search import SEARCHES, Edge, Problem, Solution, Usage, brute, evaluate, lower_bound
from tests.planner.search.search_cases import layered_problem, random_problem

EXACT = ("auto", "brute", "dynamic_programming", "ilp")
SEEDS = {
    "auto": 200,
    "brute": 60,
    "dynamic_programming": 300,
    "ilp": 60,
    "recursive_programming": 150,
}


def certify(problem: Problem, solution: Solution) -> None:
    """What every solution must satisfy, whatever found it."""
    cost, peak, moment = evaluate(problem, solution.choice)
    assert (solution.cost_s, solution.peak_bytes, solution.peak_moment) == (cost, peak, moment)
    within = peak <= problem.limit_bytes * (1 + 1e-12)
    assert solution.feasible == (math.isfinite(cost) and within)
    assert solution.reason and solution.search and solution.wall_s >= 0
    if solution.feasible:
        assert solution.lower_bound_s <= solution.cost_s and solution.gap >= 0
    else:
        assert not solution.proved


def close(left: float, right: float) -> bool:
    """Equal up to rounding."""
    return left == pytest.approx(right, rel=1e-8, abs=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", SEARCHES)
def test_without_a_limit(name: str) -> None:
    for seed in range(SEEDS[name]):
        problem = random_problem(seed, forbidden=0.15 * (seed % 3))
        best, found = brute(problem), SEARCHES[name](problem)
        certify(problem, found)
        if not best.feasible:
            assert not found.feasible
            continue
        assert found.lower_bound_s <= best.cost_s + 1e-9
        if name in EXACT:
            assert found.feasible and found.proved and close(found.cost_s, best.cost_s), seed
        elif found.feasible:
            assert found.cost_s >= best.cost_s - 1e-9


@pytest.mark.long
@pytest.mark.parametrize("part", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SEARCHES)
def test_under_a_tight_limit(name: str, part: int) -> None:
    for seed in range(SEEDS[name] // part):
        problem = random_problem(seed, tight=True, forbidden=0.1 * (seed % 2))
        best, found = brute(problem), SEARCHES[name](problem)
        certify(problem, found)
        if not best.feasible:
            assert not found.feasible
            continue
        assert found.lower_bound_s <= best.cost_s + 1e-9, seed
        if name in ("auto", "brute", "dynamic_programming", "ilp"):
            assert found.proved and close(found.cost_s, best.cost_s), seed
        elif found.feasible:
            assert found.cost_s >= best.cost_s - 1e-9


@pytest.mark.parametrize("name", SEARCHES)
def test_too_little_memory_is_reported(name: str) -> None:
    cost = np.array([1.0, 2.0])
    problem = Problem(
        ("a", "b"),
        (cost, cost),
        (Edge(0, 1, np.array([[0.0, 1.0], [1.0, 0.0]])),),
        (Usage(0, 0, 5, np.array([40.0, 20.0])), Usage(1, 3, 9, np.array([40.0, 20.0]))),
        30.0,
    )
    found = SEARCHES[name](problem)
    certify(problem, found)
    assert not found.feasible and "10" in found.reason
    if name != "ilp":
        assert found.peak_bytes == 40.0 and found.peak_moment == 3


@pytest.mark.parametrize("name", SEARCHES)
def test_contradicting_forbidden_costs_are_reported(name: str) -> None:
    cost = np.array([1.0, 2.0])
    problem = Problem(("a", "b"), (cost, cost), (Edge(0, 1, np.full((2, 2), 1e18)),), (), math.inf)
    found = SEARCHES[name](problem)
    certify(problem, found)
    assert not found.feasible and math.isinf(found.cost_s) and "forbidden" in found.reason


@pytest.mark.long
@pytest.mark.parametrize("name", SEARCHES)
def test_runs_are_identical(name: str) -> None:
    problem = random_problem(11, tight=True)
    if name in ("dynamic_programming", "recursive_programming", "auto"):
        problem = layered_problem(3, 6, 8)
        peak = SEARCHES[name](problem).peak_bytes
        problem = dataclasses.replace(problem, limit_bytes=0.9 * peak)
    first, second = (SEARCHES[name](problem, time_limit_s=60.0) for _ in range(2))
    assert dataclasses.replace(first, wall_s=0.0) == dataclasses.replace(second, wall_s=0.0)


def test_shared_layers_give_the_unshared_answer() -> None:
    problem = layered_problem(6, 9, 12)
    search = SEARCHES["dynamic_programming"]
    shared, alone = search(problem), search(problem, share=False)
    assert shared.proved and alone.proved and close(shared.cost_s, alone.cost_s)


def test_a_ladder_is_solved_exactly_and_bounded() -> None:
    problem = layered_problem(4, 12, 20)
    best = SEARCHES["dynamic_programming"](problem)
    certify(problem, best)
    assert best.proved
    other = SEARCHES["recursive_programming"](problem)
    certify(problem, other)
    assert other.lower_bound_s <= best.cost_s + 1e-9 <= other.cost_s + 2e-9
    assert lower_bound(problem) <= best.cost_s + 1e-9


@pytest.mark.long
def test_a_binding_limit_on_a_ladder() -> None:
    problem = layered_problem(3, 6, 6)
    peak = SEARCHES["dynamic_programming"](problem).peak_bytes
    problem = dataclasses.replace(problem, limit_bytes=0.8 * peak)
    priced, exact = SEARCHES["dynamic_programming"](problem), SEARCHES["ilp"](problem)
    certify(problem, priced)
    certify(problem, exact)
    assert priced.feasible and exact.proved
    assert priced.lower_bound_s <= exact.cost_s * (1 + 1e-9) <= priced.cost_s * (1 + 2e-9)


@pytest.mark.long
def test_a_graph_too_wide_to_eliminate() -> None:
    rng = np.random.default_rng(5)
    count, size = 14, 8
    edges = tuple(
        Edge(i, j, rng.uniform(0, 1, (size, size)))
        for i in range(count)
        for j in range(i + 1, count)
    )
    costs = tuple(rng.uniform(0, 1, size) for _ in range(count))
    problem = Problem(tuple(f"n{i}" for i in range(count)), costs, edges, (), math.inf)
    for name in ("dynamic_programming", "auto"):
        found = SEARCHES[name](problem, time_limit_s=1.0)
        certify(problem, found)
        assert found.feasible and lower_bound(problem) <= found.lower_bound_s + 1e-9


def test_brute_refuses_large_problems() -> None:
    with pytest.raises(ValueError, match="combinations"):
        brute(layered_problem(2, 6, 8))
