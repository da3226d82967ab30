"""The places of the work that runs once per step: before the loop over microbatches, and after it.

A *place* is a stage, or ``ALL``: all devices. An array of the state lives at the first stage whose
forward pass reads it, or, if there is none, whose backward pass reads it. Its moments and its
update have the same shape and live there, too. The state of scanned layers lives on all devices,
with its first dimension split over the stages, so each stage has its layers. Small values (step
counts, losses, norms of several stages) are everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner import compat
from planner.graph.flat import Call, FlatJaxpr, nbytes
from planner.stages.body import closure, depends
from planner.stages.programs.cuts import slice_part
from planner.stages.programs.split import FORWARD, Split

ALL = -1


@dataclass(frozen=True, eq=False)
class Made:
    """Work that runs once per step: a call, or the sum of a result of the loop.

    Attributes:
        call: the call; None for a sum.
        ins: its operands: numbers of values, or literals.
        outs: the numbers of its results.
        place: where it runs.
        level: the number of programs of other places, in sequence, that must end before it.
    """

    call: Call | None
    ins: tuple[Any, ...]
    outs: tuple[int, ...]
    place: int
    level: int


@dataclass(frozen=True, eq=False)
class Homes:
    """The places of values and calls.

    Attributes:
        ahead: per stage, the calls before the loop that compute values that the stage reads.
        sliced: per operand of the loop that lives on all devices, by its number outside: per stage,
            the numbers of its slices inside.
        home: per argument of the step, its place.
        place: per value outside of the loop, where it is made (arguments: ``home``).
        behind: the work after the loop, in order.
        joined: results of the loop that consist of one piece per stage.
        parted: arguments on all devices of which each stage has its part of the first dimension.
    """

    ahead: tuple[tuple[Call, ...], ...]
    sliced: Mapping[int, tuple[tuple[int, ...], ...]]
    home: tuple[int, ...]
    place: Mapping[int, int]
    behind: tuple[Made, ...]
    joined: frozenset[int]
    parted: frozenset[int]


def homes(flat: FlatJaxpr, at: int, split: Split) -> Homes:
    """Determine the places of a step.

    Args:
        flat: the step.
        at: the index of the call that is the loop.
        split: the loop's body.
    """
    body, loop_call, count = split.body, flat.calls[at], split.count
    inside, _, over = body.loop.split(body.flat.inputs)
    consts, starts, rows = body.loop.split(loop_call.ins)
    outer = dict(zip((*inside, *over), (*consts, *rows), strict=True))
    others = [c for k, c in enumerate(flat.calls) if k != at]
    late = depends(others, loop_call.outs)
    early = [c for c in others if not late.intersection(c.outs)]
    sliced = _sliced(split, outer)
    needs: list[set[int]] = [set() for _ in range(count)]
    first: list[set[int]] = [set() for _ in range(count)]  # the needs of the forward pass
    for (kind, stage), task in split.tasks.items():
        operands = (outer.get(v) for v in (*task.fixed, *task.rows))
        read_here = {v for v in operands if isinstance(v, int) and v not in sliced}
        needs[stage] |= read_here
        first[stage] |= read_here if kind == FORWARD else set()
    ahead = tuple(tuple(closure(early, sorted(need))) for need in needs)
    leaves = set(flat.inputs)
    readers: dict[int, int] = {}
    for stage, need in (*enumerate(first), *enumerate(needs)):
        calls = closure(early, sorted(need))
        for v in {*need, *(v for c in calls for v in c.ins if isinstance(v, int))} & leaves:
            readers.setdefault(v, stage)
    for c in closure(early, sorted(sliced)):
        readers.update((v, ALL) for v in c.ins if isinstance(v, int) and v in leaves)
    readers.update((v, ALL) for v in sliced if v in leaves)

    sizes = _sizes(flat)
    nodes, joined, seeds = _sums(split, loop_call, starts)
    wanted = [v for v in flat.outputs if isinstance(v, int)]
    behind = [c for c in others if late.intersection(c.outs)]
    read = {v for c in behind for v in c.ins if isinstance(v, int)} | set(wanted)
    read |= {v for v in starts if isinstance(v, int)}
    acting = {id(c) for c in early if c.eqn.effects}
    read |= {v for c in early if id(c) in acting for v in c.ins if isinstance(v, int)}
    made_first = {id(c) for c in closure(early, sorted(read))} | acting
    before = [c for c in early if id(c) in made_first]
    groups = _Groups(sizes)
    once: list[tuple[Call | None, tuple[Any, ...], tuple[int, ...]]] = [
        *((c, c.ins, c.outs) for c in before),
        *((None, ins, outs) for ins, outs in nodes),
        *((c, c.ins, c.outs) for c in behind),
    ]
    for _, reads, makes in once:
        groups.join([v for v in (*reads, *makes) if isinstance(v, int)])
    for v, where in seeds.items():
        groups.seed(v, where, first=False)
    for v, where in readers.items():
        groups.seed(v, where, first=True)
    parted = frozenset(v for v in flat.inputs if groups.place(v) == ALL)
    place: dict[int, int] = {}
    for v in flat.inputs:
        group_place = groups.place(v)
        place[v] = ALL if group_place is None else group_place
    place.update(dict.fromkeys(flat.consts, ALL))
    level: dict[int, int] = {}
    placed_nodes = []
    for call, read_, outs in once:
        numbers = [v for v in read_ if isinstance(v, int)]
        known = groups.place_of([*numbers, *outs])
        if known is None:
            near = {seeds[v] for v in outs} if call is None else {place[v] for v in numbers}
            known = near.pop() if len(near) == 1 else ALL
            groups.seed_all(outs, known)
        step = max(
            (level.get(v, 0) + (place[v] != known and v in level) for v in numbers), default=0
        )
        placed_nodes.append(Made(call, read_, outs, known, step))
        place.update((v, known) for v in outs)
        level.update((v, step) for v in outs)
    return Homes(
        ahead,
        sliced,
        tuple(place[v] for v in flat.inputs),
        place,
        tuple(placed_nodes),
        joined,
        parted,
    )


def _sliced(split: Split, outer: Mapping[int, Any]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Operands of the loop of which every stage reads only its part of the first dimension, and
    nothing reads more."""
    body, count = split.body, split.count
    at: dict[int, set[int]] = {}
    for (_, stage), task in split.tasks.items():
        for c in task.calls:
            for v in c.outs:
                at.setdefault(v, set()).add(stage)
    inside = set(body.loop.split(body.flat.inputs)[0])
    slices: dict[int, list[list[int]]] = {}
    bad: set[int] = {v for v in (*body.stacked, *body.added) if isinstance(v, int)}
    for c in body.flat.calls:
        for v in {v for v in c.ins if isinstance(v, int) and v in inside}:
            part = slice_part(c, count)
            if part is None or not at.get(c.outs[0], {part}) <= {part}:
                bad.add(v)
            else:
                slices.setdefault(v, [[] for _ in range(count)])[part].append(c.outs[0])
    return {
        outer[v]: tuple(map(tuple, parts))
        for v, parts in slices.items()
        if v not in bad and all(parts) and isinstance(outer.get(v), int)
    }


