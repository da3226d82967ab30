"""The traceback of a user's model, without the frames of libraries and of the planner."""

from __future__ import annotations

import os
import sysconfig
import traceback

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
_HIDDEN = tuple(
    os.path.realpath(path) + os.sep
    for path in (
        *(
            os.path.join(_ROOT, room)
            for room in ("meshwright", "planner", "planner_command", "executor", "costmodels")
        ),
        *(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")),
    )
)
_JAX_NOTE = "JAX has removed its internal frames"
_JAX_CAUSES = ("UnfilteredStackTrace", "JaxStackTraceBeforeTransformation")


def failure_text(error: BaseException, keep: str = "") -> str:
    """Format ``error`` and its causes, with frames of the user's files only.

    Args:
        error: the user's exception.
        keep: a file that counts as the user's wherever it is.

    Returns:
        Text that ends with the exception line.
    """
    parts = []
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        parts.append(_one(current, keep))
        current, joint = _before(current)
        if current is not None:
            parts.append(f"\n{joint}\n\n")
    return "".join(reversed(parts)).rstrip("\n")


def _before(error: BaseException) -> tuple[BaseException | None, str]:
    """The exception that came before this one, and how Python words the link."""
    if error.__cause__ is not None and type(error.__cause__).__name__ not in _JAX_CAUSES:
        return error.__cause__, (
            "The above exception was the direct cause of the following exception:"
        )
    context = None if error.__suppress_context__ else error.__context__
    if context is not None and type(context).__name__ in _JAX_CAUSES:
        context = None
    return context, "During handling of the above exception, another exception occurred:"


def _one(error: BaseException, keep: str) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_user(f.filename, keep)]
    notes = getattr(error, "__notes__", None)
    if notes:
        notes[:] = [note for note in notes if _JAX_NOTE not in note]
    lines = traceback.format_exception_only(error)
    if frames:
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames), *lines]
    return "".join(lines)


def _is_user(filename: str, keep: str) -> bool:
    if filename.startswith("<"):
        return False
    path = os.path.realpath(filename)
    return not path.startswith(_HIDDEN) or bool(keep and path == os.path.realpath(keep))
