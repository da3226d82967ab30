"""Describes how a step was rewritten: stages and schedule, microbatches, rematerialization."""

from __future__ import annotations

from costmodels.orders import (
    Simulated,
    Work,
    drawn,
    in_ticks,
    named_order,
    order_of_rows,
    simulate,
)
from planner.plan.plan import Plan
from planner.report.units import percent_text

_PLACES_NAMED = 6
"""Most lines that couple examples to name."""
_STAGES_DRAWN = 8
SCHEDULE_TITLE = (
    "schedule (a row per stage; digits: forward pass of that microbatch, letters: backward pass, "
    "drawn at twice the time; dots: idle)"
)
"""Title of the drawing of ``schedule_text``."""


NOTHING_AGAIN = (
    "nothing to compute again: no equal blocks, one after the other, that gradients pass"
)
"""Why ``remat`` has no effect."""
NO_CHUNKS = "none: no product is that large, or its rows need each other"
"""Why ``chunks`` has no effect."""


def in_vain(plan: Plan) -> list[str]:
    """Requested rewrites that have no effect."""
    out = []
    if plan.remat != "none" and not plan.recomputed:
        out.append(f"remat={plan.remat!r}: {NOTHING_AGAIN}")
    if plan.chunks > 1 and not plan.chunked:
        out.append(f"chunks={plan.chunks}: {NO_CHUNKS}")
    return out


def recipe_lines(plan: Plan) -> list[tuple[str, str]]:
    """How the step was rewritten: its stages, its microbatches, what it recomputes, and what it
    computes in chunks."""
    lines = [("stages", line) for line in plan.staged]
    if plan.microbatches > 1:
        text = f"{plan.microbatches}, one after the other; their gradients are added up"
        if plan.replicas > 1:
            text += f" in {plan.replicas} groups of devices, and reduced once per step"
        if plan.stages > 1:
            name, idle = (plan.schedule or "1F1B").upper(), ran(plan, plan.microbatches).bubble
            text = f"{plan.microbatches}, {name} through the stages"
            text += f", bubble {percent_text(idle)} where they are equal"
        lines.append(("microbatches", text))
        if plan.coupled:
            text = (
                f"of each microbatch (1 example in {plan.microbatches}), not of the whole batch: "
            )
            text += ", ".join(plan.coupled[:_PLACES_NAMED])
            left = len(plan.coupled) - _PLACES_NAMED
            lines.append(("statistics", text + (f" and {left} more" if left > 0 else "")))
    elif plan.replicas > 1:
        text = f"of {plan.replicas} groups of devices, each added up over the step's loops, and "
        lines.append(("gradients", f"{text}reduced once per step"))
    if plan.pad_batch:
        text = f"padded to {plan.pad_batch} examples"
        if plan.examples:
            text += f", {percent_text(plan.pad_batch / plan.examples - 1.0)} more"
        lines.append(("batch", f"{text}; sums leave these out"))
    if plan.remat != "none":
        again = plan.recomputed or (NOTHING_AGAIN,)
        lines += [("remat", f"{plan.remat}: {line}") for line in again]
    if plan.chunks > 1:
        lines += [("chunks", line) for line in plan.chunked or (NO_CHUNKS,)]
    return lines


def schedule_text(plan: Plan) -> str:
    """A drawing of the order of passes of a plan with stages; empty without stages, or if there are
    too many to draw."""
    if not 1 < plan.stages <= _STAGES_DRAWN:
        return ""
    shown = plan.microbatches if plan.order else min(plan.microbatches, 2 * plan.stages)
    ticks = shown + plan.stages - 1
    left = plan.microbatches - shown
    drawing = drawn(ran(plan, shown), columns=3 * ticks)
    return drawing + (f"\n{left} more microbatches run the same way between these" if left else "")


def ran(plan: Plan, microbatches: int) -> Simulated:
    """The schedule of a plan with equal stages; a backward pass takes twice a forward pass."""
    if not plan.schedule:
        return in_ticks(plan.stages, microbatches, Work(1.0, 2.0))
    if plan.order:
        order = order_of_rows(plan.schedule, plan.order)
    else:
        order = named_order(plan.schedule, plan.stages, microbatches)
    one = Work(1.0, 1.0, 1.0) if order.splits_weights else Work(1.0, 2.0)
    return simulate(order, [one] * len(order.place))
