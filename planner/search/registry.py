"""The registry of searches: the only place that lists them.

Adding a search takes one file with one function in ``planner/search/searches/`` and one row in
``SEARCHES``. The choices of the command line, the error texts and the parallel modes follow. A
search with a role in choosing a mesh is also named in ``FAST``, ``QUICK`` or ``WHOLE``.

``sharding_propagation`` (``planner.modes.PROPAGATION``) has no row: it is a request, not a search.
It raises the price of every reshard that goes into a problem and runs ``FAST`` on the result. A
bare problem holds no reshards, so this can't be a function from a problem to a solution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Protocol

from planner.search.problem import Problem, Solution
from planner.search.searches.auto import auto
from planner.search.searches.brute import brute
from planner.search.searches.dynamic_programming import dynamic_programming
from planner.search.searches.ilp import ilp
from planner.search.searches.recursive_programming import recursive_programming


class Search(Protocol):
    """A search: a problem in, a solution out.

    Besides ``time_limit_s`` it may take any of ``OPTIONS``, and other options with a default.
    """

    def __call__(self, problem: Problem, *, time_limit_s: float = ...) -> Solution:
        """Solve ``problem`` within ``time_limit_s`` seconds."""
        ...


OPTIONS = ("seed", "threads", "effort_s")
"""Options that callers may pass to a search that takes them: the seed of its random numbers; the
processors it may use; the counted work after which it stops, in seconds of one processor of 2020.
"""

SEARCHES: dict[str, Search] = {
    "auto": auto,
    "brute": brute,
    "dynamic_programming": dynamic_programming,
    "ilp": ilp,
    "recursive_programming": recursive_programming,
}
"""All searches by name."""

FAST = "recursive_programming"
"""The search that compares meshes and serves advice and explanations. It has a reparametrization
bound: computed on a quotient, it holds for the whole step. Bounds of other searches don't."""
QUICK = frozenset({"auto"})
"""Searches that take the answer of ``FAST``: on a given mesh, if its bound proves it; in a
comparison of meshes, if no plan can be faster by more than the margin of the comparison."""
WHOLE = frozenset({"ilp", "brute"})
"""Searches that run on the whole step: their proofs of optimality on a quotient do not hold for
it."""


def options_of(name: str) -> tuple[str, ...]:
    """Which of ``OPTIONS`` a search takes."""
    taken = inspect.signature(SEARCHES[name]).parameters
    return tuple(option for option in OPTIONS if option in taken)


def solve(
    name: str, problem: Problem, time_limit_s: float, options: Mapping[str, float]
) -> Solution:
    """Run a search by name.

    Args:
        name: one of ``SEARCHES``.
        problem: the problem.
        time_limit_s: seconds to stop after.
        options: some of ``OPTIONS``; those that the search does not take are dropped.

    Raises:
        ValueError: the problem is malformed, or too large for the search.
    """
    search: Callable[..., Solution] = SEARCHES[name]
    taken = options_of(name)
    return search(
        problem,
        time_limit_s=time_limit_s,
        **{option: value for option, value in options.items() if option in taken},
    )
