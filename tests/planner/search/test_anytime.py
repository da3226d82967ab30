"""The anytime search and its parts against brute force and the integer program."""

import dataclasses
import math
import re
import time
from pathlib import Path

import numpy as np
import pytest

from planner.search import SEARCHES, brute, evaluate, read_iopddl
from planner.search.anytime.integer import solve_integer
from planner.search.anytime.rounds import Walker, anytime
from planner.search.exact.reduction import ReducedProblem, reduce_problem
from planner.search.problem import Problem, make_solution
from planner.search.progress import Monitor, monitored
from planner.search.relax.flat import FlatProblem, flatten
from planner.search.relax.trws import Messages
from tests.planner.search.search_cases import layered_problem, random_problem

INSTANCES = Path(__file__).parents[4] / "shared" / "iopddl"


def cases(count: int, *, tight: bool) -> list[tuple[int, ReducedProblem, FlatProblem]]:
    """Reduced random problems that still have something to decide."""
    found = []
    for seed in range(count):
        problem = random_problem(seed, tight=tight, forbidden=0.1 * (seed % 2))
        reduction = reduce_problem(problem, keep_memory=True)
        if reduction.dead is None and flatten(reduction.problem).nodes:
            found.append((seed, reduction, flatten(reduction.problem)))
    assert len(found) > count // 4
    return found


def choices(flat: FlatProblem) -> list[np.ndarray]:
    """Every choice of a flat problem."""
    return [np.array(at) for at in np.ndindex(*flat.sizes.tolist())]


def test_flat_costs_and_peaks_are_those_of_the_problem() -> None:
    for seed, reduction, flat in cases(60, tight=True):
        problem = reduction.problem
        for choice in choices(flat)[:200]:
            cost, peak, _ = evaluate(problem, flat.whole(choice, len(problem.cost_s)))
            assert flat.cost(choice) == pytest.approx(cost), seed
            assert flat.fits(choice) == (peak <= problem.limit_bytes * (1 + 1e-12)), seed


@pytest.mark.long
@pytest.mark.parametrize("count", [30, pytest.param(80, marks=pytest.mark.slow)])
def test_elimination_is_exact_and_keeps_what_is_held(count: int) -> None:
    rng = np.random.default_rng(0)
    for seed, _, flat in cases(count, tight=False):
        walker, everything = Walker(flat, seed), choices(flat)
        start = everything[int(rng.integers(len(everything)))]
        held = rng.random(flat.nodes) < 0.4
        prices = rng.uniform(0, 1, flat.unary.size)
        best = min(
            flat.cost(choice) + prices[flat.at[:-1] + choice].sum()
            for choice in everything
            if (choice[held] == start[held]).all()
        )
        found = walker.solve(start, prices, 1e9, held)
        assert (found[held] == start[held]).all()
        if math.isfinite(best):
            value = flat.cost(found) + prices[flat.at[:-1] + found].sum()
            assert value == pytest.approx(best), seed


@pytest.mark.long
def test_a_capped_elimination_never_loses() -> None:
    problem = layered_problem(6, 5, 8)
    flat = flatten(reduce_problem(problem, keep_memory=True).problem)
    walker = Walker(flat, 0)
    choice = np.zeros(flat.nodes, np.int64)
    for cap in (20.0, 100.0, 1000.0):
        found = walker.solve(choice, np.zeros(flat.unary.size), cap, np.zeros(flat.nodes, bool))
        assert flat.cost(found) <= flat.cost(choice) + 1e-12
        choice = found


@pytest.mark.long
def test_message_bounds_and_least_extra_costs_hold() -> None:
    for seed, _, flat in cases(60, tight=False):
        messages, everything = Messages(flat), choices(flat)
        costs = np.array([flat.cost(choice) for choice in everything])
        if not np.isfinite(costs).any():
            continue
        before = -math.inf
        for _ in range(4):
            messages.sweep(3)
            bound = messages.bound()
            assert bound >= before - 1e-9 and bound <= costs.min() + 1e-9, seed
            before = bound
        for choice, cost in zip(everything, costs, strict=True):
            extra = messages.extra[flat.at[:-1] + choice]
            assert cost >= bound + extra.max() - 1e-9, seed


@pytest.mark.long
@pytest.mark.parametrize("count", [30, pytest.param(80, marks=pytest.mark.slow)])
def test_settling_reaches_the_limit_or_leaves_a_choice(count: int) -> None:
    reached = 0
    for seed, _, flat in cases(count, tight=True):
        walker, rng = Walker(flat, seed), np.random.default_rng(seed)
        start = np.array([int(rng.integers(size)) for size in flat.sizes])
        found = walker.settle(start, lambda: False)
        assert ((found >= 0) & (found < flat.sizes)).all()
        if flat.fits(start):
            assert flat.fits(found) and flat.cost(found) <= flat.cost(start) + 1e-12, seed
        reached += flat.fits(found)
    assert reached > count // 8


