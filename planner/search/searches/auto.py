"""Selects a search by the size of the problem.

Brute force solves problems with few combinations.  Dynamic programming solves all others: by exact
elimination, and by the anytime search if that is too wide.

Complexity: that of the selected search.
Paper: Rice, "The algorithm selection problem", Advances in Computers 15, 1976.
"""

from __future__ import annotations

import dataclasses
import time

from planner.search.problem import Problem, Solution, verify
from planner.search.searches.brute import brute, combinations
from planner.search.searches.dynamic_programming import dynamic_programming

FEW = 50_000
"""Maximum number of combinations for brute force."""


def auto(
    problem: Problem,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    threads: int = 2,
    effort_s: float | None = None,
) -> Solution:
    """Solve a problem with the search that suits it.

    Args:
        problem: the problem.
        time_limit_s: seconds to stop after.
        seed: seed of the random numbers, if the search draws any.
        threads: processors to use, if the search can use several.
        effort_s: counted work to stop after, as in `dynamic_programming`.

    Returns:
        The solution; ``search`` names the selected search and ``reason`` says why it was selected.

    Raises:
        ValueError: if the problem is malformed.
    """
    verify(problem)
    begun = time.monotonic()
    count = combinations(problem)
    if count <= FEW:
        solution, why = brute(problem), f"{count} combinations"
    else:
        left = max(0.1, time_limit_s - (time.monotonic() - begun))
        solution = dynamic_programming(
            problem, time_limit_s=left, seed=seed, threads=threads, effort_s=effort_s
        )
        why = f"more than {FEW} combinations"
    return dataclasses.replace(
        solution,
        search=f"auto:{solution.search}",
        reason=f"{why}; {solution.reason}",
        wall_s=time.monotonic() - begun,
    )
