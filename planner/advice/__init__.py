"""What to say when no plan fits in memory: the least peak, who holds it, what would help.

Everything offered is tried: a relief's peak and step time come from planning, with the fast search
and little time, or are called an estimate. What changes least comes first: computing parts again,
host memory, a smaller batch, more devices.
"""

from planner.advice.batch import Shapes
from planner.advice.case import Again, Case, advise
from planner.advice.least import Least, least_plan, rescued

__all__ = ["Again", "Case", "Least", "Shapes", "advise", "least_plan", "rescued"]
