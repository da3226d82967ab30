"""The evaluator, the checks and the contest form."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search import (
    Edge,
    Problem,
    Solution,
    Usage,
    Verdict,
    brute,
    evaluate,
    memory_profile,
    read_iopddl,
    verify,
    write_iopddl,
)
from planner.search.exact.reduction import reduce_problem
from planner.search.local.memory import MemoryTimeline
from tests.planner.search.search_cases import random_problem


def naive(problem: Problem, choice: list[int]) -> tuple[float, float, int]:
    """The definition, moment by moment."""
    cost = sum(float(c[s]) for c, s in zip(problem.cost_s, choice, strict=True))
    for edge in problem.edges:
        entry = float(edge.cost_s[choice[edge.a], choice[edge.b]])
        cost += math.inf if entry >= 1e18 else entry
    moments = range(min((u.start for u in problem.usages), default=0), 20)
    live = [
        sum(float(u.bytes[choice[u.node]]) for u in problem.usages if u.start <= t < u.end)
        for t in moments
    ]
    return cost, max(live), moments[live.index(max(live))]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_evaluate_is_the_definition(seed: int, random: object) -> None:
    problem = random_problem(seed, forbidden=0.05)
    rng = np.random.default_rng(seed)
    choice = [int(rng.integers(0, cost.size)) for cost in problem.cost_s]
    cost, peak, moment = evaluate(problem, choice)
    expected = naive(problem, choice)
    assert cost == pytest.approx(expected[0])
    assert (peak, moment) == expected[1:]
    profile = memory_profile(problem, choice)[1]
    assert profile.max() == peak
    assert MemoryTimeline(problem).profile(choice).max(initial=0.0) == peak


def test_reduction_keeps_the_optimum_and_decodes_to_its_cost() -> None:
    for seed in range(150):
        problem = random_problem(seed, tight=bool(seed % 2), forbidden=0.1)
        best = brute(problem)
        reduction = reduce_problem(problem, keep_memory=True)
        if reduction.dead is not None:
            assert math.isinf(best.cost_s)
            continue
        small = brute(reduction.problem)
        assert small.feasible == best.feasible
        cost, peak, _ = evaluate(problem, reduction.decode(small.choice))
        assert cost == pytest.approx(small.cost_s) and peak == pytest.approx(small.peak_bytes)
        if best.feasible:
            assert cost == pytest.approx(best.cost_s)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_contest_form_round_trip(tmp_path: Path, suffix: str) -> None:
    for seed in range(20):
        problem = random_problem(seed, tight=bool(seed % 2), forbidden=0.1)
        path = tmp_path / f"case{seed}{suffix}"
        write_iopddl(problem, path)
        again = read_iopddl(path)
        first, second = brute(problem), brute(again) if small(again) else None
        assert again.limit_bytes == problem.limit_bytes
        if second is not None and first.feasible:
            assert second.cost_s == pytest.approx(first.cost_s)
            count = len(problem.names)
            assert evaluate(problem, second.choice[:count])[1] == second.peak_bytes


def small(problem: Problem) -> bool:
    """Whether brute force takes it."""
    return math.prod(cost.size for cost in problem.cost_s) <= 100_000


def broken() -> list[tuple[Problem, str]]:
    """Malformed problems and a word the error must hold."""
    cost = np.array([1.0, 2.0])
    good = Problem(("a", "b"), (cost, cost), (Edge(0, 1, np.ones((2, 2))),), (), 10.0)
    change = dataclasses.replace
    return [
        (change(good, cost_s=(cost, np.zeros(0))), "node b"),
        (change(good, cost_s=(cost, np.array([1.0, math.nan]))), "node b"),
        (change(good, edges=(Edge(0, 1, np.ones((2, 3))),)), "edge a - b"),
        (change(good, edges=(Edge(0, 1, np.full((2, 2), math.nan)),)), "edge a - b"),
        (change(good, edges=(Edge(0, 0, np.ones((2, 2))),)), r"edge \(0, 0\)"),
        (change(good, edges=(Edge(0, 7, np.ones((2, 2))),)), r"edge \(0, 7\)"),
        (change(good, usages=(Usage(1, 5, 3, cost),)), "node b"),
        (change(good, usages=(Usage(1, 0, 3, -cost),)), "node b"),
        (change(good, usages=(Usage(1, 0, 3, np.ones(3)),)), "node b"),
        (change(good, usages=(Usage(4, 0, 3, cost),)), "node 4"),
        (change(good, limit_bytes=math.nan), "limit"),
        (change(good, levels=(np.zeros((2, 1)), np.zeros((3, 1)))), "node b"),
    ]


@pytest.mark.parametrize(("problem", "word"), broken())
def test_malformed_problems_are_named(problem: Problem, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        verify(problem)


@pytest.mark.parametrize(
    ("cost_s", "lower_s", "feasible", "verdict"),
    [
        (2.0, 2.0, True, Verdict.OPTIMAL),
        (2.0, 1.9, True, Verdict.FEASIBLE),
        (2.0, 1.9, False, Verdict.NOT_FOUND),
        (2.0, -math.inf, False, Verdict.NOT_FOUND),
        (math.inf, math.inf, False, Verdict.IMPOSSIBLE),
    ],
)
def test_verdict(cost_s: float, lower_s: float, feasible: bool, verdict: Verdict) -> None:
    solution = Solution((), cost_s, lower_s, 0.0, 0, feasible, "test", "proved optimal", 0.0)
    assert solution.verdict is verdict
    assert solution.proved == (verdict is Verdict.OPTIMAL)
    assert json.loads(json.dumps(verdict)) == verdict.value
