"""Determines which values of a program become rows of stacks when its runs become loops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from planner import compat
from planner.graph.flat import FlatJaxpr, nbytes
from planner.rolled.batches import Batch, batches_of
from planner.rolled.runs import Run, makers_of, runs_of


@dataclass(frozen=True)
class Part:
    """Rows ``first`` to ``last`` of stack ``stack``."""

    stack: int
    first: int
    last: int


Source = Part | tuple[int, ...]
"""Where a loop's rows come from: a stack, or values that are stacked for it."""


@dataclass(frozen=True)
class Loop:
    """A run as a loop.

    Attributes:
        run: its blocks.
        reverse: whether the loop begins with the last row.
        sources: per stack that it reads, where the rows come from.
        results: results of a block that others read, as (call, result); each becomes a stack.
        stacks: the numbers of these stacks.
    """

    run: Run
    reverse: bool
    sources: tuple[Source, ...]
    results: tuple[tuple[int, int], ...]
    stacks: tuple[int, ...]


@dataclass(eq=False)
class Layout:
    """The loops of a program.

    Attributes:
        loops: the loops, in order.
        rows: per stack, its values.
        place: per value that is a row, its stack and its row there.
        given: stacks that are arguments.
        batches: operations on whole stacks, with the stacks that they make.
        same, dropped: see ``Batches``.
        entries: the loop and the carry, by the values of the carry that the blocks read, in the
            order of the rows.
        entering: per loop, carries whose values on entry to each block are stacked, and the stacks.
        moved_bytes: bytes of values that are copied into stacks or out of them outside the loops.
    """

    flat: FlatJaxpr
    paths: Sequence[tuple[Any, ...]]
    loops: list[Loop] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    place: dict[int, tuple[int, int]] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    batches: list[tuple[Batch, tuple[int, ...]]] = field(default_factory=list)
    same: Mapping[int, int] = field(default_factory=dict)
    dropped: frozenset[int] = frozenset()
    entries: dict[tuple[Any, ...], tuple[int, int]] = field(default_factory=dict)
    entering: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    moved_bytes: float = 0.0

    @cached_property
    def numbers(self) -> dict[int, int]:
        """Per value that is an argument, its position."""
        return {v: k for k, v in enumerate(self.flat.inputs)}

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of each value that is read or made."""
        out = {}
        for call in self.flat.calls:
            for v, var in zip(
                (*call.ins, *call.outs), (*call.eqn.invars, *call.eqn.outvars), strict=True
            ):
                if isinstance(v, int):
                    out[v] = nbytes(var.aval)
        return out

    @property
    def moved_share(self) -> float:
        """``moved_bytes`` relative to the bytes of all arguments and all stacks made by loops."""
        known = set(self.flat.inputs).union(*(self.rows[s] for x in self.loops for s in x.stacks))
        return self.moved_bytes / max(1, sum(self.sizes.get(v, 0) for v in known))

    @property
    def covered(self) -> float:
        """The share of the program's operations that are in loops, on stacks, or dropped."""
        inside = sum(x.run.length * x.run.count for x in self.loops) + len(self.dropped)
        inside += sum(len(batch.calls) for batch, _ in self.batches)
        return inside / max(1, len(self.flat.calls))

    @property
    def repeats(self) -> str:
        """The largest loops, in words."""
        counts = Counter[int]()
        for x in self.loops:
            counts[x.run.count] += x.run.length * x.run.count
        return f"{max(counts, key=lambda n: counts[n])} equal blocks"


def layout_of(
    flat: FlatJaxpr, paths: Sequence[tuple[Any, ...]], most_moved: float = math.inf
) -> Layout:
    """Turn the runs of a program into loops.

    Rows are in the order in which the first loop that reads them visits them. A later loop (the
    backward pass, the update) uses the same order, if it can.

    Args:
        flat: the program.
        paths: paths of its arguments.
        most_moved: if ``moved_share`` exceeds this, the layout is returned incomplete.
    """
    out = Layout(flat, paths)
    runs = [run for run in runs_of(flat, makers_of(flat)) if run.carries]
    scalars = [run for run in runs if _of_scalars(out, run)]  # sums over gradients, such as a norm
    for run in runs:
        if run not in scalars:
            _add(out, run)
    if out.moved_share > most_moved:
        return out
    _add_moments(out)
    inside = {k for x in out.loops for k in range(x.run.start, x.run.end)}
    batches = batches_of(flat, out.place, lambda stack: len(out.rows[stack]), inside)
    out.same, out.dropped = batches.same, batches.dropped
    for batch in batches.batches:
        results = zip(*(flat.calls[at].outs for at in batch.calls), strict=True)
        out.batches.append((batch, tuple(_stack(out, values) for values in results)))
        inside.update(batch.calls)
    inside |= out.dropped
    for run in scalars:
        if inside.isdisjoint(range(run.start, run.end)):
            _add(out, run)
            inside.update(range(run.start, run.end))
    ends = {
        flat.calls[x.run.end - x.run.length + k].outs[o]
        for x in out.loops
        for k, o, _ in x.run.carries
    }
    taken: set[int] = set()
    for at, call in enumerate(flat.calls):
        if at not in inside:
            taken.update(v for v in call.ins if isinstance(v, int) and v in out.place)
    out.moved_bytes += sum(_bytes(out, v) for v in taken - ends)
    return out


