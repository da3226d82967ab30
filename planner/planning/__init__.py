"""``make_plan``: trace -> rules -> groups -> price -> search -> Plan."""

from planner.planning.door import make_plan, plan_step, plan_traced, plan_tried
from planner.planning.open_recipes import MOST_PARTS
from planner.planning.outer.pipelines import of_stage
from planner.planning.row import Planned, write_problem

__all__ = [
    "MOST_PARTS",
    "Planned",
    "make_plan",
    "of_stage",
    "plan_step",
    "plan_traced",
    "plan_tried",
    "write_problem",
]
