"""Folds equal rows into one: repeated layers, repeated collectives. No jax."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from planner.plan.contents.rows import CollectiveRow, Leaf

_ARGUMENT = re.compile(r"^\[\d+\]")
_DIGITS = re.compile(r"(\d+)")
_STEPS = re.compile(r"\[[^\]]*\]|\.\w+")
_OPTIMIZER = re.compile(
    r"\.(mu|nu|trace|count|v|v_row|v_col|ema|sum_of_squares|acc_grads|opt_state)(?=[.\[]|$)"
    r"|\['opt(_state|imizer)?'\]"
    r"|^\[\d+\]\['(m|v|mu|nu)'\]"
)


@dataclass(frozen=True)
class LeafRow:
    """Leaves that differ only by numbers in their paths; ``leaf`` is the first of ``count``."""

    path: str
    leaf: Leaf
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes per device of all of them."""
        return self.count * self.leaf.nbytes_per_device


@dataclass(frozen=True)
class CollectiveSum:
    """Collectives of the same kind, axes, cause, source line and payload."""

    kind: str
    axes: tuple[str, ...]
    count: float
    payload_bytes: float
    time_s: float
    """Time of all runs in a step."""
    source: str
    cause: str


KINDS = (
    "parameters",
    "optimizer state",
    "state with a row per example",
    "frozen weights",
    "batch and other inputs",
)


def kind_of(leaf: Leaf) -> str:
    """What an argument is, one of ``KINDS``."""
    if leaf.frozen:
        return KINDS[3]
    if not leaf.tied:
        return KINDS[4]
    if leaf.rows:
        return KINDS[2]
    return KINDS[1] if is_optimizer_state(leaf.path) else KINDS[0]


def is_optimizer_state(path: str) -> bool:
    """Whether an argument path looks like state of an optimizer (moments, traces, counters)."""
    return _OPTIMIZER.search(path) is not None


def pattern(path: str) -> tuple[str, ...]:
    """A path without its numbers, except the leading ``[0]``, which names the argument."""
    head, pieces = _pieces(path)
    return (head, *pieces[::2])


def common_path(paths: Sequence[str]) -> str:
    """Paths with the same ``pattern`` as one text: numbers that differ become ``*``."""
    head, first = _pieces(paths[0])
    rows = [_pieces(path)[1] for path in paths]
    return head + "".join(
        piece if all(row[k] == piece for row in rows) else "*" for k, piece in enumerate(first)
    )


def common_start(paths: Sequence[str]) -> str:
    """The keys that all paths begin with; empty if leaving them out saves little."""
    steps = [_STEPS.findall(path)[:-1] for path in paths]
    count = 0
    while all(len(row) > count and row[count] == steps[0][count] for row in steps):
        count += 1
    start = "".join(steps[0][:count])
    worth = len(paths) > 1 and len(start) >= 8 and all(p.startswith(start) for p in paths)
    return start if worth else ""


def fold_leaves(leaves: Sequence[Leaf]) -> tuple[LeafRow, ...]:
    """Fold leaves of equal pattern, shape, dtype, sharding and memory, in order of appearance."""
    groups: dict[tuple[object, ...], list[Leaf]] = {}
    for leaf in leaves:
        kind = (leaf.spec, leaf.used_as, leaf.tied, leaf.memory)
        key = (pattern(leaf.path), leaf.shape, leaf.dtype, *kind)
        groups.setdefault(key, []).append(leaf)
    return tuple(
        LeafRow(common_path([leaf.path for leaf in same]), same[0], len(same))
        for same in groups.values()
    )


def fold_collectives(rows: Sequence[CollectiveRow]) -> tuple[CollectiveSum, ...]:
    """Add up equal collectives, most expensive first."""
    groups: dict[tuple[object, ...], list[CollectiveRow]] = {}
    for row in rows:
        key = (row.kind, row.axes, pattern(row.cause), row.source, row.payload_bytes)
        groups.setdefault(key, []).append(row)
    sums = [
        CollectiveSum(
            same[0].kind,
            same[0].axes,
            sum(r.count for r in same),
            same[0].payload_bytes,
            math.fsum(r.count * r.time_s for r in same),
            same[0].source,
            common_path([r.cause for r in same]),
        )
        for same in groups.values()
    ]
    return tuple(sorted(sums, key=lambda s: (-s.time_s, s.kind, s.axes, s.source, s.cause)))


def _pieces(path: str) -> tuple[str, list[str]]:
    """The argument's index, and the rest as alternating text and numbers."""
    match = _ARGUMENT.match(path)
    head = match.group() if match else ""
    return head, _DIGITS.split(path[len(head) :])