@pytest.mark.long
def test_integer_program_writes_the_rows_it_needs() -> None:
    for seed, reduction, flat in cases(60, tight=True):
        best, answer = brute(reduction.problem), solve_integer(flat, time.monotonic() + 30)
        assert answer.finished, seed
        if best.feasible:
            assert answer.choice is not None and flat.fits(answer.choice)
            assert flat.cost(answer.choice) == pytest.approx(best.cost_s), seed
            assert answer.lower_s <= best.cost_s + 1e-6
        else:
            assert answer.choice is None and answer.lower_s == math.inf, seed


def run(problem: Problem, seconds: float, **options: int) -> tuple[tuple[int, ...], float, bool]:
    """The anytime search on a whole problem: choice, bound, feasible."""
    reduction = reduce_problem(problem, keep_memory=True)
    begun = time.monotonic()
    found = anytime(reduction, begun + seconds, begun, **options)
    return reduction.decode(found.choice), found.lower_s, found.feasible


@pytest.mark.long
@pytest.mark.parametrize(
    ("threads", "count"),
    [(1, 15), (2, 15), *(pytest.param(n, 50, marks=pytest.mark.slow) for n in (1, 2))],
)
def test_small_problems_are_proved(threads: int, count: int) -> None:
    for seed, reduction, _ in cases(count, tight=True):
        best = brute(reduction.problem)
        choice, lower, feasible = run(reduction.problem, 20.0, threads=threads)
        assert feasible == best.feasible, seed
        if best.feasible:
            cost = evaluate(reduction.problem, choice)[0]
            assert cost == pytest.approx(best.cost_s) and lower == pytest.approx(cost), seed
        else:
            assert lower == math.inf, seed


def binding(seed: int) -> Problem:
    """A ladder whose cheapest choice passes the limit by a third."""
    free = layered_problem(8, 5, 10, seed=seed)
    peak = SEARCHES["dynamic_programming"](free).peak_bytes
    return dataclasses.replace(free, limit_bytes=0.75 * peak)


@pytest.mark.long
def test_it_agrees_with_the_integer_program_where_memory_binds() -> None:
    problem = binding(3)
    exact = SEARCHES["ilp"](problem, time_limit_s=120.0)
    assert exact.proved
    choice, lower, feasible = run(problem, 120.0, threads=2)
    found = make_solution(problem, choice, lower, "anytime", "", time.monotonic())
    assert feasible and found.proved and found.cost_s == pytest.approx(exact.cost_s)


def test_one_seed_and_one_thread_give_the_same_choice() -> None:
    reduction = reduce_problem(binding(4), keep_memory=True)
    flat = flatten(reduction.problem)
    seen = []
    for _ in range(2):
        walker, choice = Walker(flat, 7), np.zeros(flat.nodes, np.int64)
        for share in (0.1, 0.3, 0.5, 0.1):
            prices = walker.rng.uniform(0, 0.1, flat.unary.size)
            choice = walker.solve(choice, prices, 500.0, walker.held(share))
            choice = walker.settle(choice, lambda: False)
        seen.append(choice)
    assert (seen[0] == seen[1]).all()


def test_it_stops_when_asked_with_the_best_so_far() -> None:
    with monitored(Monitor()) as monitor:
        monitor.stop()
        choice, lower, _ = run(binding(5), 600.0)
    assert len(choice) == 40 and lower < math.inf


@pytest.mark.long
@pytest.mark.skipif(not INSTANCES.is_dir(), reason="needs the public IOPDDL instances")
def test_a_public_instance_is_proved_at_its_known_optimum() -> None:
    problem = read_iopddl(INSTANCES / "asplos-2025-iopddl-B.json.gz")
    found = SEARCHES["dynamic_programming"](problem, time_limit_s=120.0)
    assert found.proved and found.cost_s == 532843


def test_an_effort_is_counted_in_rounds_where_tables_are_small() -> None:
    """A second of effort is 10,000 rounds at most, and at most 10 million entries in all."""
    for _, reduction, flat in cases(20, tight=True)[:5]:
        begun = time.monotonic()
        found = anytime(reduction, begun + 300.0, begun, effort_s=0.01)
        done = re.fullmatch(r"(\d+) rounds done", found.reason)
        entries = flat.table.size + flat.unary.size
        assert done is not None and 50 < int(done[1]) <= 0.01 / (1e-4 + 1e-7 * entries)
