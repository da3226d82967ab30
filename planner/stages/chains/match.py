"""Matches equal runs of operations: maps the values of one run to those of the other."""

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
"""Maximum number of calls equal to the pattern's first call at which a match may begin."""


class Keys:
    """Numbers of calls; equal operations have equal numbers."""

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
    """The calls of a stage, matched to those of another stage, the *pattern*.

    Attributes:
        names: per value that the pattern makes, this stage's value.
        outer: per value that the pattern reads but does not make, the value that this stage reads.
        calls: this stage's calls that have a counterpart.
        spare: this stage's calls that have none.
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
    """Match ``calls`` to ``pattern``, call by call in order; calls without a match are spare. If a
    cotangent is added up from stage to stage, the ``first`` stage has nothing to add to. The
    results that the ``last`` stage would pass on are unused, so it may lack the calls that make
    them (``last``: the values that depend on examples; None for other stages).

    An operation before a stage may equal its first call, such as a projection in front of equal
    layers. The match then begins at a later call (``STARTS``).

    Returns:
        ``match`` with these calls, and the calls of the pattern that have no counterpart: the
        fewest of all attempts.
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
    """The same, from call ``begin`` on; returns the calls of the pattern without a counterpart."""
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
    """Match all stages to one of them.

    Args:
        matches: the known part of each stage's match.
        like: the pattern's stage.
        groups: the calls of each stage.
        keys: the numbers of calls.
        first: the first stage, if a sum over stages may begin there.
        last: the last stage, if it may lack results to pass on, and the values that depend on
            examples.

    Returns:
        The matches and the pattern. With two stages, the pattern holds the calls that both have.

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
    """Whether a call adds to a value of the previous stage; if so, this stage adds to zeros."""
    new = [v for v in one.ins if isinstance(v, int) and v not in inside and v not in match.outer]
    old = [v for v in one.ins if isinstance(v, int) and v in match.names]
    if one.kind not in ("add_any", "add") or len(new) != 1 or len(old) != 1:
        return False
    aval = one.eqn.outvars[0].aval
    match.outer[new[0]] = Zero(np.zeros(compat.aval_shape(aval), aval.dtype))
    match.names[one.outs[0]] = match.names[old[0]]
    return True


def _ends(match: Match, one: Call, moving: Set[int]) -> bool:
    """Whether the last stage can compute a call that the step does not contain; its results get
    unused numbers. For example, the first layer's input needs no gradient if it is the batch.

    The call may then read values of another stage, such as a reversed kernel, but no ``moving``
    ones: values that are made in the stage or depend on examples.
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
    """Whether two equal operations read the same values."""
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
