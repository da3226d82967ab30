"""Searches recipes along the border of those that fit in memory.

Recipes form a grid: microbatches by rematerialization. More of either takes less memory and more
time, for recomputation or repeated gathers. The cheapest recipes that fit therefore lie on a
staircase. For the fewest microbatches that fit at all, bisection gives the least rematerialization
that fits. Each larger number of microbatches is tried if it allows less rematerialization. Beside
the border, a recipe that takes less memory may fit on a better mesh: neighbors are tried while they
are faster. The search ends when no recipe can be much faster than the best so far.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar

from planner.remat.policy import parse_policy
from planner.spec import PLAIN, Recipe

WORTH = 1.01
"""A recipe that rewrites more must be faster by this factor."""
CLOSE = 1.03
"""The search ends within this factor of the lower bound of all recipes."""
FULL = 0.95
"""A plan above this share of the memory counts as filling it: predictions are not that exact. A
plan that leaves more is preferred unless it is slower by more than ``CLOSE``."""
PATIENCE = 2
"""The search stops after this many consecutive recipes that fit and are slower."""
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result of planning a recipe.

    Attributes:
        cost_s: seconds of the best plan found; infinite if there is none of interest.
        fits: whether the recipe may fit, so that its cost alone makes it of no interest.
        found: the plan, in the caller's form.
        bound_s: lower bound of the cost after a longer search.
        floor: memory that every plan takes, as a share of the limit; 0 if it is not known.
        fill: peak of the plan found, likewise.
        refused: why the step can't be rewritten by the recipe; empty if it can.
    """

    cost_s: float
    fits: bool
    found: T
    bound_s: float = math.inf
    floor: float = 0.0
    fill: float = 0.0
    refused: str = ""

    @property
    def too_slow(self) -> bool:
        """Whether its cost alone rules it out, whatever memory it takes."""
        return self.fits and math.isinf(self.cost_s)


Look = Callable[[Recipe, float], Outcome[T]]
"""Plans a recipe; plans that do not cost less than the given seconds are of no interest."""
LeastOf = Callable[[Recipe], float]
"""Lower bound of a recipe's seconds, whatever memory it takes."""


@dataclass(eq=False)
class _Walk(Generic[T]):
    counts: Sequence[int]
    policies: Sequence[str]
    chunks: int
    base: Recipe
    look: Look[T]
    least_of: LeastOf
    least_s: float
    seen: dict[Recipe, Outcome[T]] = field(default_factory=dict)
    best: Recipe | None = None
    best_s: float = math.inf
    free_s: dict[int, float] = field(default_factory=dict)
    stores: bool = False

    @property
    def enough_s(self) -> float:
        """Plans that do not cost less than this are of no interest."""
        full = self.best is not None and self.seen[self.best].fill > FULL
        return self.best_s * CLOSE if full else self.best_s / WORTH

    @property
    def close(self) -> bool:
        """Whether trying more recipes can gain little."""
        return self.best_s <= CLOSE * self.least_s

    def recipe(self, i: int, j: int) -> Recipe:
        """The recipe at a place in the grid."""
        return dataclasses.replace(
            self.base,
            microbatches=self.counts[i],
            remat=self.policies[j],
            chunks=self.chunks,
        )

    def at(self, i: int, j: int) -> bool | None:
        """Try a recipe; returns whether it is the best so far, or None if it does not fit."""
        recipe = self.recipe(i, j)
        if recipe not in self.seen:
            if self.hopeless(recipe):
                return False
            if i + 1 < len(self.counts) and self.too_large(recipe):
                return None
            self.seen[recipe] = self.look(recipe, self.enough_s)
        outcome = self.seen[recipe]
        best = None if self.best is None else self.seen[self.best]
        if outcome.cost_s < math.inf and (best is None or beats(outcome, best)):
            self.best, self.best_s = recipe, outcome.cost_s
            return True
        return False if outcome.fits else None

    def hopeless(self, recipe: Recipe) -> bool:
        """Whether a recipe that rewrites less is already too slow, whatever memory it takes. If
        what loops store takes time, one that recomputes more may be faster."""
        return any(
            o.too_slow or (o.fits and o.bound_s >= self.enough_s)
            for r, o in self.seen.items()
            if _does_more(recipe, r) and not (self.stores and r.remat != recipe.remat)
        )

    def too_large(self, recipe: Recipe) -> bool:
        """Whether a recipe can't fit, given the memory of the same in fewer microbatches.

        At any moment, memory has a constant part and a part proportional to the microbatch size.
        The peak is therefore convex in that size: at least proportional, and at least on the line
        through two other sizes. A single microbatch has no sums of gradients and gives no line.
        """
        fewer = [
            (1.0 / r.microbatches, o.floor)
            for r, o in self.seen.items()
            if r == dataclasses.replace(recipe, microbatches=r.microbatches)
            and r.microbatches < recipe.microbatches
        ]
        size = 1.0 / recipe.microbatches
        least = [floor * size / other for other, floor in fewer]
        lines = itertools.combinations([f for f in fewer if f[0] < 1.0], 2)
        least += [f + (g - f) / (y - x) * (size - x) for (x, f), (y, g) in lines]
        return max(least, default=0.0) > 1.0

    def first_fit(self, i: int) -> int | None:
        """The first policy that fits, by bisection; None if the last one does not fit."""
        low, high = 0, len(self.policies) - 1
        if self.at(i, high) is None:
            return None
        while low < high and not self.close:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.at(i, middle) is None else (low, middle)
        return high

    def climb(self, i: int) -> None:
        """Try the policies beside the best one, on both sides, as long as they are better."""
        for step in (1, -1):
            here = [j for j in range(len(self.policies)) if self.recipe(i, j) == self.best]
            k = here[0] + step if here else -1
            while 0 <= k < len(self.policies) and not self.close and self.at(i, k):
                k += step

    def down(self, i: int, j: int) -> int:
        """Try policies with less rematerialization than ``j``, one by one, while they fit."""
        slower = 0
        while j > 0 and slower < PATIENCE and not self.close:
            is_best = self.at(i, j - 1)
            if is_best is None:
                break
            j, slower = j - 1, 0 if is_best else slower + 1
            looked = self.seen.get(self.recipe(i, j))
            if looked is not None and looked.too_slow and self.in_vain(i):
                return 0
        return j

    def in_vain(self, i: int) -> bool:
        """Whether this number of microbatches alone is too slow, whatever memory it takes."""
        if i not in self.free_s:
            self.free_s[i] = self.least_of(self.recipe(i, 0))
        return self.free_s[i] >= self.enough_s


