"""The likely range of the step time of a plan. No jax."""

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
    """Range of the step time, by the errors of 80 % of published runs of this kind.

    Attributes:
        low_s: low end, in seconds.
        high_s: high end, in seconds.
        interval: the same range as factors of the predicted time, and the runs that it is from.
    """

    low_s: float
    high_s: float
    interval: Interval


def step_range(plan: Plan) -> StepRange | None:
    """The likely range of a plan's step time; None without published runs (CPUs)."""
    interval = interval_of(_device(plan), plan_kind(plan))
    if interval is None:
        return None
    step_s = plan.prediction.step_s
    return StepRange(interval.low * step_s, interval.high * step_s, interval)


def ties(plan: Plan, a: float, b: float) -> bool:
    """Whether two predicted times (or costs in proportion to them) of plans for the cluster of
    ``plan`` are too close to order. Always False without published runs (CPUs)."""
    return step_range(plan) is not None and tied(a, b)


def _device(plan: Plan) -> str:
    """The kind of device. A plan that was read has it only in its cluster's text; a file that this
    names is not opened."""
    if plan.device or ".toml" in plan.cluster.lower():
        return plan.device
    with contextlib.suppress(ClusterError):  # described in the program that planned
        return parse_cluster(plan.cluster).device.kind
    return ""
