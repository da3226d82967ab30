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
        why: which operation couples examples, where, and how.
        helps: what would make the step exact; may be empty.
    """

    def __init__(self, place: str, why: str, helps: str = "", own: bool = True) -> None:
        """``own``: whether microbatches with statistics of their own can be an answer."""
        choices = [helps, OWN if own else "", "leave microbatches= out"]
        *some, last = filter(None, choices)
        advice = f"{', '.join(some)}, or {last}" if some else last
        super().__init__(f"this step can't be cut into microbatches: {why}; {advice}")
        self.place, self.why, self.helps = place, why, helps

    def without_own(self) -> CoupledError:
        """The same, where statistics of their own are refused too."""
        return CoupledError(self.place, self.why, self.helps, own=False)


OWN = (
    "let each microbatch have its own (statistics='per-microbatch': in general other numbers than "
    "the whole batch's)"
)
