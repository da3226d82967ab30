"""A step under manual plans beside the chosen one, and what differs between two plans."""

from planner.compare.difference import Difference, Exchange, Figure, Moved, Setting, difference
from planner.compare.manual_plans import Candidate, Collectives, Comparison, compare

__all__ = [
    "Candidate",
    "Collectives",
    "Comparison",
    "Difference",
    "Exchange",
    "Figure",
    "Moved",
    "Setting",
    "compare",
    "difference",
]
