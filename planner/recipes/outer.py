"""Which recipe: a walk along the border of what fits.

Recipes are a grid: microbatches by rematerialization. More of either takes less memory and costs
more: done again, gathered again. So the cheapest that fit lie on a staircase; for each number of
microbatches it is the least rematerialization that fits, found by bisection, and its neighbors,
since what takes less memory may fit on a better mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from planner.request.recipe import Recipe

WORTH = 1.01
"""A recipe that rewrites more must be faster by this."""
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What planning found for a recipe.

    Attributes:
        cost_s: seconds of the best plan; infinite where none was found that fits.
        found: the plan, as the caller has it.
    """

    cost_s: float
    found: T


Look = Callable[[Recipe], Outcome[T]]


@dataclass(eq=False)
class _Grid(Generic[T]):
    counts: Sequence[int]
    policies: Sequence[str]
    look: Look[T]
    seen: dict[Recipe, Outcome[T]] = field(default_factory=dict)

    def cost(self, i: int, j: int) -> float:
        recipe = Recipe(self.counts[i], self.policies[j])
        if recipe not in self.seen:
            self.seen[recipe] = self.look(recipe)
        return self.seen[recipe].cost_s

    def least_that_fits(self, i: int, most: int) -> int | None:
        """The first policy that fits, if ``most`` does."""
        low, high = 0, most
        if math.isinf(self.cost(i, most)):
            return None
        while low < high:
            middle = (low + high) // 2
            if math.isinf(self.cost(i, middle)):
                low = middle + 1
            else:
                high = middle
        return high


def search_recipes(
    counts: Sequence[int],
    policies: Sequence[str],
    look: Look[T],
    floor_s: Callable[[Recipe], float] = lambda _: 0.0,
) -> tuple[Recipe, dict[Recipe, Outcome[T]]]:
    """The recipe whose plan is predicted fastest.

    Args:
        counts: numbers of microbatches, from 1 up.
        policies: of rematerialization, from what frees least.
        look: plans a recipe.
        floor_s: seconds below which no plan of a recipe can be; saves looks.

    Returns:
        The best recipe (of equal ones the one that rewrites least), and all that were looked at.
    """
    grid = _Grid(counts, policies, look)
    best, best_s = Recipe(counts[0], policies[0]), math.inf
    most = len(policies) - 1

    def offer(i: int, j: int) -> bool:
        nonlocal best, best_s
        recipe = Recipe(counts[i], policies[j])
        if floor_s(recipe) * WORTH >= best_s:
            return False
        cost = grid.cost(i, j)
        better = cost * (WORTH if math.isfinite(best_s) else 1.0) < best_s
        if better:
            best, best_s = recipe, cost
        return better

    for i in range(len(counts)):
        j = grid.least_that_fits(i, most)
        if j is None:
            continue
        improved = offer(i, j)
        k = j + 1
        while k < len(policies) and offer(i, k):
            improved, k = True, k + 1
        most = j
        if j == 0 or (not improved and math.isfinite(best_s)):
            break
    return best, grid.seen
