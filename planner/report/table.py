"""A plan as a text report: the summary first, then the sources of every number. No jax."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.plan.compiled.option_sets import COUNTED, OFFLOADED, options_text, without_defaults
from planner.plan.plan import LARGE, Plan
from planner.report.layout import pairs, plain_text, section, show, text_lines
from planner.report.sections.recipe import SCHEDULE_TITLE, recipe_lines, schedule_text
from planner.report.sections.tables import (
    activations,
    candidates,
    collectives,
    compute,
    holders,
    inputs,
    meshes,
    pins,
    replicated,
    search_lines,
)
from planner.report.units import bytes_text, limit_text, percent_text, time_text
from planner.report.verdict import choice_text, devices_text, likely_text, proof_text

_BLOCKS = "counts on collectives on SparseCores (compiler options); by default they block"


def plan_text(plan: Plan, width: int = 100) -> str:
    """The report as plain ASCII text, ``width`` columns wide, without color."""
    return plain_text(_parts(plan), width)


def render_plan(plan: Plan, console: Console) -> None:
    """Print the report on a console."""
    show(_parts(plan), console)


def _parts(plan: Plan) -> Iterable[RenderableType]:
    yield Text(f"plan: {plan.mode} on {plan.cluster}", style="bold")
    yield ""
    yield Padding(_summary(plan), (0, 0, 0, 2), expand=False)
    if schedule := schedule_text(plan):
        yield from section(SCHEDULE_TITLE, Text(schedule))
    yield from section("meshes tried", meshes(plan))
    yield from inputs(plan)
    if plan.pins:
        yield from section("pins", pins(plan))
    if plan.compute:
        yield from section("most compute", compute(plan))
    yield from section("largest activations", activations(plan))
    yield from section(*collectives(plan))
    yield from section("peak memory is held by", holders(plan))
    yield from replicated(plan)
    yield from section("fallbacks (operations without a rule)", text_lines(plan.fallbacks))
    if plan.notes:
        yield from section("notes", text_lines(plan.notes))
    if plan.confirmed is not None and plan.confirmed.rows:
        yield from section("compiled candidates", candidates(plan))
    yield from section("search", search_lines(plan))


def _summary(plan: Plan) -> RenderableType:
    p, s = plan.prediction, plan.search
    memory = f"{bytes_text(p.peak_bytes)} per device at the peak"
    if p.limit_bytes > 0:
        limit = limit_text(p.limit_bytes, p.device_bytes)
        memory += f", {percent_text(p.peak_bytes / p.limit_bytes)} of {limit}"
    return pairs(
        (
            *_whole(plan),
            *([("strategy", plan.strategy)] if plan.strategy else []),
            *([("idle", plan.idle)] if plan.idle else []),
            (
                "mesh",
                f"{plan.mesh} ({devices_text(plan.mesh.num_devices)}): {choice_text(plan)}",
            ),
            (
                "step time",
                f"{time_text(p.step_s)} predicted = {time_text(p.compute_s)} compute + "
                f"{time_text(p.communication_s)} communication - "
                f"{time_text(p.overlapped_s)} overlapped"
                + (f" + {time_text(p.host_s)} to and from the host" if p.host_s else "")
                + _idle_text(plan),
            ),
            *([("likely", likely)] if (likely := likely_text(plan)) else []),
            *([("overlap", _BLOCKS)] if _hides_only_with_options(plan) else []),
            *recipe_lines(plan),
            ("peak memory", memory),
            *([("compiled", _confirmed_text(plan))] if plan.confirmed else []),
            *([("host memory", _host_text(plan))] if p.host_bytes else []),
            *([("options", options_text(plan.compiler_options))] if plan.compiler_options else []),
            ("gap", f"{percent_text(s.gap)}: {proof_text(plan)}"),
            ("fallbacks", str(len(plan.fallbacks)) if plan.fallbacks else "none"),
        )
    )


def _whole(plan: Plan) -> list[tuple[str, str]]:
    """Operations without a rule that take much memory; the summary starts with them."""
    large = [line for line in plan.fallbacks if line.endswith(LARGE)]
    if not large:
        return []
    more = f"; {len(large) - 1} more like it, see fallbacks" if len(large) > 1 else ""
    return [("not split", f"{large[0]}{more}")]


def _hides_only_with_options(plan: Plan) -> bool:
    """Whether collectives that count as overlapped block under the plan's compiler options."""
    kind, options = plan.cluster.partition(":")[0], without_defaults(plan.compiler_options)
    confirmed = plan.confirmed is not None and plan.confirmed.chosen is not None
    counted = kind in COUNTED and options != OFFLOADED and not confirmed
    return counted and plan.prediction.overlapped_s > 0


def _idle_text(plan: Plan) -> str:
    """The time that the busiest stage waits for the others, if stages are separate programs."""
    p = plan.prediction
    idle_s = p.step_s - (p.compute_s + p.communication_s - p.overlapped_s + p.host_s)
    return f" + {time_text(idle_s)} idle" if plan.schedule and idle_s > 0 else ""


def _confirmed_text(plan: Plan) -> str:
    """Compiled step time and peak memory, or why the plan is not confirmed."""
    said = plan.confirmed
    row = said.chosen if said is not None else None
    if said is None or row is None:
        return f"not confirmed: {(said.note if said else '').removeprefix('not confirmed: ')}"
    return (
        f"{time_text(row.step_s)}, peak {bytes_text(row.peak_bytes)} ({said.compiler}); best of "
        f"{len(said.rows)} candidates"
    )


def _host_text(plan: Plan) -> str:
    count = sum(leaf.memory != "device" for leaf in plan.inputs)
    size = f"{bytes_text(plan.prediction.host_bytes)} per device"
    if not count:
        return f"{size}, activations that wait for the backward pass"
    arrays = "1 array of the state" if count == 1 else f"{count} arrays of the state"
    state = sum(leaf.nbytes_per_device for leaf in plan.inputs if leaf.memory != "device")
    if plan.prediction.host_bytes > state:
        return f"{size}, {arrays} and activations that wait for the backward pass"
    return f"{size} between uses, {arrays}"
