"""The error tree. Messages say what was wrong, where, got / expected, and what to do."""

from __future__ import annotations


class MeshwrightError(Exception):
    """Root of every error that this project raises on purpose."""


class RequestError(MeshwrightError):
    """The request can't be met: a mesh, pin, mode, cluster or memory limit that can't hold."""


class NotPlannedError(RequestError, AttributeError):
    """The step has no plan yet; ``hasattr(step, "plan")`` is False then."""


class PinError(RequestError):
    """A manual sharding that can't be honored; names the value and the user's line."""


class MemoryLimitError(RequestError):
    """No plan fits.

    Attributes:
        least_bytes: the smallest peak per device that the search reached.
        lower_bytes: lower bound on the peak of any plan on the meshes tried; 0 if not known.
        limit_bytes: the requested limit.
    """

    def __init__(
        self, message: str, *, least_bytes: float, lower_bytes: float, limit_bytes: float
    ) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
        self.lower_bytes = lower_bytes
        self.limit_bytes = limit_bytes


class PlanMismatchError(RequestError):
    """A plan that was made for another step, other shapes or another cluster."""


class PlanFormatError(RequestError):
    """A plan file that can't be read."""


class ModelError(MeshwrightError):
    """The user's model failed while it was traced; ``__cause__`` is its exception."""


class InternalError(MeshwrightError):
    """A bug of this project: an invariant did not hold."""
