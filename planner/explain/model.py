"""What an explanation says, as plain data. Seconds and bytes of one device and one step."""

from __future__ import annotations

from dataclasses import dataclass

from planner.spec import Sharding


@dataclass(frozen=True)
class Dimension:
    """One dimension of a value and what may split it.

    ``axes`` split it in the plan; ``open_to`` are the mesh axes that could (alone); ``why`` says
    why no other ones can, or who reads it whole.
    """

    size: int
    axes: tuple[str, ...]
    open_to: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Change:
    """Another decision that an alternative changes, with ``count`` equal ones."""

    what: str
    before: str
    after: str
    count: int


@dataclass(frozen=True)
class Price:
    """What an alternative costs over the plan: step time, peak memory, and whether it fits."""

    extra_s: float
    extra_bytes: float
    fits: bool


@dataclass(frozen=True)
class Alternative:
    """Another sharding of a value.

    ``alone``: with everything else as planned. ``best``: with the best that was found around it,
    which changes ``changed`` other decisions, ``changes`` among them; None when nothing was found
    that fits.
    """

    stored: Sharding
    used: Sharding
    alone: Price
    best: Price | None
    changes: tuple[Change, ...]
    changed: int


@dataclass(frozen=True)
class Decision:
    """A value whose sharding was decided, together with ``shared`` others.

    ``equal`` such decisions are one, as in repeated layers. ``strategies`` are left of
    ``possible`` ones after pins and modes. ``forced`` says by what. ``unpriced`` alternatives have
    no row.
    """

    what: str
    shape: tuple[int, ...]
    dtype: str
    source: str
    stored: Sharding
    used: Sharding
    equal: int
    shared: int
    together: tuple[str, ...]
    dimensions: tuple[Dimension, ...]
    strategies: int
    possible: int
    forced: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    unpriced: int


@dataclass(frozen=True)
class Explanation:
    """Why values are sharded as they are.

    ``decisions`` are the largest that the target means, ``more`` names the others.
    """

    target: str
    mode: str
    cluster: str
    mesh: str
    step_s: float
    peak_bytes: float
    limit_bytes: float
    decisions: tuple[Decision, ...]
    more: tuple[str, ...]
