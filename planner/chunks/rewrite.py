"""Compute the rows of a step's large products in chunks, one after the other.

This applies to the step's jaxpr what Rabe and Staats ("Self-attention does not need O(n^2) memory",
2021) and Liu and Abbeel ("Blockwise parallel transformer", 2023) do for attention: scores of
attention, masks, softmax, and their gradients live for some rows at a time, and so do logits over a
large vocabulary. Every row is computed as before, from all columns, so results are equal up to the
order of sums over rows. With n chunks, a chunk takes every n-th row, so where the rows are split
over devices, every device has a share of each chunk: keys and values are gathered, scores are not.
Where the other dimensions of a product can occupy the devices, a chunk takes whole tiles of rows
(``TILE``), because taking rows out of tiles copies the operands into another layout.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.chunks.bodies import body_of, with_constants, without_operands
from planner.chunks.labels import SUMS, Program, Region, large_products, regions_at
from planner.chunks.resize import Cut, on_chunk, wide
from planner.chunks.stages import Stage, Stages, pays, stages_of
from planner.graph.flat import Call, FlatJaxpr, Run, again, execute, flatten, looped, nbytes
from planner.graph.jaxpr.places import user_line
from planner.graph.shapes import by_shapes
from planner.graph.trace import Traced, trace
from planner.remat.frontier import ELEMENT_FLOP, InChunks, Loop, call_cost

ROWS = 512
"""Rows per chunk if the search chooses."""
FEWEST, MOST = 4, 64
"""Smallest and largest number of chunks if the search chooses."""
TILE = 128
"""Rows of a tile: lanes of a TPU's vector registers."""
OCCUPY = 512
"""Number of products of rows and columns (of examples and heads) from which on chunks take tiles;
the rows of a chunk can then be split over few devices."""


