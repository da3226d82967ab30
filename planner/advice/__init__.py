"""Advice for when no plan fits in memory: the least peak, the values that hold it, what would help.

Suggestions are tried: their peak and step time come from planning, with the fast search and little
time, or are marked as estimates. The smallest changes come first: rematerialization, host memory, a
smaller batch, more devices.
"""

from planner.advice.batch import Shapes
from planner.advice.case import Again, Case, advise
from planner.advice.least import Least, least_plan, rescued

__all__ = ["Again", "Case", "Least", "Shapes", "advise", "least_plan", "rescued"]
