"""The range in which the step time of a plan is likely to be. No jax."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodels import ClusterError, parse_cluster
from costmodels.residuals import Interval, interval_of, tied
from planner.plan.contents.kinds import plan_kind

if TYPE_CHECKING:
    from planner.plan.plan import Plan


@dataclass(frozen=True)
class StepRange:
    """Where 80 % of published runs of this kind would have the step time.

    Attributes:
        low_s: seconds.
        high_s: seconds.
        interval: the same as factors of the predicted time, and of which runs.
    """

    low_s: float
    high_s: float
    interval: Interval


def step_range(plan: Plan) -> StepRange | None:
    """The likely range of a plan's step time; None where no published run says (CPUs)."""
    interval = interval_of(_device(plan), plan_kind(plan))
    if interval is None:
        return None
    step_s = plan.prediction.step_s
    return StepRange(interval.low * step_s, interval.high * step_s, interval)


def ties(plan: Plan, a: float, b: float) -> bool:
    """Whether two predicted times (or costs in proportion to them) of plans for the cluster of
    ``plan`` are too close to order. Never where no published run says how close that is (CPUs)."""
    return step_range(plan) is not None and tied(a, b)


def _device(plan: Plan) -> str:
    """The kind of device. A plan that was read knows it by its cluster's text alone; no file is
    opened because a plan names it."""
    if plan.device or ".toml" in plan.cluster.lower():
        return plan.device
    with contextlib.suppress(ClusterError):  # described in the program that planned
        return parse_cluster(plan.cluster).device.kind
    return ""