def chunked(
    function: Callable[..., Any], traced: Traced, args: Sequence[Any], parts: int
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """A step that computes what ``function`` does, with the rows of large products in chunks.

    Args:
        function: a step of pytrees of arrays.
        traced: its trace for ``args``.
        args: its arguments, or ShapeDtypeStructs.
        parts: largest number of chunks; the largest number up to this that divides the rows is
            used.

    Returns:
        A function of the same arguments, which is rewritten again for other shapes, and a line for
        each product; no lines if there is nothing to do.
    """
    if parts == 1:
        return function, ()

    def chunk(traced: Traced) -> tuple[Callable[..., Any], tuple[str, ...]]:
        search = _Search(parts)
        run = search.run(traced.flat)
        if not search.lines:
            return function, ()

        def step(*args: Any) -> Any:
            leaves = run(jax.tree_util.tree_leaves(args))
            return jax.tree_util.tree_unflatten(traced.out_tree, leaves)

        return step, tuple(dict.fromkeys(search.lines))

    first, lines = chunk(traced)
    if not lines:
        return function, ()
    return by_shapes(function, args, first, lambda args: chunk(trace(function, args))[0]), lines


def in_chunks(flat: FlatJaxpr) -> InChunks:
    """The values of a program that chunks never hold whole, and the loops of its forward pass."""
    if "in chunks" not in flat.memo:
        program, regions = _regions(flat)
        if program is None:
            flat.memo["in chunks"] = InChunks()
        else:
            inside = {v for r in regions for v in _inside(program, r)}
            loops = tuple(loop for r in regions for loop in _forward_loops(program, r, inside))
            flat.memo["in chunks"] = InChunks(frozenset(inside), loops)
    known: InChunks = flat.memo["in chunks"]
    return known


def _inside(program: Program, region: Region) -> Iterator[int]:
    """The values of a region that nothing outside reads, and those that have both dimensions. The
    loop of the backward pass recomputes them (such as the maxima and the sums of a softmax)."""
    for at in region.calls:
        for v in program.flat.calls[at].outs:
            if v in region.both or region.calls.issuperset(program.readers[v]):
                yield v


def _forward_loops(program: Program, region: Region, inside: Set[int]) -> Iterator[Loop]:
    """The loops of a region's forward pass. Sums that are read outside (the output of attention)
    are complete after all of it; inner sums (of a softmax) after a pass over their terms."""
    flat = program.flat
    forward = [flat.calls[at] for at in region.calls if not flat.calls[at].backward]
    sums = {v: c for c in forward if c.kind in SUMS for v in c.outs if v not in region.both}
    if sums.keys() - inside:
        yield Loop(frozenset(sums.keys() - inside), sum(map(call_cost, forward)))
    for v in sorted(sums.keys() & inside):
        yield Loop(frozenset((v,)), ELEMENT_FLOP * nbytes(sums[v].eqn.invars[0].aval))


def chunks_worth(traced: Traced) -> int:
    """A number of chunks for a step, of about ``ROWS`` rows; 1 if there are no large products."""

    def rows(flat: FlatJaxpr) -> int:
        inner = [body[0] for c in flat.calls if (body := body_of(c)) is not None]
        region_rows = [r.rows for r in _regions(flat)[1]]
        return max([0, *region_rows, *(rows(flatten(jaxpr).live()) for jaxpr in inner)])

    most = rows(traced.flat)
    return 1 if not most else min(MOST, max(FEWEST, 1 << math.ceil(math.log2(max(most / ROWS, 1)))))


def _regions(flat: FlatJaxpr) -> tuple[Program | None, list[Region]]:
    """The regions of a program, without those in the bodies of its loops."""
    products = large_products(flat)
    if not products:
        return None, []
    program = Program.of(flat)
    regions: list[Region] = []
    seen: set[int] = set()
    for seed in products:
        if not seen.intersection(flat.calls[seed].outs):
            stages = _fewest_loops(stages_of(program, r) for r in regions_at(program, seed))
            if stages is not None:
                regions.append(stages.region)
                seen.update(stages.region.both)
    return program, regions


def _fewest_loops(candidates: Iterable[Stages | None]) -> Stages | None:
    """The candidate with the fewest loops."""
    return min((s for s in candidates if s is not None), key=lambda s: len(s.loops), default=None)


@dataclass(eq=False)
class _Search:
    """Rewrites a program and the bodies of its loops."""

    parts: int
    lines: list[str] = field(default_factory=list)

    def run(self, flat: FlatJaxpr) -> Run:
        """The program with chunks."""
        flat = flat.live()
        calls = list(flat.calls)
        for at, call in enumerate(calls):
            inside = body_of(call)
            if inside is not None:
                before = len(self.lines)
                jaxpr, constants = inside
                body, moved = with_constants(flat, call, jaxpr, constants)
                inner = self.run(body)
                if len(self.lines) > before:
                    rebuilt = looped if call.kind == "scan" else again
                    calls[at] = without_operands(call, moved, rebuilt(call.eqn, inner))
        flat = dataclasses.replace(flat, calls=tuple(calls)).live()
        done: set[int] = set()
        while open_ := [at for at in large_products(flat) if flat.calls[at].outs[0] not in done]:
            program = Program.of(flat)
            disjoint: list[Stages] = []
            for at in open_:
                if any(at in f.region.calls for f in disjoint):
                    continue
                stages = self._stages(program, at)
                if stages is None:
                    done.update(flat.calls[at].outs)
                elif not any(f.region.calls & stages.region.calls for f in disjoint):
                    disjoint.append(stages)
            new_flat = self._with_loops(program, disjoint)
            if new_flat is None:  # they depend on each other: one at a time
                disjoint = disjoint[:1]
                new_flat = self._with_loops(program, disjoint)
            assert new_flat is not None
            done.update(v for f in disjoint for v in flat.calls[f.region.seed].outs)
            flat = new_flat
        return functools.partial(execute, flat)

    def _stages(self, program: Program, seed: int) -> Stages | None:
        """The loops of a product, by the dimension that needs fewer."""
        split = (r for r in regions_at(program, seed) if self._parts(r) > 1)
        candidates = (stages_of(program, r) for r in split)
        return _fewest_loops(s for s in candidates if s is not None and pays(program, s))

    def _parts(self, region: Region) -> int:
        """The largest number of chunks that divides the rows of a region."""
        return max(m for m in range(1, self.parts + 1) if region.rows % m == 0)

    def _cut(self, flat: FlatJaxpr, region: Region) -> Cut:
        """The chunks of a region."""
        parts = self._parts(region)
        size = math.prod(compat.aval_shape(flat.calls[region.seed].eqn.outvars[0].aval))
        occupied = size >= OCCUPY * region.rows * region.columns
        tiled = occupied and region.rows % (parts * TILE) == 0
        return Cut(region.rows, parts, TILE if tiled else 1)

    def _with_loops(self, program: Program, disjoint: Sequence[Stages]) -> FlatJaxpr | None:
        """The program with regions as loops. Calls keep their order, except that what a call reads
        comes first. None if the loops depend on each other."""
        flat = program.flat
        dropped = {at for stages in disjoint for at in stages.dropped}
        calls = [(at, c) for at, c in enumerate(flat.calls) if at not in dropped]
        for stages in disjoint:
            cut = self._cut(flat, stages.region)
            for stage in stages.loops:
                last = flat.calls[stage.calls[-1]]
                run = functools.partial(_loop, flat, stages.region, stage, cut)
                ins, outs = (*stage.read, *stage.sliced), (*stage.stacked, *stage.summed)
                loop = Call(last.eqn, ins, outs, run, last.backward, made=True, place=last.place)
                calls.append((stage.calls[-1], loop))
        ordered = _sorted(calls)
        if ordered is None:
            return None
        self.lines += [_line(program, f, self._parts(f.region)) for f in disjoint]
        return dataclasses.replace(flat, calls=ordered)


def _sorted(calls: Sequence[tuple[int, Call]]) -> tuple[Call, ...] | None:
    """Calls sorted by number, but each after what it reads, and with effects (prints, updates of
    references) in their order. None if some calls depend on each other.
    """
    makers = {v: k for k, (_, c) in enumerate(calls) for v in c.outs}
    needs = [{makers[v] for v in c.ins if isinstance(v, int) and v in makers} for _, c in calls]
    effects = [k for k, (_, c) in enumerate(calls) if c.eqn.effects]
    for before, after in itertools.pairwise(effects):
        needs[after].add(before)
    readers: list[list[int]] = [[] for _ in calls]
    for k, need in enumerate(needs):
        for n in need:
            readers[n].append(k)
    left = [len(need) for need in needs]
    ready = [(at, k) for k, (at, _) in enumerate(calls) if not left[k]]
    heapq.heapify(ready)
    out = []
    while ready:
        _, k = heapq.heappop(ready)
        out.append(calls[k][1])
        for r in readers[k]:
            left[r] -= 1
            if not left[r]:
                heapq.heappush(ready, (calls[r][0], r))
    return tuple(out) if len(out) == len(calls) else None


def _loop(
    flat: FlatJaxpr, region: Region, stage: Stage, cut: Cut, values: Sequence[Any]
) -> list[Any]:
    """Run a stage, chunk after chunk."""
    calls = [flat.calls[at] for at in stage.calls]
    outer = dict(zip((*stage.read, *stage.sliced), values, strict=True))
    types = {v: var.aval for c in calls for v, var in zip(c.outs, c.eqn.outvars, strict=True)}

    def turn(sums: list[Any], xs: tuple[Any, list[Any]]) -> Any:
        number, slices = xs
        env = {v: outer[v] for v in stage.read}
        env.update(zip(stage.sliced, slices, strict=True))
        for call in calls:
            rows = [region.row.get(v) for v in call.outs]
            ins = [flat.read(v, env) for v in call.ins]
            env.update(zip(call.outs, on_chunk(call, ins, rows, cut, number), strict=True))
        new = [a + env[v].astype(a.dtype) for a, v in zip(sums, stage.summed, strict=True)]
        return new, [env[v] for v in stage.stacked]

    with compat.provenance(calls[-1].origin):
        start = [jnp.zeros(compat.aval_shape(types[v]), wide(types[v].dtype)) for v in stage.summed]
        slices = [cut.apart(outer[v], region.row[v]) for v in stage.sliced]
        sums, stacks = jax.lax.scan(turn, start, (jnp.arange(cut.parts), slices))
        rows = [cut.joined(x, region.row[v]) for x, v in zip(stacks, stage.stacked, strict=True)]
        whole = [x.astype(types[v].dtype) for x, v in zip(sums, stage.summed, strict=True)]
    return [*rows, *whole]


def _line(program: Program, stages: Stages, parts: int) -> str:
    """A line that describes a product in chunks."""
    region = stages.region
    where = user_line(program.flat.calls[region.seed].eqn) or "an unknown line"
    return (
        f"the product at {where}: {region.rows} rows of {region.columns} in {parts} chunks, "
        f"{len(region.calls)} operations in {len(stages.loops)} loop"
        + ("s" if len(stages.loops) > 1 else "")
    )
