"""Checks a plan: results against an unsharded run, collectives against the compiled module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from executor.run.compile import compile_plan
from executor.verify.hlo.collectives import text_counts
from planner.arguments.calls import bind
from planner.plan.plan import Plan
from planner.recipes import rewritten
from planner.spec import WHOLE, Recipe


@dataclass(frozen=True)
class CheckReport:
    """Outcome of ``check``: differences over all float results, collectives by kind.

    ``planned`` and ``compiled`` count collectives in the program text: one inside a loop
    counts once in both. XLA combines and splits collectives, so counts may differ.
    """

    max_abs_difference: float
    max_rel_difference: float
    planned: dict[str, int]
    compiled: dict[str, int]


def check(function: Callable[..., Any], plan: Plan, *args: Any) -> CheckReport:
    """Run one step under ``plan`` and unsharded on one device, and compare. If the plan has
    statistics of each microbatch, the step on one device runs in the same microbatches.

    Args:
        function: the step.
        plan: its plan.
        *args: concrete arguments; they are not donated.
    """
    bound = bind(function, args)
    function, args = bound.function, bound.args
    step = compile_plan(function, plan)
    compiled = step.prepare(*args)
    placed = compiled.place(*args)
    module = compiled.jitted.lower(*placed).compile()
    sharded = jax.device_get(module(*placed))
    if plan.statistics != WHOLE:
        parts = Recipe(microbatches=plan.microbatches, statistics=plan.statistics)
        function = rewritten(function, args, parts)
    alone = jax.device_get(jax.jit(function)(*jax.device_put(args, jax.devices()[0])))
    worst_abs = worst_rel = 0.0
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(alone), strict=True):
        if not jnp.issubdtype(a.dtype, jnp.floating):
            continue
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore"):
            gaps = np.where(same, 0.0, np.nan_to_num(np.abs(x - y), nan=np.inf, posinf=np.inf))
        gap = float(np.max(gaps, initial=0.0))
        scale = float(np.max(np.abs(y), initial=0.0, where=np.isfinite(y)))
        worst_abs = max(worst_abs, gap)
        worst_rel = max(worst_rel, gap / max(scale, 1e-12))
    planned = dict(sorted(Counter(row.kind for row in plan.collectives).items()))
    return CheckReport(worst_abs, worst_rel, planned, text_counts(module.as_text() or ""))
