"""Invariants of the values between stages. What breaks one is an InternalError with the place."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.debug.check.analysis import check_analysis
from planner.debug.check.classes import check_classes
from planner.debug.check.graph import check_graph
from planner.debug.check.groups import check_groups
from planner.debug.check.plan import check_plan
from planner.debug.check.problem import check_problem
from planner.debug.check.solution import check_solution
from planner.debug.stage import Stage

CHECKS: Mapping[Stage, Callable[..., None]] = {
    Stage.GRAPH: check_graph,
    Stage.GROUPS: check_groups,
    Stage.ANALYSIS: check_analysis,
    Stage.CLASSES: check_classes,
    Stage.PROBLEM: check_problem,
    Stage.SOLUTION: check_solution,
    Stage.PLAN: check_plan,
}
"""Per stage, the check of the values that it hands to ``passed``."""
