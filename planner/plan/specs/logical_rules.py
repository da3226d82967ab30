"""Logical axis names for the dimensions that a plan splits, in the form of Flax and MaxText.

In these libraries, every dimension of an array has a logical name, and a list of rules maps names
to mesh axes. A plan contains sizes and mesh axes only. Dimensions of one size that are split over
the same mesh axes therefore share one name, such as ``model_2048``; the leading dimension of
arguments that are neither state nor frozen weights is ``batch``. Dimensions that are not split have
no name. Every name has one rule, no array has a name twice, and the rules applied to the names
give the plan's shardings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from planner.spec import Sharding

Role = tuple[str, int, tuple[str, ...]]


class Argument(Protocol):
    """The fields of a plan's leaf that ``logical_axes`` reads."""

    @property
    def path(self) -> str:
        """Place in the pytree."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""

    @property
    def spec(self) -> Sharding:
        """How it is stored."""

    @property
    def tied(self) -> bool:
        """Whether it comes back as a result."""

    @property
    def frozen(self) -> bool:
        """Whether it is a weight that does not come back."""


@dataclass(frozen=True)
class LogicalAxes:
    """Logical names per argument, and their mesh axes.

    ``names``: by argument path, a name or None per dimension. ``rules``: (name, mesh axis or
    axes), each name once, in order of first appearance.
    """

    names: dict[str, tuple[str | None, ...]]
    rules: tuple[tuple[str, str | tuple[str, ...]], ...]


def logical_axes(leaves: Iterable[Argument]) -> LogicalAxes:
    """Names and rules of a plan's arguments.

    Batch dimensions that are split differently from the first one get a number: ``batch_2``.
    """
    known: dict[Role, str] = {}
    names: dict[str, tuple[str | None, ...]] = {}
    for leaf in leaves:
        row: list[str | None] = []
        for dim, (size, axes) in enumerate(zip(leaf.shape, leaf.spec.dims, strict=True)):
            row.append(
                _name(known, dim == 0 and not (leaf.tied or leaf.frozen), size, axes)
                if axes
                else None
            )
        names[leaf.path] = tuple(row)
    rules = tuple(
        (name, axes[0] if len(axes) == 1 else axes) for (_, _, axes), name in known.items()
    )
    return LogicalAxes(names, rules)


def _name(known: dict[Role, str], batch: bool, size: int, axes: tuple[str, ...]) -> str:
    """The name of a role; a new role gets a new name."""
    role: Role = ("batch", 0, axes) if batch else ("", size, axes)
    if role not in known:
        taken = sum(kind == "batch" for kind, _, _ in known)
        if batch:
            known[role] = f"batch_{taken + 1}" if taken else "batch"
        else:
            known[role] = f"{'_'.join(axes)}_{size}"
    return known[role]