Sum = tuple[tuple[Any, ...], tuple[int, ...]]


def _sums(
    split: Split, call: Call, starts: Sequence[Any]
) -> tuple[list[Sum], frozenset[int], dict[int, int]]:
    """Per result of the loop, (operands outside, result); the results that consist of one piece per
    stage; per result, the place where its first piece is made (``ALL`` for those)."""
    nodes: list[Sum] = []
    joined: set[int] = set()
    seeds: dict[int, int] = {}
    for out, start, pieces in zip(call.outs, starts, split.pieces, strict=False):
        stages = [split.makers[p][1] for parts in pieces for p in parts if isinstance(p, int)]
        if len(pieces) == split.count > 1 and stages == list(range(split.count)):
            joined.add(out)
            seeds[out] = ALL
        else:
            seeds[out] = stages[0] if stages else ALL
        nodes.append(((start,), (out,)))
    for out, v in zip(call.outs[len(split.pieces) :], split.body.stacked, strict=True):
        seeds[out] = split.makers[v][1] if isinstance(v, int) else ALL
        nodes.append(((), (out,)))
    return nodes, frozenset(joined), seeds


def _sizes(flat: FlatJaxpr) -> dict[int, tuple[int, int]]:
    """Per value, its number of elements and its bytes."""
    out: dict[int, tuple[int, int]] = {}
    for c in flat.calls:
        for v, var in zip((*c.ins, *c.outs), (*c.eqn.invars, *c.eqn.outvars), strict=False):
            if isinstance(v, int):
                out[v] = (math.prod(compat.aval_shape(var.aval)), nbytes(var.aval))
    return out


class _Groups:
    """Values of one size that are computed from each other, and the place of each group."""

    def __init__(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        self.sizes = sizes
        self.parent: dict[int, int] = {}
        self.where: dict[int, tuple[bool, int]] = {}

    def root(self, v: int) -> int:
        while v in self.parent:
            v = self.parent[v]
        return v

    def largest(self, values: Sequence[int]) -> list[int]:
        """The values with the most elements, if that is more than one."""
        most = max((self.sizes.get(v, (1, 0))[0] for v in values), default=1)
        return [v for v in values if most > 1 and self.sizes.get(v, (1, 0))[0] == most]

    def join(self, values: Sequence[int]) -> None:
        roots = sorted({self.root(v) for v in self.largest(values)})
        self.parent.update((r, roots[0]) for r in roots[1:])

    def seed(self, v: int, where: int, first: bool) -> None:
        """Set the place of a value's group. Arguments (``first``) take precedence; among equals,
        ``ALL`` does, then the earlier call."""
        root = self.root(v)
        known = self.where.get(root)
        if (
            known is None
            or (first and (not known[0] or where == ALL))
            or (where == ALL and not known[0] and not first)
        ):
            self.where[root] = (first, where)

    def seed_all(self, values: Sequence[int], where: int) -> None:
        for v in values:
            self.where.setdefault(self.root(v), (False, where))

    def place(self, v: int) -> int | None:
        known = self.where.get(self.root(v))
        return None if known is None else known[1]

    def place_of(self, values: Sequence[int]) -> int | None:
        for v in self.largest(values):
            place = self.place(v)
            if place is not None:
                return place
        return None
