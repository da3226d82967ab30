"""Pads a batch that the number of devices does not divide, if that pays."""

from __future__ import annotations

import dataclasses
import time

from planner.choose.simplest import PADDING
from planner.errors import MemoryLimitError, RequestError
from planner.microbatch.rewrite import batch_size
from planner.plan.assemble import NOT_SPLIT, PADS
from planner.planning.open_recipes import Door, searched
from planner.planning.row import Planned
from planner.recipes import WORTH, Wish
from planner.report.units import time_text

EXCLUSIVE = frozenset({"pad_batch", "microbatches", "replicas", "stages"})
"""Options that are not combined with padding."""


def with_padding(planned: Planned, wish: Wish, door: Door) -> Planned:
    """The plan, or the plan of the step padded to the next multiple of the number of devices, if
    that is predicted to be faster or the mode is to split the batch. A note in the plan records the
    outcome."""
    plan, devices = planned.plan, planned.request.cluster.num_devices
    try:
        examples = batch_size(door.row_of(wish.recipe).traced)
    except RequestError as error:  # no argument is a batch
        return _refused(planned, f"batch not padded: {error}", door)
    if examples % devices == 0:
        return planned
    if plan.microbatches > 1 or plan.stages > 1:
        return _refused(planned, "batch not padded: the step runs in microbatches", door)
    rows = -(-examples // devices) * devices
    padded = Wish(
        dataclasses.replace(wish.recipe, pad_batch=rows), wish.open - EXCLUSIVE, wish.always
    )
    try:
        padded_plan = searched(padded, door)
    except MemoryLimitError:
        return _refused(planned, f"batch not padded to {rows}: that does not fit", door)
    except RequestError as error:
        return _refused(planned, f"batch not padded: {error}", door)
    steps = [time_text(x.plan.prediction.step_s) for x in (padded_plan, planned)]
    demanded = planned.request.mode == "DATA_PARALLEL"
    if not demanded and padded_plan.plan.prediction.step_s * WORTH >= plan.prediction.step_s:
        why = f"{steps[0]} predicted instead of {steps[1]}"
        return _refused(planned, f"batch not padded to {rows}: {why}", door)
    return _noted(
        padded_plan, f"batch padded to {rows}: {' instead of '.join(steps)} predicted", door
    )


def _noted(planned: Planned, note: str, door: Door) -> Planned:
    seconds = time.perf_counter() - door.begun
    plan = planned.plan
    return dataclasses.replace(
        planned,
        plan=dataclasses.replace(plan, notes=(*plan.notes, note), planning_s=seconds),
    )


def _refused(planned: Planned, note: str, door: Door) -> Planned:
    """The plan with a note on why the batch is not padded, which replaces the advice to pad it."""
    plan = planned.plan
    idle = plan.idle
    if PADDING in idle:
        idle = f"{idle.replace(f' {PADDING}', '')}; {note}"
    notes = tuple(n.replace(PADS, "") if NOT_SPLIT in n else n for n in plan.notes)
    plan = dataclasses.replace(plan, idle=idle, notes=notes)
    return _noted(dataclasses.replace(planned, plan=plan), note, door)
