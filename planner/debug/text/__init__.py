"""Values between stages as text: one line per item, the same on every machine."""

from __future__ import annotations

import dataclasses
from typing import Any

from planner.cost.pricing import Priced
from planner.debug.stage import Stage
from planner.debug.text.analysis import analysis_text
from planner.debug.text.classes import classes_text
from planner.debug.text.groups import groups_text
from planner.debug.text.problem import problem_text, solution_text
from planner.search.problem import Solution


def stage_text(stage: Stage, values: tuple[Any, ...], *, whole: bool = False) -> str:
    """The values of a stage as text.

    Args:
        stage: the stage.
        values: the values that it passed to ``planner.debug.stages.passed``.
        whole: print every copy of repeated blocks, and the problem of the whole step instead of
            that of its classes.

    Returns:
        Lines, without a newline at the end.
    """
    first = values[0]
    if stage is Stage.GRAPH:
        return first.text(folded=not whole)  # type: ignore[no-any-return]
    if stage is Stage.GROUPS:
        return groups_text(first, values[1], folded=not whole)
    if stage is Stage.ANALYSIS:
        return analysis_text(first, folded=not whole)
    if stage is Stage.CLASSES:
        return classes_text(first)
    if stage is Stage.PROBLEM:
        priced: Priced = values[1] if whole else first
        return problem_text(priced)
    if stage is Stage.SOLUTION:
        tried: tuple[Priced, Solution] = values[1] if whole else first
        return solution_text(*tried)
    return str(dataclasses.replace(first, planning_s=0.0))
