"""Rewrites a step before it is planned: a padded batch or microbatches, rematerialization, stages,
chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from planner.chunks.rewrite import chunked, in_chunks
from planner.errors import RequestError
from planner.graph.trace import Traced, abstract, trace
from planner.microbatch.rewrite import microbatched
from planner.padding.rewrite import padded
from planner.remat.policy import policy_text
from planner.remat.rewrite import rematerialized
from planner.spec import PLAIN, WHOLE, Recipe
from planner.stages.programs.layered import layered
from planner.stages.rewrite import staged


class Rewriter:
    """A step under recipes; shared parts are computed once."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.function, self.args = function, abstract(args)
        self._cuts: dict[tuple[int, bool, int, str], tuple[Callable[..., Any], Traced]] = {}
        self._made: dict[Recipe, tuple[Callable[..., Any], Traced]] = {}

    def cut(
        self, parts: int, apart: bool = False, replicas: int = 1, statistics: str = WHOLE
    ) -> tuple[Callable[..., Any], Traced]:
        """The step in microbatches, and its trace. ``apart``: whether stages can be made of it.
        ``replicas``, ``statistics``: see ``microbatched``."""
        key = parts, apart and parts > 1, replicas, statistics if parts > 1 else WHOLE
        if key not in self._cuts:
            whole = None if parts == replicas == 1 else self.cut(1)[1]
            step = microbatched(
                self.function,
                self.args,
                parts,
                whole,
                apart=apart,
                replicas=replicas,
                statistics=statistics,
            )
            self._cuts[key] = step, trace(step, self.args, whole)
        return self._cuts[key]

    def __call__(self, recipe: Recipe) -> tuple[Callable[..., Any], Traced]:
        """The step under a recipe (see ``rewritten``), and its trace."""
        if recipe not in self._made:
            self._made[recipe] = self._make(recipe)
        return self._made[recipe]

    def _make(self, recipe: Recipe) -> tuple[Callable[..., Any], Traced]:
        if recipe == recipe_of(self.function):
            return self.function, self.cut(1)[1]
        if recipe_of(self.function) != PLAIN:
            raise ValueError("this function is rewritten already, under another recipe")
        if recipe.pad_batch:
            if max(recipe.microbatches, recipe.replicas, recipe.stages) > 1:
                raise RequestError(f"{recipe}: a padded batch is not cut up; leave one of them out")
            cut = padded(self.function, self.args, recipe.pad_batch, self.cut(1)[1])
            traced = trace(cut, self.args, self.cut(1)[1])
        else:
            cut, traced = self.cut(
                recipe.microbatches, recipe.stages > 1, recipe.replicas, recipe.statistics
            )
        inside = in_chunks if recipe.chunks > 1 else None
        remat_step, again = rematerialized(
            cut, traced, self.args, policy_text(recipe.remat), inside
        )
        traced = traced if remat_step is cut else trace(remat_step, self.args, self.cut(1)[1])
        if recipe.schedule:
            piped, stages = layered(remat_step, traced, self.args, recipe)
        else:
            piped, stages = staged(
                remat_step, traced, self.args, recipe.microbatches, recipe.stages
            )
        traced = traced if piped is remat_step else trace(piped, self.args, self.cut(1)[1])
        chunked_step, chunks = chunked(piped, traced, self.args, recipe.chunks)

        @functools.wraps(self.function)
        def step(*args: Any) -> Any:
            return chunked_step(*args)

        step.recipe = recipe  # type: ignore[attr-defined]
        step.coupled = coupled_of(cut)  # type: ignore[attr-defined]
        step.recomputed = again  # type: ignore[attr-defined]
        step.chunked = chunks  # type: ignore[attr-defined]
        step.staged = stages  # type: ignore[attr-defined]
        return step, traced if chunked_step is piped else trace(step, self.args, self.cut(1)[1])


def rewritten(
    function: Callable[..., Any], args: Sequence[Any], recipe: Recipe
) -> Callable[..., Any]:
    """The step under a recipe: padded or cut into microbatches, then rematerialized, then with its
    layers in stages, then with its large products in chunks.

    Raises:
        NotExactError, RequestError: see ``microbatched`` and ``rematerialized``.
    """
    return Rewriter(function, args)(recipe)[0]


def recipe_of(function: Any) -> Recipe:
    """The recipe under which ``rewritten`` made a function."""
    recipe = getattr(function, "recipe", PLAIN)
    return recipe if isinstance(recipe, Recipe) else PLAIN


def coupled_of(function: Any) -> tuple[str, ...]:
    """Lines of the user's code where examples of a microbatch depend on each other in a function of
    ``rewritten``."""
    return tuple(getattr(function, "coupled", ()))


def chunked_of(function: Any) -> tuple[str, ...]:
    """What a function of ``rewritten`` computes in chunks, one line per product."""
    return tuple(getattr(function, "chunked", ()))


def staged_of(function: Any) -> tuple[str, ...]:
    """The stages of a function of ``rewritten``, as text."""
    return tuple(getattr(function, "staged", ()))


def recomputed_of(function: Any) -> tuple[str, ...]:
    """What a function of ``rewritten`` recomputes, one line per kind of block."""
    return tuple(getattr(function, "recomputed", ()))
