"""Corners of the searches: zero limits, forbidden choices, time that is up, small components."""

import dataclasses
import math
import time
from typing import Any

import numpy as np
import pytest

from planner.search import SEARCHES, Edge, Problem, Usage, brute
from planner.search.anytime import leftover
from planner.search.anytime.incumbent import Incumbent
from planner.search.anytime.integer import Answer, solve_integer
from planner.search.anytime.leftover import Program
from planner.search.anytime.rounds import Walker, anytime
from planner.search.exact.reduction import ReducedProblem, reduce_problem
from planner.search.progress import Monitor, monitored
from planner.search.relax.dual import Choice, Dual, ascend
from planner.search.relax.flat import FlatProblem, flatten
from planner.search.relax.trws import Messages
from tests.planner.search.search_cases import layered_problem


def problem_of(
    costs: list[list[float]],
    edges: dict[tuple[int, int], list[list[float]]],
    taken: list[list[float]],
    limit: float,
) -> Problem:
    """A problem whose usages are all live at one moment."""
    return Problem(
        names=tuple(f"n{node}" for node in range(len(costs))),
        cost_s=tuple(np.array(cost) for cost in costs),
        edges=tuple(Edge(a, b, np.array(table)) for (a, b), table in edges.items()),
        usages=tuple(Usage(node, 0, 1, np.array(row)) for node, row in enumerate(taken)),
        limit_bytes=limit,
    )


def searched(problem: Problem, seconds: float = 10.0, threads: int = 1) -> tuple[float, bool]:
    """Bound and feasibility that the anytime search finds."""
    begun = time.monotonic()
    reduction = reduce_problem(problem, keep_memory=True)
    found = anytime(reduction, begun + seconds, begun, threads=threads)
    return found.lower_s, found.feasible


@pytest.mark.filterwarnings("error")
def test_a_limit_of_zero() -> None:
    same = [[0.0, 1.0], [1.0, 0.5]]
    problem = problem_of([[0.0, 0.0]] * 2, {(0, 1): same}, [[0.0, 5.0]] * 2, 0.0)
    assert searched(problem) == (0.0, True)
    other = problem_of([[1.0, 1.0]] * 2, {(0, 1): same[::-1]}, [[0.0, 5e9]] * 2, 0.0)
    assert searched(other) == (3.0, True)


@pytest.mark.filterwarnings("error")
def test_no_choice_is_allowed_and_memory_binds() -> None:
    """Four nodes, three colours, no two alike."""
    unlike = np.where(np.eye(3) > 0, math.inf, np.arange(9.0).reshape(3, 3)).tolist()
    edges = {(a, b): unlike for a in range(4) for b in range(a + 1, 4)}
    problem = problem_of([[0.0, 1.0, 2.0]] * 4, edges, [[5.0, 3.0, 0.0]] * 4, 10.0)
    assert searched(problem) == (math.inf, False)


def test_nothing_to_decide_and_nothing_fits() -> None:
    problem = problem_of([[0.0, 1.0], [2.0, 0.0]], {}, [[3.0, 4.0], [4.0, 3.0]], 5.0)
    assert searched(problem) == (math.inf, False)


def test_an_infeasible_choice_as_cheap_as_the_bound_is_no_proof() -> None:
    """Any choice costs nothing; the least peak is not proved by its dual bound alone."""
    rows = [[3.0, 5.0, 0.0], [0.0, 0.0, 3.0]]
    usages = [Usage(0, at, at + 1, np.array(row)) for at, row in zip((0, 2), rows, strict=True)]
    usages += [Usage(1, at, at + 1, np.array([2.0, 2.0, 3.0])) for at in (0, 2)]
    tie = np.ones((3, 3)) - np.ones((3, 3))
    problem = Problem(("a", "b"), (np.zeros(3), np.zeros(3)), (Edge(0, 1, tie),), (), math.inf)
    problem = dataclasses.replace(problem, usages=tuple(usages), limit_bytes=4.5)
    assert not brute(problem).feasible
    found = SEARCHES["dynamic_programming"](problem)
    assert not found.feasible and found.lower_bound_s == math.inf


