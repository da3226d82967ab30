"""Orders the loops, the operations on stacks and the other operations of a program."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.errors import RequestError
from planner.rolled.batches import Batch
from planner.rolled.layout import Layout, Loop, Part
from planner.rolled.runs import Const


@dataclass(frozen=True)
class Single:
    """A single call."""

    at: int


@dataclass(frozen=True)
class OnStacks:
    """An operation on stacks, and the stacks that it makes."""

    batch: Batch
    stacks: tuple[int, ...]


Unit = Single | OnStacks | Loop


def ordered(layout: Layout) -> tuple[Unit, ...]:
    """The units of a program, each after those whose results it reads, else in program order.

    Raises:
        RequestError: there is no such order.
    """
    flat = layout.flat
    units: list[tuple[int, Unit]] = [(x.run.start, x) for x in layout.loops]
    units += [(b.calls[0], OnStacks(b, stacks)) for b, stacks in layout.batches]
    inside = {k for x in layout.loops for k in range(x.run.start, x.run.end)}
    inside.update(at for b, _ in layout.batches for at in b.calls)
    inside |= layout.dropped
    units += [(at, Single(at)) for at in range(len(flat.calls)) if at not in inside]
    units.sort(key=lambda x: x[0])
    maker = {v: k for k, (_, unit) in enumerate(units) for v in _made(layout, unit)}
    behind: list[set[int]] = [set() for _ in units]
    waits = [0] * len(units)
    for k, (_, unit) in enumerate(units):
        before = {maker[v] for v in _read(layout, unit) if v in maker} - {k}
        waits[k] = len(before)
        for other in before:
            behind[other].add(k)
    ready = [k for k, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    out: list[Unit] = []
    while ready:
        k = heapq.heappop(ready)
        out.append(units[k][1])
        for other in behind[k]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, other)
    if len(out) < len(units):
        raise RequestError("operations that were put together wait for each other")
    return tuple(out)


def _calls(unit: Unit) -> tuple[int, ...] | range:
    if isinstance(unit, Single):
        return (unit.at,)
    return unit.batch.calls if isinstance(unit, OnStacks) else range(unit.run.start, unit.run.end)


def _made(layout: Layout, unit: Unit) -> Iterator[int]:
    """The values that a unit makes and others may read."""
    for at in _calls(unit):
        yield from layout.flat.calls[at].outs


def _read(layout: Layout, unit: Unit) -> Iterator[int]:
    """The values that a unit reads from outside."""
    if not isinstance(unit, Loop):
        for at in _calls(unit):
            for atom in layout.flat.calls[at].ins:
                if isinstance(atom, int):
                    yield layout.same.get(atom, atom)
        return
    run = unit.run
    atoms: list[Any] = [x.value for row in run.operands for x in row if isinstance(x, Const)]
    atoms += [first for _, _, first in run.carries]
    for source in unit.sources:
        if isinstance(source, Part):
            source = layout.rows[source.stack][source.first : source.last]
        atoms += source
    for atom in atoms:
        if isinstance(atom, int):
            yield layout.same.get(atom, atom)