def _of_scalars(out: Layout, run: Run) -> bool:
    """Whether a block of a run makes only scalars."""
    calls = out.flat.calls[run.start : run.start + run.length]
    return all(math.prod(compat.aval_shape(v.aval)) == 1 for c in calls for v in c.eqn.outvars)


def _add(out: Layout, run: Run) -> None:
    """Add a run as a loop, unless it has carries and visits rows neither forward nor backward."""
    order = _order(out, run)
    reverse = bool(run.carries) and order == tuple(reversed(range(run.count)))
    if run.carries and not reverse and order != tuple(range(run.count)):
        return
    sources = tuple(_source(out, tuple(values[b] for b in order)) for values in run.stacks)
    outputs = {v for v in out.flat.outputs if isinstance(v, int)}
    carried = {(call, o) for call, o, _ in run.carries}
    results, stacks = [], []
    for call in range(run.length):
        for o in range(len(out.flat.calls[run.start + call].outs)):
            per_block = [out.flat.calls[run.start + b * run.length + call].outs[o] for b in order]
            read = [
                v
                for v in per_block
                if v in outputs or any(not run.start <= r < run.end for r in out.flat.readers[v])
            ]
            last = out.flat.calls[run.end - run.length + call].outs[o]
            if read and not (read == [last] and (call, o) in carried):
                results.append((call, o))
                stacks.append(_stack(out, per_block))
    for number, (call, o, first) in enumerate(run.carries):
        per_block = [
            out.flat.calls[run.start + b * run.length + call].outs[o] for b in range(run.count)
        ]
        entered = (first, *per_block[:-1])
        if isinstance(first, int):
            out.entries[entered[::-1] if reverse else entered] = len(out.loops), number
    out.loops.append(Loop(run, reverse, sources, tuple(results), tuple(stacks)))


def _add_moments(out: Layout) -> None:
    """Make stacks of arguments whose paths end like those of a stack and whose rows have the same
    bytes, such as moments of parameters."""
    by_end: dict[tuple[str, ...], list[int]] = {}
    ends = {k: tuple(map(str, path)) for k, path in enumerate(out.paths)}
    known = {end: k for k, end in ends.items()}
    for k, end in ends.items():
        for first in range(len(end)):
            by_end.setdefault(end[first:], []).append(k)
    for stack in sorted(out.given):
        rows = _unlike([ends[out.numbers[v]] for v in out.rows[stack]])
        sizes = {out.sizes.get(v, 0) for v in out.rows[stack]}
        for other in by_end.get(rows[0], ()) if rows[0] else ():
            before = ends[other][: -len(rows[0])]
            values = [out.flat.inputs[known[before + r]] for r in rows if before + r in known]
            free = len(values) == len(rows) and out.place.keys().isdisjoint(values)
            if free and {out.sizes.get(v, 0) for v in values} == sizes and len(sizes) == 1:
                out.given.add(_stack(out, values))


def _unlike(paths: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The paths without the keys that they all begin with."""
    same = 0
    while all(len(p) > same + 1 and p[same] == paths[0][same] for p in paths):
        same += 1
    return [p[same:] for p in paths]


def _order(out: Layout, run: Run) -> tuple[int, ...]:
    """The block of each row, by a majority of the existing stacks that the run reads."""
    votes: Counter[tuple[int, ...]] = Counter()
    for values in run.stacks:
        places = [out.place.get(v) for v in values]
        known = [p for p in places if p is not None]
        if len(known) == run.count and len({stack for stack, _ in known}) == 1:
            votes[tuple(sorted(range(run.count), key=lambda b: known[b][1]))] += 1
    return votes.most_common(1)[0][0] if votes else tuple(range(run.count))


def _source(out: Layout, values: tuple[int, ...]) -> Source:
    """Where the rows of a loop come from."""
    places = [out.place.get(v) for v in values]
    known = [p for p in places if p is not None]
    if not known and len(set(values)) == len(values) and _one_argument(out, values):
        stack = _stack(out, values)
        out.given.add(stack)
        return Part(stack, 0, len(values))
    if len(known) == len(values):
        stack, first = known[0]
        if known == [(stack, first + k) for k in range(len(values))]:
            if len(values) < len(out.rows[stack]):
                out.moved_bytes += sum(_bytes(out, v) for v in values)
            return Part(stack, first, first + len(values))
    if values in out.entries:
        loop, carry = out.entries[values]
        stack = len(out.rows)
        out.rows.append(values)
        out.entering.setdefault(loop, []).append((carry, stack))
        return Part(stack, 0, len(values))
    out.moved_bytes += sum(_bytes(out, v) for v in values)
    return values


def _one_argument(out: Layout, values: Sequence[int]) -> bool:
    """Whether values are leaves of one argument of the step."""
    number = out.numbers
    return all(v in number for v in values) and (
        len({out.paths[number[v]][:1] for v in values}) == 1
    )


def _stack(out: Layout, values: Sequence[int]) -> int:
    """Add a stack and return its number."""
    number = len(out.rows)
    out.rows.append(tuple(values))
    out.place.update({v: (number, row) for row, v in enumerate(values)})
    return number


def _bytes(out: Layout, value: int) -> int:
    """Bytes of a value."""
    return out.sizes.get(value, 0)
