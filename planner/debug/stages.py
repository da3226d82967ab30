"""Checks the values of a planning stage, or returns them, on request.

The entry point (`planner.planning`) calls `passed` at the end of every stage. Without the
environment variable and outside of `reached`, that call only compares.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from planner.debug.stage import Stage
from planner.errors import InternalError

FLAG = "MESHWRIGHT_VERIFY"
"""Environment variable; ``1``: the values of every stage are checked when the stage ends."""


class _Reached(Exception):
    """Raised at the end of the requested stage, with its values."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__()
        self.values = values


_LAST: ContextVar[Stage | None] = ContextVar("last stage", default=None)


def passed(stage: Stage, *values: Any) -> None:
    """Pass on the values of a stage that ended.

    Raises:
        InternalError: an invariant does not hold (under ``MESHWRIGHT_VERIFY=1``).
    """
    if os.environ.get(FLAG) == "1":
        from planner.debug.check import CHECKS

        CHECKS[stage](*values)
    if _LAST.get() is stage:
        raise _Reached(values)


def reached(last: Stage, plan: Callable[[], object]) -> tuple[Any, ...]:
    """Run the planning of a step up to the end of a stage.

    Args:
        last: the stage; what comes after it does not run.
        plan: plans a step, as ``planner.planning.plan_step`` does.

    Returns:
        The values of the stage.

    Raises:
        InternalError: ``plan`` returned before that.
    """
    token = _LAST.set(last)
    try:
        plan()
    except _Reached as signal:
        return signal.values
    finally:
        _LAST.reset(token)
    raise InternalError(f"planning ended before stage {last}")
