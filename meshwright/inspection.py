"""A plan, printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshwright
from planner.announce import announced
from planner.plan.plan import Plan


def inspect(
    step: Callable[..., Any], *args: Any, cluster: str | None = None, **options: Any
) -> Plan:
    """Plan a train step, print the plan and return it; runs nothing.

    Args:
        step: the train step.
        args: its arguments: arrays or ShapeDtypeStructs.
        cluster: such as ``"h100:8x4"``; None: the devices that are present.
        options: as for ``make_plan``.

    Raises:
        RequestError, MemoryLimitError and others, as ``make_plan`` does.
    """
    where = meshwright.detect_cluster() if cluster is None else cluster
    with announced(f"planning for {where}"):
        plan = meshwright.make_plan(step, *args, cluster=where, **options)
    print(plan)
    return plan
