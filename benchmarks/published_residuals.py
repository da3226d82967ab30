"""Published runs over their predictions, as ``costmodels/residuals.toml`` holds them.

Quantiles by device kind and kind of plan, for families of devices and for all; and how far the
ratio of two plans' times is off inside a group. Nothing is fitted to them: they say how far off a
prediction may be.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from published_clusters import TPUS, kind_of
from published_predict import Step
from published_tables import Run

HEADER = """\
# Measured over predicted step time of published training runs, by device and kind of plan: 10th
# and 90th percentile. Written by benchmarks/published.py --residuals; the runs are described in
# docs/explanation/published-runs.md. Kinds of plan: data (data parallel, FSDP, ZeRO), model
# (tensor, sequence or context parallelism besides), stages (pipelines).
"""


def plan_kind(run: Run) -> str:
    """Which kind of plan a run had."""
    if run.pp > 1:
        return "stages"
    return "model" if run.degrees.model * run.degrees.context > 1 else "data"


def residuals_text(
    found: Sequence[tuple[Run, Step]], groups: Sequence[Sequence[tuple[float, float]]]
) -> str:
    """The file.

    Args:
        found: runs with their predictions.
        groups: (measured, predicted) of plans of one model on one machine.
    """
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run, step in found:
        kind, plan = kind_of(run.hardware), plan_kind(run)
        family = "tpu" if kind in TPUS else "gpu"
        for name in (kind, family, "all"):
            ratios[name, plan].append(run.step_s / step.total_s)
    lines = [HEADER]
    order = {"all": 2, "gpu": 1, "tpu": 1}
    for name, plan in sorted(ratios, key=lambda key: (order.get(key[0], 0), key)):
        values = np.asarray(ratios[name, plan])
        low, high = np.quantile(values, [0.1, 0.9])
        lines.append(f"[{name}.{plan}]\nrows = {len(values)}\nlow = {low:.3f}\nhigh = {high:.3f}\n")
    off = [
        abs(math.log((p[1] / q[1]) / (p[0] / q[0])))
        for plans in groups
        for p, q in itertools.combinations(plans, 2)
    ]
    within = math.expm1(float(np.quantile(off, 0.8)))
    lines.append(f"[order]\npairs = {len(off)}\nwithin = {within:.3f}\n")
    return "\n".join(lines)
