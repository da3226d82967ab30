"""Parses the options for microbatches, rematerialization, chunks and stages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from costmodels.orders import Order, OrderError, Work, chunks_of, read_order, rows_of, simulate
from planner.errors import RequestError
from planner.recipes.recipe import recipe_of
from planner.remat.policy import NONE, policy_text
from planner.spec import PER_MICROBATCH, PLAIN, REWRITINGS, WHOLE, Recipe

AUTO = "auto"


@dataclass(frozen=True)
class Wish:
    """A requested recipe, parts of which may be open.

    Attributes:
        recipe: the given options; open ones have the values of the plain step.
        open: names of the options that the search may choose.
        always: whether to search for a recipe faster than the plain step even if that fits
            (``"auto"``), not only if no plan of the plain step fits.
    """

    recipe: Recipe
    open: frozenset[str]
    always: bool


def parse_wish(options: Mapping[str, Any], function: Callable[..., Any], searches: bool) -> Wish:
    """Check and parse ``microbatches=``, ``remat=``, ``chunks=``, ``stages=`` and their like.

    Args:
        options: by name, a number or a policy, ``"auto"``, or None for the plain step's if that
            fits.
        function: the step; one that is rewritten already keeps its recipe.
        searches: whether options that are None may be searched if nothing fits.

    Raises:
        RequestError: an option has an invalid value.
    """
    old_recipe = recipe_of(function)
    if old_recipe != PLAIN:
        return Wish(old_recipe, frozenset(), False)
    manual = _manual(options.get("stages"))
    order = _order(options.get("schedule"))
    if order is not None:
        options = _by_order(order, options, manual)
    if manual:
        _schedule(options)
        count = max(stage for _, stage in manual) + 1
        options = {"schedule": SCHEDULES[0], **_given(options), "stages": count}
    remat = options.get("remat")
    recipe = Recipe(
        _number("microbatches", options.get("microbatches")),
        NONE if remat in (None, AUTO) else policy_text(remat),
        _number("chunks", options.get("chunks")),
        _number("stages", options.get("stages")),
        _schedule(options),
        _number("replicas", options.get("replicas")),
        _rows(options),
        _statistics(options),
        manual,
        order=() if order is None else rows_of(order),
    )
    values = {name: options.get(name) for name in REWRITINGS}
    left = {name for name, v in values.items() if v == AUTO or (v is None and searches)}
    if values["stages"] is None:  # a step that fits needs none, and one that does not gains little
        left.discard("stages")
    left -= {"schedule", "statistics"}
    if recipe.statistics != WHOLE:  # statistics must not depend on the devices
        left -= {"stages", "pad_batch"}
    if values["replicas"] in (None, AUTO) and recipe.statistics == WHOLE:
        left.add("replicas")
    else:
        left.discard("replicas")
    if values["pad_batch"] != AUTO:
        left.discard("pad_batch")
    if recipe.pad_batch:
        left -= {"microbatches", "replicas", "stages"}
    if recipe.stages > 1 and values["microbatches"] is None:
        left.add("microbatches")
    beside = ("stages", "replicas", "pad_batch")
    always = any(v == AUTO for name, v in values.items() if name not in beside)
    return Wish(recipe, frozenset(left), always or (recipe.stages > 1 and "remat" in left))


def _statistics(options: Mapping[str, Any]) -> str:
    """Whether statistics are those of the whole batch or of each microbatch."""
    value = options.get("statistics")
    if value in (None, WHOLE):
        return WHOLE
    if value != PER_MICROBATCH:
        raise RequestError(f"statistics={value!r}: expected {WHOLE!r} or {PER_MICROBATCH!r}")
    for name in ("stages", "replicas", "pad_batch"):
        if options.get(name) not in (None, 1, "1", 0, "0", NONE):
            raise RequestError(
                f"statistics={value!r} goes with microbatches alone; leave "
                f"{name}={options[name]!r} out"
            )
    return PER_MICROBATCH


def _rows(options: Mapping[str, Any]) -> int:
    """Examples of the padded batch; 0 where it is not padded, or the search decides."""
    value = options.get("pad_batch")
    if value in (None, AUTO, 0, "0", NONE):
        return 0
    rows = _number("pad_batch", value)
    for name in ("microbatches", "replicas", "stages"):
        if options.get(name) not in (None, 1, "1", AUTO):
            raise RequestError(
                f"pad_batch={rows} and {name}={options[name]!r}: a padded batch is not cut up; "
                "leave one of them out"
            )
    return rows


SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2")
"""Schedules of stages that are separate programs, the simplest first."""
IN_CHUNKS = ("interleaved-2", "zb-v")
"""Such schedules with two chunks on each group of devices."""


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _manual(stages: Any) -> tuple[tuple[str, int], ...]:
    """(pattern, stage) of ``stages={"regex": k}``, or of ``"regex=k,regex=k"``."""
    if isinstance(stages, str) and "=" in stages:
        parts = [part.rpartition("=") for part in stages.split(",")]
        stages = {name: int(k) if k.isdecimal() else k for name, _, k in parts}
    if not isinstance(stages, Mapping):
        return ()
    for pattern, stage in stages.items():
        if not isinstance(pattern, str) or isinstance(stage, bool) or not isinstance(stage, int):
            raise RequestError(
                f"stages={{{pattern!r}: {stage!r}}}: expected a regular expression over paths or "
                "lines, and the number of a stage"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise RequestError(
                f"stages={{{pattern!r}: ...}}: no regular expression: {error}"
            ) from None
    numbers = set(stages.values())
    if len(numbers) < 2 or numbers != set(range(len(numbers))):
        raise RequestError(
            f"stages= names the stages {sorted(numbers)}; expected all from 0 to the last, "
            "two or more"
        )
    return tuple(stages.items())


def _schedule(options: Mapping[str, Any]) -> str:
    name = options.get("schedule")
    if name is None:
        return ""
    if isinstance(name, Order):
        return name.name
    name = name.lower() if isinstance(name, str) else name
    known = name in (*SCHEDULES, AUTO) or (isinstance(name, str) and chunks_of(name) > 1)
    if not known:
        raise RequestError(
            f"schedule={name!r}: expected auto, one of {', '.join(SCHEDULES)}, zb-v, interleaved-2 "
            "with the number of chunks per device, or a file of your own (schedule.json)"
        )
    if chunks_of(name) > 1 and _manual(options.get("stages")):
        raise RequestError(f"schedule={name!r}: manual stages have one chunk per device")
    if options.get("stages") in (None, 1, "1"):
        raise RequestError(
            f"schedule={name!r} orders the passes of pipeline stages; give stages=2 or more, or "
            "auto, too"
        )
    return str(name)


def is_file(name: Any) -> bool:
    """Whether a schedule is given as a file."""
    return isinstance(name, os.PathLike) or (isinstance(name, str) and name.endswith(".json"))


def _order(schedule: Any) -> Order | None:
    """A user-defined schedule; None for one that is given by name.

    Raises:
        RequestError: the file is not a schedule, devices deadlock, or fewer than two groups of
            devices have passes.
    """
    if not isinstance(schedule, Order) and not is_file(schedule):
        return None
    try:
        order = schedule if isinstance(schedule, Order) else read_order(schedule)
        simulate(order, [Work(1.0, 1.0, 1.0)] * len(order.place))
    except OrderError as error:
        raise RequestError(f"schedule: {error}") from None
    if len(order.devices) < 2 or not all(order.devices):
        raise RequestError(
            f"schedule {order.name!r}: expected passes for two groups of devices or more"
        )
    return order


def _by_order(
    order: Order, options: Mapping[str, Any], manual: tuple[tuple[str, int], ...]
) -> dict[str, Any]:
    """The options, with the numbers of stages and microbatches of an order."""
    stages, given = len(order.devices), options.get("stages")
    if manual:
        given = max(stage for _, stage in manual) + 1
        if len(order.place) > stages:
            raise RequestError(
                f"schedule {order.name!r} has {len(order.place)} chunks on {stages} groups of "
                "devices; manual stages have one each"
            )
    for name, count, said in (
        ("stages", stages, given),
        ("microbatches", order.microbatches, options.get("microbatches")),
    ):
        if said not in (None, AUTO, count, str(count)):
            raise RequestError(f"{name}={said}: schedule {order.name!r} is one of {count} {name}")
    here = options.get("stages") if manual else stages
    return {**options, "schedule": order, "stages": here, "microbatches": order.microbatches}


def _number(name: str, value: Any) -> int:
    if value in (None, AUTO):
        return 1
    error = RequestError(f"{name}={value!r}: expected a whole number from 1 on, or auto")
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            raise error from None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise error
    return value
