"""The facts of a group: one hashable record that alone determines its cost.

Groups with equal facts have the same strategies and, under one cost model, the same seconds for
each of them, on every mesh. So groups with equal facts can be folded (``planner.step.classes``),
and caches of prices use facts as keys (``planner.cost.pricing``). A new kind of decision adds a
field here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

from costmodels.collectives import Collective
from planner.space.factors import Layout
from planner.space.groups import Group
from planner.step.feeding import Fed
from planner.step.kernels.costs import Work


@dataclass(frozen=True)
class Reduction:
    """A collective inside a group: the result's bytes and factors, and the summed factors; ``op``
    is the index of the operation, which is not a fact. It is an all-reduce; with ``shifts``, it
    instead moves rows to the neighbors along the factor, and ``nbytes`` is the size of a row."""

    over: frozenset[int]
    kept: frozenset[int]
    nbytes: float
    weight: float
    op: int = field(compare=False)
    gradient: bool = False
    shifts: bool = False


@dataclass(frozen=True)
class Said:
    """A collective that the user wrote in a ``shard_map``: kind, mesh axes by position, payload per
    device, and number of runs per step; ``op`` is not a fact."""

    kind: Collective
    axes: tuple[int, ...]
    nbytes: float
    weight: float
    op: int = field(compare=False)


@dataclass(frozen=True)
class Facts:
    """The facts that determine the strategies and the seconds of a group.

    Attributes:
        kind, sizes, shardable, reduction, decisions: those of the group.
        work: see ``Work``.
        reductions: all-reduces and shifts inside it.
        said: collectives that the user wrote.
        stored: bytes and stored layout of an input that operations may use in another sharding.
        decided: per decision, the facts that determine its seconds.
        fed: its arrays that the host feeds at every step.
    """

    kind: str
    sizes: tuple[int, ...]
    shardable: tuple[bool, ...]
    reduction: frozenset[int]
    decisions: tuple[tuple[str, int], ...] = ()
    work: tuple[Work, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    said: tuple[Said, ...] = ()
    stored: tuple[float, Layout] | None = None
    decided: tuple[tuple[str, Hashable], ...] = ()
    fed: tuple[Fed, ...] = ()

    @staticmethod
    def of(
        group: Group,
        work: tuple[Work, ...],
        reductions: tuple[Reduction, ...],
        said: tuple[Said, ...],
        stored: tuple[float, Layout] | None,
        decided: tuple[tuple[str, Hashable], ...],
        fed: tuple[Fed, ...],
    ) -> Facts:
        """The facts of a group with this work."""
        g = group
        of_group = (g.kind, g.sizes, g.shardable, g.reduction, g.decisions)
        return Facts(*of_group, work, reductions, said, stored, decided, fed)

    @cached_property
    def _hash(self) -> int:
        of_group = (self.kind, self.sizes, self.shardable, self.reduction, self.decisions)
        return hash(
            (of_group, self.work, self.reductions, self.said, self.stored, self.decided, self.fed)
        )

    def __hash__(self) -> int:
        return self._hash  # cached: needed often, and ``work`` is long
