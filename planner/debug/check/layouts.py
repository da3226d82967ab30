"""Checks that several stages share: indices, and layouts of values in groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from planner.errors import InternalError
from planner.space.factors import LAYOUT_NONE, Layout
from planner.space.groups import Group


def demand(holds: bool, where: str, wrong: str) -> None:
    """Raise InternalError with the place and the fault unless a condition holds."""
    if not holds:
        raise InternalError(f"{where}: {wrong}")


def within(where: str, what: str, numbers: Iterable[int], count: int) -> None:
    """Demand that numbers are indices below ``count``."""
    for n in numbers:
        if not 0 <= n < count:
            raise InternalError(f"{where}: {what} {n} of {count}")


@dataclass
class Layouts:
    """Checks layouts against groups; equal layouts are checked once.

    ``exact``: the factor of a dimension has its whole size; otherwise, it divides that size (for a
    merged dimension, a layout names the major factor).
    """

    groups: Sequence[Group]
    known: set[tuple[int, Layout, tuple[int, ...], bool]] = field(default_factory=set)

    def fits(
        self, where: str, group: int, layout: Layout, shape: tuple[int, ...], *, exact: bool = False
    ) -> None:
        """Demand that a layout names factors of a known group that make up ``shape``."""
        key = (group, layout, shape, exact)
        if key in self.known:
            return
        within(where, "group", (group,), len(self.groups))
        sizes = self.groups[group].sizes
        demand(
            len(layout) == len(shape),
            where,
            f"layout {list(layout)} has {len(layout)} dimensions, its value {len(shape)}",
        )
        split = [f for f in layout if f != LAYOUT_NONE]
        within(where, f"layout {list(layout)} names a factor of group {group},", split, len(sizes))
        for f, n in zip(layout, shape, strict=True):
            if f != LAYOUT_NONE and (sizes[f] != n if exact else n % sizes[f]):
                raise InternalError(
                    f"{where}: factor {f} of group {group} has size {sizes[f]}, its dimension {n}"
                )
        able = [f for f in split if self.groups[group].shardable[f]]
        demand(len(able) == len(set(able)), where, f"layout {list(layout)} names a factor twice")
        self.known.add(key)
