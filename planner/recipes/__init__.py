"""Rewriting a step before it is planned: microbatches, rematerialization, chunks, stages."""

from planner.recipes.outer import CLOSE, FULL, WORTH, Look, Outcome, search_recipes
from planner.recipes.recipe import (
    Rewriter,
    chunked_of,
    coupled_of,
    recipe_of,
    recomputed_of,
    rewritten,
    staged_of,
)
from planner.recipes.wish import AUTO, SCHEDULES, Wish, parse_wish
from planner.spec import PLAIN, Recipe

__all__ = [
    "AUTO",
    "CLOSE",
    "FULL",
    "PLAIN",
    "SCHEDULES",
    "WORTH",
    "Look",
    "Outcome",
    "Recipe",
    "Rewriter",
    "Wish",
    "chunked_of",
    "coupled_of",
    "parse_wish",
    "recipe_of",
    "recomputed_of",
    "rewritten",
    "search_recipes",
    "staged_of",
]
