"""What was asked of microbatches and rematerialization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.errors import RequestError
from planner.recipes.recipe import recipe_of
from planner.remat.policy import NONE, policy_text
from planner.spec import Recipe

AUTO = "auto"


@dataclass(frozen=True)
class Wish:
    """A recipe, parts of which may be open.

    Attributes:
        recipe: what is given; for what is open, the plain step's.
        open_microbatches, open_remat: whether the search may choose them.
        always: whether it is to look for something better than the plain step also where that
            fits (``"auto"``), not only where no plan of the plain step does.
    """

    recipe: Recipe
    open_microbatches: bool
    open_remat: bool
    always: bool

    @property
    def is_open(self) -> bool:
        """Whether anything is left to the search."""
        return self.open_microbatches or self.open_remat


def parse_wish(microbatches: Any, remat: Any, function: Callable[..., Any], searches: bool) -> Wish:
    """Check and parse ``microbatches=`` and ``remat=``.

    Args:
        microbatches: a number, ``"auto"``, or None: 1 where that fits.
        remat: a policy, ``"auto"``, or None: ``"none"`` where that fits.
        function: the step; one that is rewritten already keeps its recipe.
        searches: whether what is None may be searched if nothing fits.

    Raises:
        RequestError: a value that has no meaning.
    """
    made = recipe_of(function)
    if made != Recipe():
        return Wish(made, False, False, False)
    parts = 1
    if isinstance(microbatches, str) and microbatches != AUTO:
        try:
            parts = int(microbatches)
        except ValueError:
            raise _no_number(microbatches) from None
    elif microbatches not in (None, AUTO):
        parts = microbatches
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise _no_number(microbatches)
    policy = NONE if remat in (None, AUTO) else policy_text(remat)
    return Wish(
        Recipe(parts, policy),
        microbatches == AUTO or (microbatches is None and searches),
        remat == AUTO or (remat is None and searches),
        AUTO in (microbatches, remat),
    )


def _no_number(value: Any) -> RequestError:
    return RequestError(f"microbatches={value!r}: expected a whole number from 1 on, or auto")
