"""What to say when no plan fits in memory: the least peak, who holds it, what would help.

Everything offered is tried: a relief's peak and step time come from planning, with the fast search
and little time, or are called an estimate.
"""

from planner.advice.batch import Retrace, Shapes
from planner.advice.case import Case, advise
from planner.advice.least import Least, least_plan, rescued

__all__ = ["Case", "Least", "Retrace", "Shapes", "advise", "least_plan", "rescued"]
