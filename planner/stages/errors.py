"""Why a step can't be cut into stages."""

from __future__ import annotations

from planner.errors import RequestError


class NoStagesError(RequestError):
    """The step can't be cut into the requested stages; says where and what would help."""


def refused(why: str) -> NoStagesError:
    """The error for a reason."""
    return NoStagesError(f"this step can't be cut into stages: {why}")
