"""The rows of a plan: arrays, constraints, collectives, meshes, the search and others."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from planner.spec import Sharding


@dataclass(frozen=True)
class Leaf:
    """One array argument or result: its place in the pytree and its sharding."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Sharding
    nbytes_per_device: int
    used_as: Sharding | None = None
    """Sharding with which operations read it, if it differs from ``spec`` (ZeRO-3)."""
    tied: bool = False
    frozen: bool = False
    """Weights that a step reads and does not return; not examples."""
    rows: bool = False
    """State with a row per example: hidden states, caches, environments."""
    memory: str = "device"
    """Memory kind in which it is stored between its uses, by JAX's name."""
    fetched: tuple[tuple[int, int], ...] = ()
    """If that is not the device: the first and the last operation that read each copy of it."""


@dataclass(frozen=True)
class Constraint:
    """Sharding of operand (``slot`` "in") or result ("out") ``position`` of operation ``op``.

    ``"from"`` is the sharding of an operand before it changes to "in". ``"made"`` is the sharding
    with which the operation computes its result. ``"after"`` is an intermediate sharding of a
    change to "out", before its gathers.
    """

    op: int
    slot: str
    position: int
    spec: Sharding


@dataclass(frozen=True)
class CollectiveRow:
    """A collective that the plan causes.

    ``payload_bytes`` per device and ``time_s`` are for one of its ``count`` runs per step.
    """

    kind: str
    axes: tuple[str, ...]
    count: float
    payload_bytes: float
    time_s: float
    value: str
    source: str
    cause: str


@dataclass(frozen=True)
class Activation:
    """A large value between operations and its sharding."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: Sharding
    nbytes_per_device: int
    source: str


@dataclass(frozen=True)
class PinRow:
    """How a pin is honored: its rule, the sharding that it requests, and ``how`` in words, with the
    number of arrays that this applies to and the path of the ``first``."""

    pin: str
    asked: str
    how: str
    arrays: int
    first: str


class MeshVerdict(StrEnum):
    """The outcome for a mesh; ``planner.report.verdict`` has the texts."""

    CHOSEN = "chosen"
    SLOWER = "slower"
    UNFIT = "unfit"
    """The best plan found on it takes more memory than a device has."""
    UNSEARCHED = "unsearched"
    """Its first choice takes more memory than a device has, and no search ran on it: few meshes are
    searched, fewer where searches stay well above their bounds. A plan on it may fit."""
    PRUNED = "pruned"
    """Its lower bound alone rules it out."""


@dataclass(frozen=True)
class MeshRow:
    """A logical mesh that was tried, and why it was chosen or rejected."""

    mesh: str
    cost_s: float
    lower_bound_s: float
    peak_bytes: float
    verdict: MeshVerdict


@dataclass(frozen=True)
class DecisionRow:
    """A decision about a result of an operation besides its sharding: the name of the decision, the
    option in words, and the value as text."""

    decision: str
    option: str
    op: int
    position: int
    value: str


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of one step on one device (seconds, bytes)."""

    compute_s: float
    communication_s: float
    overlapped_s: float
    step_s: float
    peak_bytes: float
    limit_bytes: float
    peak_holders: tuple[str, ...]
    host_s: float = 0.0
    """Exposed copies between the device and its host, part of ``step_s``."""
    host_bytes: float = 0.0
    """Most bytes per device in host memory: state, and values for the backward pass."""
    feed_s: float = 0.0
    """Seconds of feeding the batch in the search's cost; not part of ``step_s``."""
    device_bytes: float = 0.0
    """Memory of a device if ``limit_bytes`` is that less a reserve; 0 if the limit was given."""


@dataclass(frozen=True)
class SearchReport:
    """The search that ran, the quality of its result and why it stopped."""

    name: str
    cost_s: float
    lower_bound_s: float
    gap: float
    reason: str
