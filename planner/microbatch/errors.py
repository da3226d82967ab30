"""Why a step can't be cut into microbatches."""

from __future__ import annotations

from planner.errors import RequestError


class NotExactError(RequestError):
    """The step in microbatches would not equal the step on the whole batch; says where."""


class CoupledError(NotExactError):
    """An operation makes examples depend on each other. Computed for each microbatch alone, it
    gives other numbers.

    Attributes:
        place: its line in the user's code; its primitive if the line is not known.
        why: which operation couples examples, where, and how.
        helps: what would make the step exact; may be empty.
        operands: values that the operation reads.
    """

    def __init__(
        self,
        place: str,
        why: str,
        helps: str = "",
        own: bool = True,
        operands: tuple[int, ...] = (),
    ) -> None:
        """``own``: whether to suggest statistics per microbatch."""
        choices = [helps, OWN if own else "", "leave microbatches= out"]
        *some, last = filter(None, choices)
        advice = f"{', '.join(some)}, or {last}" if some else last
        super().__init__(f"this step can't be cut into microbatches: {why}; {advice}")
        self.place, self.why, self.helps, self.operands = place, why, helps, operands

    def without_own(self) -> CoupledError:
        """The same error without the suggestion of statistics per microbatch."""
        return CoupledError(self.place, self.why, self.helps, False, self.operands)

    def with_help(self, text: str, own: bool) -> CoupledError:
        """The same error with one more suggestion, in front of the others."""
        helps = f"{text}, {self.helps}" if self.helps else text
        return CoupledError(self.place, self.why, helps, own, self.operands)


OWN = (
    "let each microbatch have its own (statistics='per-microbatch': in general other numbers than "
    "the whole batch's)"
)
