"""Why a step can't be cut into microbatches."""

from __future__ import annotations

from planner.errors import RequestError


class NotExactError(RequestError):
    """The step in microbatches would not equal the step on the whole batch; says where."""
