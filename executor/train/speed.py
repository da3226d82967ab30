"""Speed of a run beside its plan: tokens or examples per second, model FLOP utilization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from costmodels import ClusterError, parse_cluster
from executor.run.compile import CompiledStep
from executor.run.parallelize import Parallelized
from planner.compare.hardware import step_of
from planner.compare.offers_text import rate_text


@dataclass(frozen=True)
class Speed:
    """The work of a step, and the predictions of its plan.

    Attributes:
        unit: "tokens", "examples" or "".
        units: number of units in a step.
        predicted_s: predicted seconds of a step.
        ideal_s: seconds of its matrix products at the devices' peak; 0 if that is unknown, or not
            the model's (the plan computes some products again).
        peak_bytes: predicted peak memory of a device.
    """

    unit: str
    units: int
    predicted_s: float
    ideal_s: float
    peak_bytes: float = 0.0

    def scalars(self, steps_per_s: float) -> dict[str, float]:
        """Throughput and MFU at a measured speed, as metrics by name."""
        scalars = {}
        if self.unit:
            scalars[f"speed/{self.unit}_per_s"] = self.units * steps_per_s
        if self.ideal_s:
            scalars["speed/mfu"] = self.ideal_s * steps_per_s
        return scalars

    def text(self, steps_per_s: float) -> str:
        """The part of a log line about a measured speed."""
        parts = []
        if self.unit and steps_per_s > 0:
            parts.append(f"{rate_text(self.units * steps_per_s)} {self.unit}/s")
        if self.ideal_s and self.predicted_s > 0:
            now, then = self.ideal_s * steps_per_s, self.ideal_s / self.predicted_s
            parts.append(f"MFU {100 * now:.1f} % (planned {100 * then:.1f} %)")
        return "  ".join(parts)


def speed_of(step: Any) -> Speed | None:
    """The predicted speed of a planned step; None before it is planned, and for other functions."""
    if isinstance(step, Parallelized):
        step = step.compiled if step.is_planned else None
    compiled = getattr(step, "compiled", step)  # of ``compile_plan``
    if not isinstance(compiled, CompiledStep):
        return None
    plan = compiled.plan
    work = step_of(compiled.traced, ())
    unit = "tokens" if work.tokens else "examples" if work.examples else ""
    try:
        cluster = parse_cluster(plan.cluster)
    except ClusterError:  # a file that this machine does not have
        cluster = None
    ideal_s = 0.0
    plain = plan.remat == "none" and plan.chunks == 1  # nothing is computed again
    if plain and cluster is not None and cluster.device.kind != "cpu":
        ideal_s = work.ideal_s(cluster)
    units = work.tokens or work.examples
    return Speed(unit, units, plan.prediction.step_s, ideal_s, plan.prediction.peak_bytes)


def peak_memory() -> float:
    """The most bytes that any device of this process has held since it began; 0 if the back end
    does not count them, as on CPU."""
    device_stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return float(max((stats.get("peak_bytes_in_use", 0) for stats in device_stats), default=0))
