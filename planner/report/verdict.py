"""Why a mesh was left, in words."""

from __future__ import annotations

from planner.report.units import bytes_text, time_text

UNFIT = "does not fit"
PRUNED = "pruned"


def unfit_text(needs_bytes: float, has_bytes: float) -> str:
    """The best plan found on the mesh takes more memory than a device has."""
    return f"{UNFIT}: needs {bytes_text(needs_bytes)}, has {bytes_text(has_bytes)}"


def pruned_text(bound_s: float, best_s: float) -> str:
    """No plan was looked for: the bound alone puts the mesh out of the question.

    Either it is not below the best plan's time, or so little below it that the best plan's mesh,
    which has fewer axes, would be taken all the same.
    """
    if bound_s >= best_s:
        return f"{PRUNED}: bound {time_text(bound_s)} above the best {time_text(best_s)}"
    gain = 100.0 * (1.0 - bound_s / best_s)
    return f"{PRUNED}: at most {gain:.2g} % faster, for another axis"
