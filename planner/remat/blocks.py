"""Recomputes equal blocks of an unrolled forward pass where the backward pass needs them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from planner import compat
from planner.graph.flat import Call, FlatJaxpr, Run, nbytes, run_behind
from planner.graph.labels.blocks import blocks_of
from planner.remat.frontier import WHOLE, Block, Cut, InChunks, compared_maxima, cut
from planner.remat.policy import FULL, parse_policy
from planner.remat.sites import Site, Sites, common_line, pays, to_device, to_host

LEAST = 1.01
"""Bytes, relative to the fewest that cross anywhere, up to which a place is a candidate cut."""
TRIED = 12
"""Most such places to try."""


def repeated_blocks(flat: FlatJaxpr, sites: Sites, skip: frozenset[int]) -> FlatJaxpr:
    """Rewrite repeated blocks of the forward pass, cut where the fewest bytes cross. ``skip``:
    calls to leave unchanged."""
    chunks = sites.chunks(flat) if sites.policy.flop_per_byte else WHOLE
    rewriting = _Rewriting(flat, flat.readers, flat.values, sites.policy.on_host)
    key = "repeated blocks", skip, chunks.values
    block_groups = flat.memo.get(key) or flat.memo.setdefault(key, _repeated(flat, skip, chunks))
    for repeated in block_groups:
        done = [(part, block, sites.cut(block)) for part, block in repeated.blocks]
        part, block, block_cut = done[len(done) // 2]
        sites.found.append(Site(repeated.what, repeated.count, block, block_cut))
        for part, block, block_cut in done:
            if pays(block, block_cut):
                rewriting.again(part, block, block_cut)
    return rewriting.done()


@dataclass(frozen=True)
class _Repeated:
    """Equal blocks: their description, their number, and the calls of each."""

    what: str
    count: int
    blocks: tuple[tuple[range, Block], ...]


def _repeated(flat: FlatJaxpr, skip: frozenset[int], chunks: InChunks) -> tuple[_Repeated, ...]:
    """The repeated blocks of the forward pass."""
    out, taken = [], set(skip)
    for repeated in blocks_of(np.array(flat.codes(), np.int64)):
        forward = flat.calls[repeated.start : repeated.end]
        if any(c.backward for c in forward) or taken.intersection(
            range(repeated.start, repeated.end)
        ):
            continue
        cuts = cuts_of(flat, repeated.start, repeated.length, repeated.count, flat.readers)
        cuts = _whole(flat, cuts, repeated.length, taken)
        taken.update(range(cuts[0], cuts[-1]))
        parts = [range(a, b) for a, b in itertools.pairwise(cuts) if a < b]
        blocks = tuple((part, _block(flat, part, flat.readers, chunks)) for part in parts)
        line = common_line(blocks[len(blocks) // 2][1].calls)
        what = f"each of {repeated.count} equal blocks at {line}"
        out.append(_Repeated(what, repeated.count, blocks))
    return tuple(out)


def _block(
    flat: FlatJaxpr,
    part: range,
    readers: Sequence[Sequence[int]],
    chunks: InChunks = WHOLE,
) -> Block:
    """A block of calls. Values that the rest of the forward pass reads stay in memory; those that
    only the backward pass reads are wanted."""
    outputs = {v for v in flat.outputs if isinstance(v, int)}
    wanted, held = set(), set()
    for at in part:
        for value in flat.calls[at].outs:
            outside = [r for r in readers[value] if r not in part]
            back = [flat.calls[r].backward for r in outside]
            if value in outputs or not all(back):
                held.add(value)
            elif back:
                wanted.add(value)
    calls = flat.calls[part.start : part.stop]
    maxima = compared_maxima(calls)
    wanted |= {v for v in maxima & held if any(flat.calls[r].backward for r in readers[v])}
    inside = frozenset(v for call in calls for v in call.outs)
    never = (chunks.values & inside) | maxima
    loops = tuple(loop for loop in chunks.loops if loop.leaving <= inside)
    return Block(calls, frozenset(wanted), {}, frozenset(held - maxima), never, loops)


@dataclass(eq=False)
class _Rewriting:
    """Collects the blocks to recompute, and the readers of their values."""

    flat: FlatJaxpr
    readers: Sequence[Sequence[int]]
    values: int
    on_host: bool
    before: dict[int, list[tuple[Block, Cut]]] = field(default_factory=dict)
    away: dict[int, int] = field(default_factory=dict)
    """Per value stored in host memory, the number of its copy there."""

    def again(self, part: range, block: Block, block_cut: Cut) -> None:
        """Recompute a block before the first operation of the backward pass that reads it."""
        dropped = block.wanted - block_cut.kept
        if self.on_host:
            waiting = sorted(block.held | block_cut.kept)
            self.away.update(zip(waiting, self._fresh(len(waiting)), strict=True))
        self.before.setdefault(
            min(r for v in dropped for r in self.readers[v] if r not in part), []
        ).append((block, block_cut))

    def done(self) -> FlatJaxpr:
        """The rewritten program."""
        out: list[Call] = []
        names: dict[int, int] = {}  # replacements of values in the backward pass
        behind: set[int] = set()  # values that the backward pass made so far
        for at, call in enumerate(self.flat.calls):
            for block, block_cut in self.before.get(at, ()):
                out += self._copies(at, block, block_cut, names, behind)
            out.append(call.reading(names) if call.backward else call)
            if call.backward:
                behind.update(call.outs)
            for v in self.away.keys() & set(call.outs):
                out.append(_at(call, (v,), (self.away[v],), _to_host, False))
        flat = self.flat
        return FlatJaxpr(tuple(out), flat.inputs, flat.outputs, flat.consts, self.values)

    def _copies(
        self, at: int, block: Block, block_cut: Cut, names: dict[int, int], behind: set[int]
    ) -> list[Call]:
        """The recomputed operations of a block, which start from its stored values. A barrier makes
        them wait for the cotangent that the block's backward pass begins with. Without it, a
        compiler could run them immediately, or merge them with the original ones."""
        reader = self.flat.calls[at]
        calls = [block.calls[k] for k in block_cut.again]
        inside = {v for c in calls for v in c.outs}
        read = dict.fromkeys(v for c in calls for v in c.ins if isinstance(v, int))
        saved = [v for v in read if v not in inside or v in block.held or v in block_cut.kept]
        tied = self._cotangents(at, behind)
        given = [self.away.get(v, v) for v in saved] + [names.get(v, v) for v in tied]
        fresh = self._fresh(len(given))
        out = [_at(reader, tuple(given), fresh, _barrier, True)]
        renamed = dict(zip(saved, fresh, strict=False))
        names.update(zip(tied, fresh[len(saved) :], strict=True))
        for v in saved:
            if v in self.away:
                (here,) = self._fresh(1)
                out.append(_at(reader, (renamed[v],), (here,), _to_device, True))
                renamed[v] = names[v] = here
        for call in calls:
            outs = self._fresh(len(call.outs))
            copy = call.reading(renamed).running(run_behind(call, reader))
            out.append(dataclasses.replace(copy, outs=outs, backward=True))
            for v, new in zip(call.outs, outs, strict=True):
                if v not in saved:
                    renamed[v] = new
                    if v not in block.held and v not in block_cut.kept:
                        names[v] = new
        return out

    def _fresh(self, count: int) -> tuple[int, ...]:
        self.values += count
        return tuple(range(self.values - count, self.values))

    def _cotangents(self, at: int, behind: set[int]) -> list[int]:
        """The operands of the next backward operation that are results of the backward pass."""
        for call in self.flat.calls[at:]:
            read = dict.fromkeys(v for v in call.ins if isinstance(v, int))
            cotangents = [v for v in read if v in behind]
            if call.backward and cotangents:
                return cotangents
        return []


def _whole(flat: FlatJaxpr, cuts: list[int], length: int, taken: set[int]) -> list[int]:
    """The cuts, with the first and the last block extended to the length of the others, as far as
    the adjacent calls are forward and not ``taken``. A first layer that also makes a mask is not
    equal to the others, but is a layer."""
    if len(cuts) < 3:
        return cuts
    first, last = cuts[0], cuts[-1]

    def free(at: int) -> bool:
        return 0 <= at < len(flat.calls) and at not in taken and not flat.calls[at].backward

    while cuts[1] - first < length and free(first - 1):
        first -= 1
    while last - cuts[-2] < length and free(last):
        last += 1
    return [first, *cuts[1:-1], last]


def _at(call: Call, ins: tuple[int, ...], outs: tuple[int, ...], run: Run, backward: bool) -> Call:
    """Another operation at the place of a call, with the line and names of that call."""

    def placed(values: Sequence[Any]) -> list[Any]:
        with compat.provenance(call.origin):
            return run(values)

    return Call(call.eqn, ins, outs, placed, backward, place=call.place)


def _to_host(values: Sequence[object]) -> list[object]:
    return [to_host(v) for v in values]


def _to_device(values: Sequence[object]) -> list[object]:
    return [to_device(v) for v in values]


def _barrier(values: Sequence[object]) -> list[object]:
    return list(jax.lax.optimization_barrier(tuple(values)))


def cuts_of(
    flat: FlatJaxpr, start: int, length: int, count: int, readers: Sequence[Sequence[int]]
) -> list[int]:
    """Where to cut equal blocks, once in each: where the fewest bytes cross in the forward pass,
    and among such places, where recomputation costs least. (Both halves of a transformer layer
    begin at the residual stream, but only one cut avoids recomputing the larger product.)"""
    end = start + length * count
    phases = phases_of(flat, start, length, count, readers)
    first = start + length * ((count - 1) // 2)

    def again(phase: int) -> float:
        """Cost of recomputing a block that is cut here."""
        part = range(first + phase, min(first + phase + length, end))
        block = _block(flat, part, readers)
        return cut(block, parse_policy(FULL)).flop if block.wanted else math.inf

    costs = {p: again(p) for p in phases[:TRIED]}
    phase = min(costs, key=lambda p: (costs[p], p))
    return sorted({start, end, *(start + phase + k * length for k in range(count))})


def phases_of(
    flat: FlatJaxpr, start: int, length: int, count: int, readers: Sequence[Sequence[int]]
) -> list[int]:
    """The places in equal blocks where the fewest bytes cross in the forward pass."""
    end = start + length * count
    rises = np.zeros(length * count + 1)
    for at in range(start, end):
        call = flat.calls[at]
        for value, var in zip(call.outs, call.eqn.outvars, strict=True):
            last = max((r for r in readers[value] if not flat.calls[r].backward), default=at)
            rises[at + 1 - start] += nbytes(var.aval)
            rises[min(last + 1, end) - start] -= nbytes(var.aval)
    crossing = np.cumsum(rises)[:-1].reshape(count, length)
    inner = crossing[1:].mean(axis=0) if count > 1 else crossing[0]
    return [int(p) for p in np.flatnonzero(inner <= LEAST * inner.min())]
