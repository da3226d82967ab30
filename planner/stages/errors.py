"""Why a step can't be cut into stages."""

from __future__ import annotations

from planner.errors import RequestError


class NoStagesError(RequestError):
    """The step has no pipeline of that many equal stages; says where and what would help."""


def refused(why: str) -> NoStagesError:
    """The error with the words around it."""
    return NoStagesError(f"this step can't be cut into stages: {why}")