@pytest.mark.long
def test_the_ascent_goes_on_where_choices_are_forbidden() -> None:
    """A choice with an infinite cost is a point of the ascent like any other."""
    problem = problem_of([[0.0, 2.0]], {}, [[6.0, 1.0]], 3.0)
    memory = flatten(problem).memory

    def oracle(prices: np.ndarray) -> tuple[float, Choice]:
        priced = problem.cost_s[0] + prices
        return float(priced.min()), [int(priced.argmin())]

    def ascended(forbidden: int, upper: float) -> Dual:
        return ascend(
            oracle,
            lambda choice: math.inf if choice[0] == forbidden else float(2 * choice[0]),
            lambda choice, _: 2.0 if choice[0] == 1 else upper,
            memory,
            3.0,
            oracle(np.zeros(2)),
            time.monotonic() + 10,
        )

    for forbidden in (-1, 0, 1):
        for upper in (2.0, math.inf):
            assert ascended(forbidden, upper).value == pytest.approx(1.2, abs=1e-3)


def test_no_round_of_the_ascent_is_begun_that_would_pass_the_deadline() -> None:
    problem = problem_of([[0.0, 2.0]], {}, [[6.0, 1.0]], 3.0)

    def oracle(prices: np.ndarray) -> tuple[float, Choice]:
        time.sleep(0.3)
        priced = problem.cost_s[0] + prices
        return float(priced.min()), [int(priced.argmin())]

    begun = time.monotonic()
    start, memory = (0.0, [0]), flatten(problem).memory
    ascend(oracle, lambda _: 1.0, lambda *_: 99.0, memory, 3.0, start, begun + 0.5)
    assert time.monotonic() - begun < 0.5


def test_sweeps_stop_when_it_is_over() -> None:
    flat = flatten(reduce_problem(layered_problem(6, 5, 8), keep_memory=True).problem)
    few, stopped = Messages(flat), Messages(flat)
    few.sweep(1)
    stopped.sweep(10**9, lambda: True)
    assert few.bound() == stopped.bound()


def test_many_small_components_are_held_quickly() -> None:
    count = 20_000
    pair = np.array([[0.0, 1.0], [1.0, 0.5]])
    edges = tuple(Edge(at, at + 1, pair) for at in range(0, count, 2))
    costs = tuple(np.zeros(2) for _ in range(count))
    flat = flatten(Problem(("n",) * count, costs, edges, (), math.inf))
    walker = Walker(flat, 0)
    walker.held(0.3)
    begun = time.monotonic()
    held = walker.held(0.3)
    assert np.count_nonzero(~held) == round(0.3 * count)
    assert time.monotonic() - begun < 0.2
    assert np.count_nonzero(held[::2] == held[1::2]) >= count // 2 - 1


def program_of(problem: Problem, seconds: float) -> tuple[Program, Incumbent]:
    """The integer program beside a search that has found nothing yet."""
    reduction = reduce_problem(problem, keep_memory=True)
    flat = flatten(reduction.problem)
    best, messages = Incumbent(flat, time.monotonic(), Monitor()), Messages(flat)
    messages.sweep(2)
    dual = Dual(messages.bound(), np.zeros(flat.unary.size), 0.0, (), "")
    return Program(best, reduction, messages, dual, time.monotonic() + seconds), best


def test_what_fixing_left_is_reduced_once_per_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def slow(*arguments: Problem, **options: list[np.ndarray]) -> ReducedProblem:
        calls.append(1)
        time.sleep(0.3)
        return reduce_problem(arguments[0], keep_memory=True, domains=options["domains"])

    monkeypatch.setattr(leftover, "reduce_problem", slow)
    monkeypatch.setattr(leftover, "SMALL", 0)
    program, best = program_of(layered_problem(6, 5, 8), 60.0)
    program.start()
    assert not calls  # nothing was found: nothing goes
    best.offer(np.zeros(best.flat.nodes, np.int64), "")
    for _ in range(3):
        program._next = 0.0
        program.start()
    assert len(calls) == 1 and not program.running
    program.deadline, best.cost, program._next = time.monotonic() + 0.4, best.cost * 0.99, 0.0
    program.start()
    assert len(calls) == 1  # it would pass the deadline


