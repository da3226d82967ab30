"""Equal runs of operations: which value of one is which of the other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner import compat
from planner.graph.flat import Call
from planner.graph.jaxpr.places import user_line
from planner.rules.key import EqnKey
from planner.stages.errors import refused

STARTS = 8
"""Calls like the first of a stage at which laying it out may begin."""


class Keys:
    """Numbers of calls, equal where the operations are."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._of: dict[int, int] = {}

    def of(self, call: Call) -> int:
        """The number of a call."""
        number = self._of.get(id(call.eqn))
        if number is None:
            key = EqnKey.of(call.eqn).signature()
            number = self._of[id(call.eqn)] = self._known.setdefault(key, len(self._known))
        return number


@dataclass(eq=False)
class Match:
    """A run of calls laid on that of another stage, the *pattern*.

    Attributes:
        names: per value that the pattern makes, this stage's.
        outer: per value that the pattern reads and does not make, what this stage reads.
        calls: this stage's calls that have a counterpart.
        spare: those that have none.
    """

    names: dict[int, int] = field(default_factory=dict)
    outer: dict[int, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    spare: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Zero:
    """Stands for zeros, as a literal does for a number."""

    val: Any


def laid(
    match: Match,
    pattern: Sequence[Call],
    calls: Sequence[Call],
    keys: Keys,
    first: bool = False,
    last: frozenset[int] | None = None,
) -> tuple[Match, list[Call]]:
    """Lay ``calls`` on ``pattern``, call by call in order; what fits nowhere is spare. Where a
    cotangent is added up from stage to stage, the ``first`` one has nothing to add to. What the
    ``last`` one would hand on nobody reads: it need not be among its calls (``last``: the values
    of examples; None of other stages).

    What stands before a stage may look like its first call, as a projection in front of equal
    layers does: then it begins at a later one (``STARTS``).

    Returns:
        ``match`` with them, and the calls of the pattern that have no counterpart: the fewest.
    """
    tries: list[tuple[Match, list[Call]]] = []
    begins = [k for k, c in enumerate(calls) if pattern and keys.of(c) == keys.of(pattern[0])]
    for begin in [0, *begins[1:STARTS]]:
        one = Match(dict(match.names), dict(match.outer))
        tries.append((one, _laid(one, pattern, calls, keys, begin, first, last)))
        if not tries[-1][1]:
            break
    return min(tries, key=lambda attempt: len(attempt[1]))


def _laid(
    match: Match,
    pattern: Sequence[Call],
    calls: Sequence[Call],
    keys: Keys,
    begin: int,
    first: bool,
    last: frozenset[int] | None,
) -> list[Call]:
    """The same from one call on."""
    inside = {v for c in pattern for v in c.outs} | match.names.keys()
    match.spare += calls[:begin]
    missing = []
    for one in pattern:
        key = keys.of(one)
        position = next(
            (
                k
                for k in range(begin, len(calls))
                if keys.of(calls[k]) == key and _fits(match, one, calls[k], inside)
            ),
            None,
        )
        if position is None:
            ends = last is not None and _ends(match, one, inside | last)
            if not ends and not (first and _begins(match, one, inside)):
                missing.append(one)
            continue
        match.spare += calls[begin:position]
        begin, other = position + 1, calls[position]
        match.calls.append(other)
        match.names.update(zip(one.outs, other.outs, strict=True))
        for a, b in zip(one.ins, other.ins, strict=True):
            if isinstance(a, int) and a not in inside:
                match.outer[a] = b
    match.spare += calls[begin:]
    return missing


def all_laid(
    matches: Sequence[Match],
    like: int,
    groups: Sequence[Sequence[Call]],
    keys: Keys,
    first: int | None = None,
    last: tuple[int, frozenset[int]] | None = None,
) -> tuple[list[Match], list[Call]]:
    """All stages laid on one of them.

    Args:
        matches: what is known of each stage.
        like: the pattern's stage.
        groups: the calls of each stage.
        keys: which operations are equal.
        first: the stage that begins, if what it adds up may begin there.
        last: the stage that ends, if it may lack what it would hand on; and the values of examples.

    Returns:
        The matches, and the pattern. Of two stages, it is what both have.

    Raises:
        NoStagesError: a stage lacks a call of the pattern.
    """
    pattern = list(groups[like])
    ends = {} if last is None else dict([last])
    while True:
        both = [
            laid(m, pattern, calls, keys, s == first, ends.get(s))
            for s, (m, calls) in enumerate(zip(matches, groups, strict=True))
        ]
        out, missing = [m for m, _ in both], [calls for _, calls in both]
        lacking = next((s for s, m in enumerate(missing) if m), None)
        if lacking is None:
            return out, pattern
        one = missing[lacking][0]
        if len(groups) > 2:
            raise refused(
                f"its parts are not equal: {_line(one)}: {one.kind} is in one stage and has no "
                f"counterpart in stage {lacking}"
            )
        dropped = {id(c) for m in missing for c in m}
        pattern = [c for c in pattern if id(c) not in dropped]


def _begins(match: Match, one: Call, inside: set[int]) -> bool:
    """Whether a call adds to what comes from the stage before; then this one adds to zeros."""
    new = [v for v in one.ins if isinstance(v, int) and v not in inside and v not in match.outer]
    old = [v for v in one.ins if isinstance(v, int) and v in match.names]
    if one.kind not in ("add_any", "add") or len(new) != 1 or len(old) != 1:
        return False
    aval = one.eqn.outvars[0].aval
    match.outer[new[0]] = Zero(np.zeros(compat.aval_shape(aval), aval.dtype))
    match.names[one.outs[0]] = match.names[old[0]]
    return True


def _ends(match: Match, one: Call, moving: Set[int]) -> bool:
    """Whether a call can be computed in the last stage although the step does not; its results get
    numbers that nothing reads. The first layer's input needs no gradient where it is the batch.

    What else it reads of its own stage, such as a reversed kernel, may be another's then; not what
    is ``moving``: made in the stage, or of examples.
    """
    known = match.names.keys() | match.outer.keys()
    new = [v for v in one.ins if isinstance(v, int) and v not in known]
    if not moving.isdisjoint(new):
        return False
    match.outer.update((v, v) for v in new)
    unread = min([0, *match.names.values()]) - 1
    match.names.update((v, unread - k) for k, v in enumerate(one.outs))
    return True


def _fits(match: Match, one: Call, other: Call, inside: set[int]) -> bool:
    """Whether two equal operations read the same."""
    for a, b in zip(one.ins, other.ins, strict=True):
        if not isinstance(a, int):
            if isinstance(b, int) or not _same(a.val, b.val):
                return False
        elif a in inside:
            if match.names.get(a) != b:
                return False
        elif a in match.outer and not _equal(match.outer[a], b):
            return False
    return True


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return a is b or a == b
    return _same(a.val, b.val)


def _same(a: Any, b: Any) -> bool:
    x, y = np.asarray(a), np.asarray(b)
    return bool(x.dtype == y.dtype and x.shape == y.shape and (x == y).all())


def _line(call: Call) -> str:
    return user_line(call.eqn) or "an unknown line"
