"""Checks that a plan obeys its schema, equals its JSON form, and is for the traced step."""

from __future__ import annotations

from planner.debug.check.layouts import demand
from planner.errors import InternalError, PlanFormatError, PlanMismatchError
from planner.graph.ir import Graph
from planner.plan.plan import Plan, plan_from_json


def check_plan(plan: Plan, graph: Graph) -> None:
    """Demand the invariants of a plan.

    Raises:
        InternalError: the field, argument or operation at fault.
    """
    try:
        read = plan_from_json(plan.to_json())
        plan.check_matches(graph)
    except (PlanFormatError, PlanMismatchError) as error:
        raise InternalError(f"plan for {plan.cluster}: {error}") from error
    demand(read == plan, f"plan for {plan.cluster}", "its file holds another plan")