def test_an_interrupt_ends_the_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(Monitor):
        """Ctrl-C at the first question."""

        def should_stop(self) -> bool:
            raise KeyboardInterrupt

    def ascended(best: Incumbent, messages: Messages, *_: object) -> Dual:
        return Dual(messages.bound(), np.zeros(best.flat.unary.size), 0.0, (), "")

    closed = list[bool]()
    monkeypatch.setattr(Program, "close", lambda _: closed.append(True))
    monkeypatch.setattr("planner.search.anytime.rounds._ascend", ascended)
    reduction, begun = reduce_problem(layered_problem(8, 5, 10), keep_memory=True), time.monotonic()
    with pytest.raises(KeyboardInterrupt), monitored(Interrupting()):
        anytime(reduction, begun + 60, begun)
    assert len(closed) == 1


def test_a_repair_whose_moves_are_all_refused_ends_quickly() -> None:
    """Whatever a node saves at one moment it takes at the other, and both are too full."""
    count, taken = 4000, np.arange(10.0)
    usages = [Usage(node, at, at + 1, row) for node in range(count) for at, row in rows(taken)]
    costs = tuple(np.random.default_rng(0).uniform(0, 1, (count, 10)))
    flat = flatten(Problem(("n",) * count, costs, (), tuple(usages), 4.0 * count))
    walker = Walker(flat, 0)
    choice = walker.rng.integers(0, 10, count)
    walker.settle(choice, lambda: False)
    begun = time.monotonic()
    found = walker.settle(choice, lambda: False)
    assert time.monotonic() - begun < 1.0
    assert flat.memory.profile(found).max() <= flat.memory.profile(choice).max()


def rows(taken: np.ndarray) -> tuple[tuple[int, np.ndarray], tuple[int, np.ndarray]]:
    """Bytes at two moments that add up to the same for every strategy, and a little more."""
    return (0, taken), (1, 9.5 - taken)


def test_edges_that_share_their_costs_are_flattened_once() -> None:
    reduction = reduce_problem(layered_problem(6, 5, 8), keep_memory=True)
    problem = reduction.problem
    flat = flatten(problem)
    assert flat.table.size == sum({id(e.cost_s): e.cost_s.size for e in problem.edges}.values())
    assert flat.table.size < sum(edge.cost_s.size for edge in problem.edges)
    own = [Edge(edge.a, edge.b, edge.cost_s.copy()) for edge in problem.edges]
    apart = flatten(dataclasses.replace(problem, edges=tuple(own)))
    for choice in np.random.default_rng(0).integers(0, flat.sizes, (20, flat.nodes)):
        assert flat.cost(choice) == pytest.approx(apart.cost(choice))
    answers = [solve_integer(each, time.monotonic() + 60) for each in (flat, apart)]
    assert answers[0].lower_s == pytest.approx(answers[1].lower_s)


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
def test_an_integer_program_that_was_cut_off_starts_again(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[float]()

    def cut_off(flat: FlatProblem, deadline: float, *arguments: Any, **options: Any) -> Answer:
        calls.append(deadline)
        if len(calls) == 1:
            return Answer(None, -math.inf, False, "cut off")
        return solve_integer(flat, deadline, *arguments, **options)

    monkeypatch.setattr(leftover, "solve_integer", cut_off)
    free = layered_problem(8, 5, 6, seed=3)
    peak = SEARCHES["dynamic_programming"](free).peak_bytes
    reduction = reduce_problem(dataclasses.replace(free, limit_bytes=0.75 * peak), keep_memory=True)
    begun = time.monotonic()
    found = anytime(reduction, begun + 60, begun, threads=threads)
    assert len(calls) == 2 and found.reason == "the bound meets the cost"
