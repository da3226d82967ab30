"""A traced step, ready to be planned on any mesh: trace -> rules -> groups -> analysis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.annotate import Pin
from planner.debug.stage import Stage
from planner.debug.stages import passed
from planner.graph.trace import Traced
from planner.plan.plan import LARGE
from planner.report.units import bytes_text, percent_text
from planner.request.marks import WITHOUT_PINS
from planner.request.parsed import Request
from planner.request.state import find_state
from planner.rules.factor import FactorRule
from planner.space.decisions import chosen_values, with_decisions
from planner.space.groups import build_groups
from planner.space.replicated import held_whole
from planner.step.analysis import Analysis, analyse
from planner.step.classes import Quotient, fold_analysis

NOTICED = 0.01
"""An operation without a rule is reported first above this share of a device's memory."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A traced step, ready to be planned on any mesh."""

    rules: tuple[FactorRule, ...]
    quotient: Quotient
    pins: tuple[Pin, ...]


def prepared(
    traced: Traced,
    pins: tuple[Pin, ...],
    request: Request,
    donate_argnums: int | Sequence[int] | None,
) -> Prepared:
    """Everything about a traced step that does not depend on the mesh.

    Args:
        traced: the step.
        pins: the pins of the step.
        request: the request.
        donate_argnums: arguments whose memory the results may take; None: all that come back.
    """
    graph = traced.graph
    passed(Stage.GRAPH, graph)
    rules = traced.rules
    if request.mode in WITHOUT_PINS:  # regions run whole, as these modes ignore marks
        rules = tuple(replace(r, origin="opaque") if r.origin == "region" else r for r in rules)
    donated = _donated(traced, donate_argnums)
    chosen = chosen_values(graph, request.decided)
    groups = with_decisions(build_groups(graph, rules, pins), chosen)
    passed(Stage.GROUPS, groups, graph)
    analysis = analyse(graph, rules, groups, donated, request.cluster.device, chosen)
    passed(Stage.ANALYSIS, analysis)
    along_axis = bool(request.tensor or request.sequence)
    state = find_state(graph, request.state) if request.state or along_axis else None
    differ = request.mode != "AUTO_PARALLEL" or along_axis
    quotient = fold_analysis(analysis, pins, inputs_differ=differ, state=state)
    passed(Stage.CLASSES, quotient)
    return Prepared(rules, quotient, pins)


def _donated(traced: Traced, donate_argnums: int | Sequence[int] | None) -> tuple[bool, ...]:
    graph = traced.graph
    if donate_argnums is None:
        return tuple(graph.values[v].carried for v in graph.inputs)
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    return tuple(any(path.startswith(f"[{n}]") for n in numbers) for path in graph.input_paths)


def fallbacks(
    analysis: Analysis, rules: Sequence[FactorRule], limit_bytes: float
) -> tuple[str, ...]:
    """A line for each operation that has no sharding rule and runs whole on every device, the
    largest first. Lines on more than 1 % of ``limit_bytes`` end with ``LARGE``."""
    whole = sorted(held_whole(analysis.graph, rules), key=lambda w: -w.nbytes)
    return tuple(
        f"{w.name}: no rule, replicated"
        + (f" x{w.count}" if w.count > 1 else "")
        + f"; {bytes_text(w.nbytes)} of operands and results"
        + (" each" if w.count > 1 else "")
        + _share_text(w.nbytes / limit_bytes)
        for w in whole
    )


def _share_text(share: float) -> str:
    return f", {percent_text(share)} {LARGE}" if share > NOTICED else ""
