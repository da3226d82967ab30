"""Why a value is sharded as it is: alternatives with their price, and what forced the choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.errors import RequestError
from planner.explain.alternatives import alternatives, without_limit
from planner.explain.causes import asked_of_state, dimensions, pinned_by, possible
from planner.explain.model import (
    Alternative,
    Change,
    Decision,
    Dimension,
    Explanation,
    Price,
)
from planner.explain.setting import PlanSetting, setting_of, value_text
from planner.explain.targets import find_values, values_of
from planner.graph.ir import Role
from planner.planning import Planned, plan_step
from planner.request.pins import mode_pins

__all__ = [
    "Alternative",
    "Change",
    "Decision",
    "Dimension",
    "Explanation",
    "Price",
    "explain",
    "explain_planned",
]

SHOWN = 3
"""Decisions that are explained in full; the others are only named."""
SHARED = 4
"""Number of values that share a decision and are named."""


def explain(function: Callable[..., Any], *args: Any, target: str, **options: Any) -> Explanation:
    """Plan a step and explain why values are sharded as they are.

    Args:
        function: the step.
        *args: its arguments, arrays or ShapeDtypeStructs.
        target: what to explain; see ``planner.explain.targets.find_values``.
        **options: as for ``planner.make_plan``; ``cluster`` is required.

    Raises:
        ModelError, RequestError: as ``make_plan``; RequestError also if nothing matches
            ``target``.
    """
    return explain_planned(plan_step(function, *args, **options), target)


def explain_planned(planned: Planned, target: str) -> Explanation:
    """Explain values of a step that was planned.

    Raises:
        RequestError: nothing matches ``target``; the message has the nearest names.
    """
    graph = planned.extraction.graph
    values = find_values(graph, target)
    sized = values_of(graph, values)
    if not sized:
        raise RequestError(f"{target}: a scalar, which has nothing to split")
    setting = setting_of(planned)
    homes = planned.extraction.priced.analysis.groups.home
    first: dict[int, int] = {}  # per decision, the largest value that matches
    order = sorted(
        sized,
        key=lambda v: (graph.values[v].role is Role.MOMENT, -graph.values[v].nbytes, v),
    )
    for value in order:
        home = homes[value]
        if home is not None:
            first.setdefault(setting.node[home[0]], value)
    if not first:
        raise RequestError(f"{target}: no result of the step depends on it, so nothing is decided")
    plan = planned.plan
    return Explanation(
        target,
        plan.mode,
        plan.cluster,
        str(plan.mesh),
        plan.prediction.step_s,
        plan.prediction.peak_bytes,
        plan.prediction.limit_bytes,
        tuple(_decision(planned, setting, n, v) for n, v in list(first.items())[:SHOWN]),
        tuple(value_text(planned.extraction, v) for v in list(first.values())[SHOWN:]),
    )


def _decision(planned: Planned, setting: PlanSetting, node: int, value: int) -> Decision:
    plan, graph = planned.extraction, planned.extraction.graph
    groups = plan.priced.analysis.groups
    group, layout = groups.home[value]  # type: ignore[misc]
    array = graph.values[value]
    rows, unpriced = alternatives(setting, node, layout)
    others = [v for v in setting.made[group] if v != value]
    others.sort(key=lambda v: (-graph.values[v].nbytes, v))
    names = dict.fromkeys(value_text(plan, v) for v in others)
    stored, used = plan.value_sharding(value), plan.value_sharding(value, "use")
    return Decision(
        setting.name(node, value),
        array.shape,
        array.dtype,
        graph.ops[array.op].source if array.op >= 0 else "",
        stored,
        used,
        len(setting.members[node]),
        len(others),
        tuple(names)[:SHARED],
        dimensions(plan, value),
        setting.priced.sets[node].count,
        possible(plan, group),
        _forced(planned, setting, node, group, layout),
        rows,
        unpriced,
    )


def _forced(
    planned: Planned, setting: PlanSetting, node: int, group: int, layout: tuple[int, ...]
) -> tuple[str, ...]:
    """What forces the choice: pins, mode and memory. ``Dimension.why`` covers single dimensions."""
    plan, mode = planned.extraction, planned.plan.mode
    graph, mesh = plan.graph, plan.priced.mesh
    out = [f"pin: {origin}" for origin in pinned_by(plan, planned.pins, group)]
    wishes = mode_pins(mode, graph, mesh, planned.pins, planned.quotient.example_dims)
    out += [f"mode: {origin}" for origin in pinned_by(plan, wishes, group)]
    out += [f"request: {said}" for said in asked_of_state(planned, group)]
    if planned.request.spreads and mode != "STAND_ALONE":
        out.append(f"mode {mode}: what is given is spread, nothing else is searched")
    if mesh.num_devices == 1:
        out.append("one device: nothing can be split")
    elif setting.priced.sets[node].count == possible(plan, group) == 1:
        out.append("nothing else is possible: no dimension can be split")
    if setting.priced.sets[node].count > 1:
        other = without_limit(setting, node, layout)
        if other:
            out.append(f"memory: without the limit it would be {other}")
    return tuple(out)
