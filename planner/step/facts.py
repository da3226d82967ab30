"""The facts of a group: one hashable record, and nothing else decides what it costs.

Groups of equal facts have the same strategies and, under one cost model, the same seconds under
each of them, on every mesh. So equal facts fold into one (``planner.step.classes``), and caches of
prices are kept by facts (``planner.cost.pricing``). A new kind of decision adds a field here.
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
    """A collective inside a group: the result's bytes and factors, the summed factors; ``op`` says
    which operation it is, and is no fact. It is an all-reduce, or ``shifts`` rows to the neighbors
    along the factor: ``nbytes`` are those of a row."""

    over: frozenset[int]
    kept: frozenset[int]
    nbytes: float
    weight: float
    op: int = field(compare=False)
    gradient: bool = False
    shifts: bool = False


@dataclass(frozen=True)
class Said:
    """A collective that the user wrote, in a ``shard_map``: kind, axes of the mesh by position, the
    payload of a device, how often it runs in a step; ``op`` is no fact."""

    kind: Collective
    axes: tuple[int, ...]
    nbytes: float
    weight: float
    op: int = field(compare=False)


@dataclass(frozen=True)
class Facts:
    """What the strategies and the seconds of a group follow from.

    Attributes:
        kind, sizes, shardable, reduction, decisions: those of the group.
        work: see ``Work``.
        reductions: all-reduces and shifts inside it.
        said: collectives that the user wrote.
        stored: bytes and layout of an input that operations see as ``used``.
        decided: by decision, what its seconds follow from.
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
        """The facts of a group whose operations do this."""
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
        return self._hash  # asked often, and the work is long
