"""Applies the decisions of a plan, except for shardings and host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.errors import PlanMismatchError
from planner.plan.plan import Plan

Applied = Callable[[str, Any], Any]
"""(option as in the plan, value that was just computed) -> the value that replaces it."""

APPLIED: dict[str, Applied] = {}
"""Functions by the name of a decision (``planner.space.decisions``). Host memory is not here:
``compile`` places arguments and results."""


def applied(plan: Plan) -> Mapping[tuple[int, int], Callable[[Any], Any]]:
    """The functions that are applied to results, by operation and result.

    Raises:
        PlanMismatchError: the plan has a decision that this version cannot carry out.
    """
    out: dict[tuple[int, int], Callable[[Any], Any]] = {}
    for row in plan.decisions:
        if row.decision not in APPLIED:
            raise PlanMismatchError(
                f"this plan decides {row.decision!r} ({row.option} for {row.value}), which this "
                f"version can't carry out; it knows {', '.join(APPLIED) or 'none'}; plan again"
            )
        out[row.op, row.position] = _then(out.get((row.op, row.position)), row.decision, row.option)
    return out


def _then(before: Callable[[Any], Any] | None, decision: str, option: str) -> Callable[[Any], Any]:
    """A function that applies ``before``, and then the decision."""
    apply = APPLIED[decision]
    return lambda x: apply(option, x if before is None else before(x))
