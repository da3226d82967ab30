"""Explanations as plain data. Seconds and bytes are per device and step."""

from __future__ import annotations

from dataclasses import dataclass

from planner.spec import Sharding


@dataclass(frozen=True)
class Dimension:
    """One dimension of a value and what may split it.

    ``axes`` split it in the plan; ``open_to`` are the mesh axes that could (alone); ``why`` says
    why no others can, or what reads it whole.
    """

    size: int
    axes: tuple[str, ...]
    open_to: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Change:
    """A change of other decisions, ``count`` equal ones, that an alternative causes."""

    what: str
    before: str
    after: str
    count: int


@dataclass(frozen=True)
class Price:
    """Price of an alternative relative to the plan: step time, peak memory, whether it fits."""

    extra_s: float
    extra_bytes: float
    fits: bool


@dataclass(frozen=True)
class Alternative:
    """Another sharding of a value.

    ``alone``: with everything else as planned. ``best``: with the best completion around it, which
    changes ``changed`` other decisions, ``changes`` among them; None if no completion fits.
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

    ``equal``: number of equal decisions that are made as one, as in repeated layers. Pins and modes
    leave ``strategies`` of ``possible`` ones. ``forced``: what forces the choice. ``unpriced``:
    number of alternatives without a row.
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

    ``decisions`` are the largest that match the target; ``more`` names the others.
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
