"""Rewriting a step before it is planned: microbatches and rematerialization, given or searched."""

from planner.recipes.outer import WORTH, Look, Outcome, search_recipes
from planner.recipes.recipe import Rewriter, chunked_of, recipe_of, recomputed_of, rewritten
from planner.recipes.wish import AUTO, Wish, parse_wish
from planner.spec import PLAIN, Recipe

__all__ = [
    "AUTO",
    "PLAIN",
    "WORTH",
    "Look",
    "Outcome",
    "Recipe",
    "Rewriter",
    "Wish",
    "chunked_of",
    "parse_wish",
    "recipe_of",
    "recomputed_of",
    "rewritten",
    "search_recipes",
]
