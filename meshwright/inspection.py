"""Plan a train step and print the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshwright
from executor.run.mesh import detected_memory
from planner.announce import announced
from planner.frontend.capture import call_of
from planner.plan.plan import Plan


def inspect(
    step: Callable[..., Any], *args: Any, cluster: str | None = None, **options: Any
) -> Plan:
    """Plan a train step, print the plan and return it; runs nothing.

    Args:
        step: the train step.
        args: its arguments: arrays or ShapeDtypeStructs.
        cluster: such as ``"h100:8x4"``; None: that of a parallelized step, or else the devices
            that are present.
        options: as for ``make_plan``; those of a parallelized step apply where none are given here.

    Raises:
        RequestError, MemoryLimitError and others, as ``make_plan`` does.
    """
    if (call := call_of(step, args)) is not None:
        given = {name: value for name, value in options.items() if value is not None}
        step, args, options = call.function, call.args, {**call.options, **given}
        cluster = options.pop("cluster", None) if cluster is None else cluster
        options.pop("cluster", None)
    if cluster is None:
        cluster = meshwright.detect_cluster()
        options.setdefault("memory", detected_memory(cluster))
    with announced(f"planning for {cluster}"):
        plan = meshwright.make_plan(step, *args, cluster=cluster, **options)
    print(plan)
    return plan
