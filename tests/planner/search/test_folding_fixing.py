"""Folding keeps costs and bounds; fixing never loses the optimum."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from planner.search.exact.fixing import fix_by_bound
from planner.search.folding.folding import fold
from planner.search.problem import Edge, Problem, Usage, evaluate
from planner.search.relax.bound import diffusion_of
from planner.search.searches.brute import brute
from planner.search.searches.dynamic_programming import dynamic_programming
from planner.search.searches.recursive_programming import recursive_programming


def layered(seed: int, layers: int, width: int = 2, strategies: int = 3) -> Problem:
    """A hub with equal layers hanging on it; each layer is a chain of ``width`` nodes."""
    rng = np.random.default_rng(seed)
    costs = [rng.random(strategies) for _ in range(width + 1)]
    tables = [rng.random((strategies, strategies)) for _ in range(width + 1)]
    nodes, edges = [costs[0]], []
    for layer in range(layers):
        first = 1 + layer * width
        for k in range(width):
            nodes.append(costs[k + 1])
            a = 0 if k == 0 else first + k - 1
            edges.append(Edge(a, first + k, tables[k]))
        edges.append(Edge(0, first + width - 1, tables[width]))
    names = tuple(f"n{i}" for i in range(len(nodes)))
    return Problem(names, tuple(nodes), tuple(edges), (), np.inf)


@pytest.mark.parametrize("seed", range(20))
def test_equal_layers_become_one_and_costs_and_bounds_carry_over(seed: int) -> None:
    problem = layered(seed, layers=3)
    folded = fold(problem)
    assert len(folded.problem.cost_s) == 3
    rng = np.random.default_rng(seed)
    small = [int(rng.integers(3)) for _ in range(3)]
    assert evaluate(problem, folded.unfold(small))[0] == pytest.approx(
        evaluate(folded.problem, small)[0]
    )
    optimum = brute(problem).cost_s
    diffusion = diffusion_of(folded.problem)
    diffusion.sweep(20)
    assert float(diffusion.bound()[0]) <= optimum + 1e-9


def test_nodes_that_differ_in_cost_or_surroundings_are_kept_apart() -> None:
    problem = layered(0, layers=3)
    changed = list(problem.cost_s)
    changed[1] = changed[1] + 1.0
    other = Problem(problem.names, tuple(changed), problem.edges, (), np.inf)
    assert len(fold(other).problem.cost_s) == 5


def test_an_edge_between_twins_takes_them_apart() -> None:
    cost = np.array([0.0, 0.5])
    unlike = np.array([[1.0, 0.0], [0.0, 1.0]])
    problem = Problem(("a", "b"), (cost, cost), (Edge(0, 1, unlike),), (), np.inf)
    folded = fold(problem)
    assert len(folded.problem.cost_s) == 2
    assert recursive_programming(problem).cost_s == pytest.approx(0.5)
    assert recursive_programming(problem).lower_bound_s <= 0.5


def test_layers_differ_where_only_that_fits_in_memory() -> None:
    # each layer is cheap and big or dear and small; the limit has room for one big layer
    cost, hub = np.array([0.0, 1.0]), np.array([0.0])
    size = np.array([10.0, 1.0])
    edges = tuple(Edge(0, k, np.zeros((1, 2))) for k in (1, 2))
    usages = tuple(Usage(k, 0, 2, size) for k in (1, 2))
    problem = Problem(("hub", "x", "y"), (hub, cost, cost), edges, usages, 12.0)
    assert len(fold(problem).problem.cost_s) == 2
    best = dynamic_programming(problem)
    assert best.feasible
    assert best.cost_s == brute(problem).cost_s == 1.0


@pytest.mark.parametrize("seed", range(40))
def test_fixing_keeps_every_choice_that_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, 6)
    pairs = [(i, j) for i in range(6) for j in range(i + 1, 6) if rng.random() < 0.5]
    problem = Problem(
        tuple(f"n{i}" for i in range(6)),
        tuple(rng.random(n) for n in sizes),
        tuple(Edge(i, j, rng.random((sizes[i], sizes[j]))) for i, j in pairs),
        (),
        np.inf,
    )
    best = brute(problem)
    lower, kept = fix_by_bound(problem, best.cost_s * 1.01, sweeps=6)
    assert lower <= best.cost_s + 1e-9
    assert all(c in k for c, k in zip(best.choice, kept, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_many_equal_layers_are_solved_to_proof(seed: int) -> None:
    problem = layered(seed, layers=30, width=3, strategies=4)
    found = dynamic_programming(problem)
    exact = dynamic_programming(layered(seed, layers=3, width=3, strategies=4))
    assert found.gap <= 1e-6
    assert found.lower_bound_s <= found.cost_s + 1e-9
    assert exact.proved


def test_all_choices_of_a_quotient_are_no_proof_for_the_whole() -> None:
    """Two equal nodes, the fast strategy of 3 bytes and the slow one of 1 under a limit of 4: one
    of the two can be fast, and the quotient has no such choice."""
    usages = tuple(Usage(node, 0, 1, np.array([3.0, 1.0])) for node in range(2))
    whole = Problem(("a", "b"), (np.array([1.0, 5.0]),) * 2, (), usages, 4.0)
    quotient = fold(whole).problem
    assert quotient.counts == (2,)
    optimum, found = brute(whole), recursive_programming(quotient)
    assert (optimum.cost_s, found.cost_s) == (6.0, 10.0)
    assert found.lower_bound_s <= optimum.cost_s
    assert recursive_programming(whole).lower_bound_s == optimum.cost_s
    tighter = dataclasses.replace(quotient, limit_bytes=1.0)
    assert not recursive_programming(tighter).feasible
    assert recursive_programming(tighter).lower_bound_s < np.inf
