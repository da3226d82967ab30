"""The rows of a plan: what it says of an array, a constraint, a collective, a mesh, a search."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from planner.spec import Sharding


@dataclass(frozen=True)
class Leaf:
    """One array argument or result: where it stands in the pytree and how it is sharded."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Sharding
    nbytes_per_device: int
    used_as: Sharding | None = None
    """Sharding under which operations see it, when it differs from ``spec`` (ZeRO-3)."""
    tied: bool = False
    frozen: bool = False
    """Weights that a step reads and does not hand back: no examples."""
    rows: bool = False
    """State with a row per example: hidden states, caches, environments."""
    memory: str = "device"
    """Memory kind in which it lives between its uses, by jax's name."""
    fetched: tuple[tuple[int, int], ...] = ()
    """Where that is not the device: the first and the last operation that read each copy of it."""


@dataclass(frozen=True)
class Constraint:
    """Sharding of operand (``slot`` "in") or result ("out") ``position`` of operation ``op``.

    ``"from"`` is that of an operand before it changes to "in". ``"made"`` is what the operation
    itself gives its result, ``"after"`` where a change to "out" stands before it gathers.
    """

    op: int
    slot: str
    position: int
    spec: Sharding


@dataclass(frozen=True)
class CollectiveRow:
    """A collective that the plan causes.

    ``payload_bytes`` per device and ``time_s`` are for one of its ``count`` runs a step.
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
    """How a pin was honored: by its rule, what it asks, and ``how`` in words, with the number of
    arrays it is true of and the ``first`` of them."""

    pin: str
    asked: str
    how: str
    arrays: int
    first: str


class MeshVerdict(StrEnum):
    """What became of a mesh; ``planner.report.verdict`` has the words."""

    CHOSEN = "chosen"
    SLOWER = "slower"
    UNFIT = "unfit"
    """The best plan found on it takes more memory than a device has."""
    UNSEARCHED = "unsearched"
    """Its first choice takes more memory than a device has, and no search ran on it: few meshes are
    searched, fewer where searches stay well above their bounds. A plan on it may fit."""
    PRUNED = "pruned"
    """Its bound alone puts it out of the question."""


@dataclass(frozen=True)
class MeshRow:
    """A logical mesh that was tried, and why it was kept or left."""

    mesh: str
    cost_s: float
    lower_bound_s: float
    peak_bytes: float
    verdict: MeshVerdict


@dataclass(frozen=True)
class DecisionRow:
    """What is decided about a result of an operation besides its sharding: the name of the
    decision, the option in words, and the value as text."""

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
    """Copies between the device and its host that do not hide, part of ``step_s``."""
    host_bytes: float = 0.0
    """What the device keeps in its host's memory between steps."""
    feed_s: float = 0.0
    """What feeding the batch counts for in the search's cost; no part of ``step_s``."""
    device_bytes: float = 0.0
    """Memory of a device, where ``limit_bytes`` is that less a reserve; 0 where it was given."""


@dataclass(frozen=True)
class SearchReport:
    """Which search, how good its answer is and why it stopped."""

    name: str
    cost_s: float
    lower_bound_s: float
    gap: float
    reason: str
