"""What planning does with the value of a stage: check it if asked, hand it out if asked.

The door (`planner.planning`) calls `passed` wherever a stage ends. Without the environment variable
and outside of `reached` that is one comparison.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from planner.debug.stage import Stage
from planner.errors import InternalError

FLAG = "MESHWRIGHT_VERIFY"
"""Environment variable; ``1``: every value is checked as soon as a stage has made it."""


class _Reached(Exception):
    """The stage that was asked for has made these values."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__()
        self.values = values


_LAST: ContextVar[Stage | None] = ContextVar("last stage", default=None)


def passed(stage: Stage, *values: Any) -> None:
    """Note that a stage has made its values.

    Raises:
        InternalError: under ``MESHWRIGHT_VERIFY=1``, an invariant that does not hold.
    """
    if os.environ.get(FLAG) == "1":
        from planner.debug.check import CHECKS

        CHECKS[stage](*values)
    if _LAST.get() is stage:
        raise _Reached(values)


def reached(last: Stage, plan: Callable[[], object]) -> tuple[Any, ...]:
    """Run a planning up to the end of a stage.

    Args:
        last: the stage; what comes after it does not run.
        plan: plans a step, as ``planner.planning.plan_step`` does.

    Returns:
        The values that the stage made.

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
