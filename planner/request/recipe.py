"""How a step is rewritten before it is planned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """A step's rewriting; the default leaves it as it is.

    Attributes:
        microbatches: parts of the batch that run one after the other.
        remat: the policy of what is computed again, as ``planner.remat.policy.policy_text`` has it.
    """

    microbatches: int = 1
    remat: str = "none"


PLAIN = Recipe()