def search_recipes(
    counts: Sequence[int],
    policies: Iterable[tuple[int, Sequence[str]]],
    look: Look[T],
    base: Recipe = PLAIN,
    least_of: LeastOf = lambda _: 0.0,
    known: tuple[Recipe | None, Mapping[Recipe, Outcome[T]]] = (None, MappingProxyType({})),
    stores: bool = False,
) -> tuple[Recipe | None, dict[Recipe, Outcome[T]]]:
    """The recipe whose plan is predicted fastest.

    Args:
        counts: numbers of microbatches, in ascending order.
        policies: per number of chunks, in ascending order, the rematerialization policies, the one
            that frees least first. Consumed lazily: more chunks only if they may be faster.
        look: plans a recipe.
        base: the fields that all recipes share.
        least_of: lower bound of a recipe's seconds; called for recipes with the first policy.
        known: the result of an earlier search.
        stores: whether what loops store for the backward pass takes time, which recomputing saves.

    Returns:
        The best recipe, None if none fits; and the outcomes of all recipes tried, now or before.
    """
    best, seen = known[0], dict(known[1])
    best_s = math.inf if best is None else seen[best].cost_s
    for chunks, remats in policies:
        plain = dataclasses.replace(base, chunks=chunks)
        walk = _Walk(
            counts, remats, chunks, base, look, least_of, least_of(plain), seen, best, best_s
        )
        walk.stores = stores
        if not walk.close:
            _go(walk)
        best, best_s = walk.best, walk.best_s
        if walk.close:  # more chunks rewrite more, and can't be much faster
            break
    return best, seen


def _does_more(recipe: Recipe, other: Recipe) -> bool:
    """Whether a recipe rewrites at least as much as another in every respect: it can then only be
    faster for lack of memory. Offload policies that differ have no order: transfers take time."""
    again, less = (parse_policy(r.remat) for r in (recipe, other))
    if again.on_host and again.flop_per_byte != less.flop_per_byte:
        return False
    return (
        recipe.microbatches >= other.microbatches
        and recipe.chunks >= other.chunks
        and again.flop_per_byte >= less.flop_per_byte
        and (again.products, again.on_host) == (less.products, less.on_host)
    )


def beats(one: Outcome[T], other: Outcome[T]) -> bool:
    """Whether a recipe replaces a simpler or an earlier one: it is clearly faster, or about as fast
    and does not fill the memory."""
    full, was_full = one.fill > FULL, other.fill > FULL
    if full == was_full:
        return one.cost_s * WORTH < other.cost_s
    return one.cost_s * CLOSE < other.cost_s if full else one.cost_s <= CLOSE * other.cost_s


def _go_away(walk: _Walk[T]) -> None:
    """Try policies that store values in host memory, with the fewest microbatches that fit. Stored
    values cost transfer time and others are recomputed, so the best policy lies between."""
    last = len(walk.policies) - 1
    for i in range(len(walk.counts)):
        if walk.close:
            return
        if walk.at(i, last) is not None:
            for j in reversed(range(last)):
                if walk.close or walk.at(i, j) is None:
                    return
            return


def _go(walk: _Walk[T]) -> None:
    """Walk along the border of what fits."""
    if walk.best is not None and walk.least_s >= walk.enough_s:
        return  # all of them rewrite more
    if parse_policy(walk.policies[-1]).on_host:
        _go_away(walk)
        return
    border: int | None = None
    for i in range(len(walk.counts)):
        if border is None:
            border = walk.first_fit(i)
            if border is not None and walk.stores:
                walk.climb(i)
            elif border is not None:
                k = border + 1
                while not walk.close and k < len(walk.policies) and walk.at(i, k):
                    k += 1
        elif border > 0:
            border = walk.down(i, border)
        if border == 0 or walk.close:
            break
