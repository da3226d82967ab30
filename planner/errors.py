"""The error tree: what was wrong, where, got / expected, what to do."""

from __future__ import annotations


class MeshwrightError(Exception):
    """Root of every error that this project raises on purpose."""


class RequestError(MeshwrightError):
    """The request can't be met: a mesh, pin, mode, cluster or memory limit that can't hold."""


class NotPlannedError(RequestError, AttributeError):
    """A step was asked for its plan before it has one; ``hasattr(step, "plan")`` is False then."""


class PinError(RequestError):
    """A manual sharding that can't be honoured; names the value and the user's line."""


class MemoryLimitError(RequestError):
    """No plan fits.

    Attributes:
        least_bytes: the smallest peak per device that any plan found reaches.
        lower_bytes: no plan on the meshes tried has a smaller peak; 0 when that is not known.
        limit_bytes: the limit that was asked for.
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
    """The user's model failed while it was traced; ``__cause__`` is their exception."""


class InternalError(MeshwrightError):
    """A bug of ours: an invariant did not hold."""
