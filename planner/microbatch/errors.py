"""Why a step can't be cut into microbatches."""

from __future__ import annotations

from planner.errors import RequestError


class NotExactError(RequestError):
    """The step in microbatches would not equal the step on the whole batch; says where."""


class CoupledError(NotExactError):
    """An operation makes examples depend on each other. Computed for each microbatch alone, it
    gives other numbers.

    Attributes:
        place: its line in the user's code; its primitive where that is not known.
    """

    def __init__(self, place: str, text: str) -> None:
        super().__init__(text)
        self.place = place
