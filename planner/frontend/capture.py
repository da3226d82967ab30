"""How ``planner inspect script.py`` obtains a step: inside ``capturing``, the first call of a
parallelized function is captured instead of run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CapturedCall:
    """A parallelized function, its arguments and the options given to ``parallelize``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]


class Captured(BaseException):
    """Ends the script once its first parallelized call is known; carries the call."""

    def __init__(self, call: CapturedCall) -> None:
        super().__init__("captured")
        self.call = call


_active = False


@contextmanager
def capturing() -> Iterator[None]:
    """Within this context ``offer`` raises ``Captured``."""
    global _active
    before, _active = _active, True
    try:
        yield
    finally:
        _active = before


def is_on() -> bool:
    """Whether a call would be captured."""
    return _active


def call_of(function: Any, args: Sequence[Any]) -> CapturedCall | None:
    """The call of a step that is already parallelized, with its options; None for other steps.

    Raises:
        RequestError, and whatever else the step raises before it plans.
    """
    to_plan, prepare = (getattr(function, name, None) for name in ("to_plan", "prepare"))
    if callable(to_plan):
        call: CapturedCall = to_plan(*args)
        return call
    if not callable(prepare):
        return None
    try:
        with capturing():
            prepare(*args)
    except Captured as captured:
        return captured.call
    return None


def offer(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Called by ``parallelize`` before it plans; raises Captured while capturing."""
    if _active:
        raise Captured(CapturedCall(function, args, options))
