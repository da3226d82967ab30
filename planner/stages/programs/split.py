"""Splits a microbatch into one forward and one backward program per stage.

A forward call belongs to the stage between two cuts. A backward call goes to the last stage that
has all of its operands. A forward result is at the stage that makes it and at those whose forward
pass reads it. A backward result is at its stage and passes down to all earlier stages. So a value
that a forward pass leaves for a backward pass usually crosses no border. If no stage has all
operands, they are sent to the stage that needs them; cuts avoid that. Each program recomputes
values that do not depend on the batch, and cheap ones that depend only on it (masks, positions).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.graph.flat import Call, nbytes
from planner.remat.frontier import call_cost, is_product
from planner.stages.body import Body, closure
from planner.stages.programs.cuts import crossing, cut_blocks, narrow_places, slice_part

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
LARGE = 1 << 16
"""Minimum bytes of an array of the state for its stage to matter."""
MOST_LOOKS = 200
"""Maximum number of border moves that are tried."""
SENT = 0.01
"""Cost of a backward call whose operands must be sent to it, as a share of the longest stage."""
ADDS = frozenset({"add", "add_any"})


@dataclass(frozen=True, eq=False)
class Task:
    """The work of one stage for one microbatch.

    Attributes:
        kind: ``F`` (forward), ``B`` (gradients that other stages wait for) or ``W`` (the rest).
        stage: the index of the stage.
        calls: the calls that it runs, in order.
        own: the calls that only this task runs (the others are cheap, and each reader runs them).
        ins: values of this microbatch that other tasks make.
        fixed: operands of the loop and constants, which do not change between microbatches.
        rows: values of the batch that it reads.
        outs: values that other tasks read.
        sums: values that are added up over the microbatches.
        stacked: values that are stacked over the microbatches.
    """

    kind: str
    stage: int
    calls: tuple[Call, ...]
    own: tuple[Call, ...]
    ins: tuple[int, ...]
    fixed: tuple[int, ...]
    rows: tuple[int, ...]
    outs: tuple[int, ...]
    sums: tuple[int, ...]
    stacked: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Split:
    """A microbatch, split into tasks.

    Attributes:
        body: the microbatch.
        count: number of stages.
        tasks: the tasks by kind and stage.
        makers: per value that a task makes for others, adds up or stacks, the task.
        pieces: per carry of the loop, the sums that it accumulates: parts of its first dimension,
            each a sum of values.
    """

    body: Body
    count: int
    tasks: dict[tuple[str, int], Task]
    makers: dict[int, tuple[str, int]]
    pieces: tuple[tuple[tuple[Any, ...], ...], ...]

    @property
    def moves(self) -> list[tuple[int, tuple[str, int], tuple[str, int]]]:
        """(value, task that makes it, task of another stage that reads it)."""
        return [
            (v, self.makers[v], key)
            for key, task in self.tasks.items()
            for v in task.ins
            if self.makers[v][1] != key[1]
        ]


@dataclass(frozen=True, eq=False)
class Passes:
    """The calls of a microbatch: ``spread`` (every reader runs them itself), the forward pass and
    the backward pass."""

    spread: list[Call]
    ahead: list[Call]
    back: list[Call]


def split(body: Body, passes: Passes, begins: Sequence[int], weights: bool = True) -> Split:
    """Split a microbatch.

    Args:
        body: the body of the loop over microbatches.
        passes: its calls (``passes_of``).
        begins: the first call of each stage's forward pass.
        weights: whether the calls that no other stage waits for form a separate task.
    """
    stage, _ = _stages(body, passes, begins)
    return _tasks(body, len(begins), passes.spread, (passes.ahead, passes.back), stage, weights)


def balanced(
    body: Body, passes: Passes, count: int, seconds: Callable[[Call], float] = call_cost
) -> list[int]:
    """The first call of each stage's forward pass, chosen to minimize the longest stage, including
    its backward pass. The first cuts price blocks as if each were a stage. Borders then move while
    that helps, because recomputed calls may change their stage if a block of them is cut. Scanned
    layers that are cut into ``count`` parts stay together with their stage's part of the state.

    Args:
        body, passes: the microbatch.
        count: number of stages.
        seconds: the time of a call.

    Raises:
        NoStagesError: there are fewer blocks than stages.
    """
    blocks = narrow_places(passes.ahead, count)[:-1]
    cost = {id(c): seconds(c) for c in (*passes.ahead, *passes.back)}

    def spent(begins: Sequence[int]) -> tuple[list[float], int]:
        """Time per stage; and the number of backward calls that no stage has all operands of."""
        stage, alone = _stages(body, passes, begins)
        out = [0.0] * len(begins)
        for c, at in stage.items():
            out[at] += cost[c]
        return out, alone

    layers = _layers(passes, count)

    def score(chosen: Sequence[int]) -> tuple[int, float, float]:
        begins = [blocks[k] for k in chosen]
        stage_seconds, alone = spent(begins)
        away = sum(bisect.bisect(begins, at) - 1 != part for at, part in layers)
        return away, max(stage_seconds) * (1 + SENT * alone), sum(s * s for s in stage_seconds)

    across = crossing(passes.ahead)
    starts = [cut_blocks(spent(blocks)[0], [across[b] for b in blocks], count)]
    firsts = [min((at for at, part in layers if part == k), default=0) for k in range(count)]
    aligned = [0, *(bisect.bisect(blocks, at) - 1 for at in firsts[1:])]
    if aligned == sorted(set(aligned)):
        starts.append(aligned)
    best = min(starts, key=score)
    least, looks = score(best), 0
    better = True
    while better and looks < MOST_LOOKS:
        better = False
        for k, step in itertools.product(range(1, count), (1, -1, 2, -2)):
            near = [*best[:k], best[k] + step, *best[k + 1 :]]
            if near != sorted(set(near)) or near[-1] >= len(blocks):
                continue
            looks += 1
            if (near_score := score(near)) < least:
                best, least, better = near, near_score, True
    return [blocks[k] for k in best]


def _layers(passes: Passes, count: int) -> list[tuple[int, int]]:
    """Calls of the forward pass that scan one of ``count`` parts of the layers: (index, part). Part
    k lies on the devices of stage k. Empty if there are several scans: they can't all be
    aligned."""
    parts = {
        v: part for c in passes.spread if (part := slice_part(c, count)) is not None for v in c.outs
    }
    layers = {
        (at, parts[v])
        for at, c in enumerate(passes.ahead)
        if c.kind == "scan"
        for v in c.ins
        if isinstance(v, int) and v in parts
    }
    return sorted(layers) if len(layers) == count else []


def _stages(body: Body, passes: Passes, begins: Sequence[int]) -> tuple[dict[int, int], int]:
    """Per call, by ``id``, its stage; and the number of backward calls that no stage has all
    operands of."""
    ahead = passes.ahead
    stage: dict[int, int] = {}
    there: dict[int, int] = {}  # per value of the forward pass, a bit for each stage that has it
    below: dict[int, int] = {}  # per value of the backward pass, those at its stage and before
    everywhere = (1 << len(begins)) - 1
    groups = [bisect.bisect(begins, at) - 1 for at in range(len(ahead))]
    for call, group in zip(ahead, groups, strict=True):
        stage[id(call)] = group
        there.update((v, 1 << group) for v in call.outs)
    for call, group in zip(ahead, groups, strict=True):
        for v in call.ins:
            if isinstance(v, int) and v in there:
                there[v] |= 1 << group
    liked = _liked(body, passes.spread, ahead, groups)
    alone = 0
    for call in passes.back:
        mask, reach, wish = everywhere, everywhere, everywhere
        for v in call.ins:
            if isinstance(v, int):
                mask &= there.get(v, everywhere)
                reach &= below.get(v, everywhere)
                wish &= liked.get(v, everywhere)
        alone += not mask & reach
        at = (mask & reach & wish or mask & reach or reach).bit_length() - 1
        stage[id(call)] = at
        below.update((v, (2 << at) - 1) for v in call.outs)
    return stage, alone


def passes_of(body: Body) -> Passes:
    """The calls of a microbatch, by pass."""
    return Passes(*_sorted(body))


def _sorted(body: Body) -> tuple[list[Call], list[Call], list[Call]]:
    """Calls that every reader runs itself; the forward pass; the backward pass."""
    cheap: set[int] = set(body.rows)
    large = {v for v, n in _sizes(body).items() if v not in body.batch and n >= LARGE}
    behind: set[int] = set()
    spread, ahead, back = [], [], []
    for call in body.flat.calls:
        read = {v for v in call.ins if isinstance(v, int)}
        if not body.batch.intersection(call.outs):
            spread.append(call)
        elif read & body.batch <= cheap and not read & large and not is_product(call.eqn):
            spread.append(call)
            cheap.update(call.outs)
        elif call.backward or read & behind:
            back.append(call)
            behind.update(call.outs)
        else:
            ahead.append(call)
    return spread, ahead, back


def _sizes(body: Body) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for c in body.flat.calls:
        for v, var in zip((*c.ins, *c.outs), (*c.eqn.invars, *c.eqn.outvars), strict=False):
            if isinstance(v, int) and v not in sizes:
                sizes[v] = nbytes(var.aval)
    return sizes


def _liked(
    body: Body, spread: Sequence[Call], ahead: Sequence[Call], groups: Sequence[int]
) -> dict[int, int]:
    """Per large array that does not change, and per value made of such arrays alone, the stages
    whose forward pass reads it."""
    sizes = _sizes(body)
    roots: dict[int, set[int]] = {}
    for call in spread:
        read = [v for v in call.ins if isinstance(v, int)]
        if not body.batch.intersection(call.outs):
            sources = set().union(*(roots.get(v, {v}) for v in read)) if read else set()
            roots.update((v, sources) for v in call.outs)
    at: dict[int, int] = {}
    for call, group in zip(ahead, groups, strict=True):
        for v in call.ins:
            for root in roots.get(v, {v}) if isinstance(v, int) else ():
                at[root] = at.get(root, 0) | 1 << group
            if isinstance(v, int):
                at[v] = at.get(v, 0) | 1 << group
    out: dict[int, int] = {}
    for v, size in sizes.items():
        if v in body.batch or size < LARGE:
            continue
        masks = [at[v]] if v in at else [at[r] for r in roots.get(v, {v}) if r in at]
        for mask in masks:
            out[v] = out.get(v, mask) & mask
        if out.get(v) == 0:
            del out[v]
    return out


def _tasks(
    body: Body,
    count: int,
    spread: Sequence[Call],
    passes: tuple[Sequence[Call], Sequence[Call]],
    stage: dict[int, int],
    weights: bool,
) -> Split:
    ahead, back = passes
    maker = {v: c for c in (*ahead, *back) for v in c.outs}
    readers: dict[int, int] = {}
    for c in body.flat.calls:
        for v in {v for v in c.ins if isinstance(v, int)}:
            readers[v] = readers.get(v, 0) + 1
    for x in (
        *body.stacked,
        *(v for s in body.summed for v in (s if isinstance(s, tuple) else (s,))),
    ):
        if isinstance(x, int):
            readers[x] = readers.get(x, 0) + 1
    dropped: set[int] = set()

    def addends(v: Any) -> tuple[Any, ...]:
        """The addends of a sum over stages, which are added up separately."""
        call = maker.get(v) if isinstance(v, int) else None
        if call is None or call.kind not in ADDS or readers[v] > 1:
            return (v,)
        types = {(u.aval.shape, u.aval.dtype) for u in (*call.eqn.invars, *call.eqn.outvars)}
        if len(types) > 1 or not all(isinstance(u, int) and u in maker for u in call.ins):
            return (v,)
        parts = tuple(p for u in call.ins for p in addends(u))
        if len({stage[id(maker[p])] for p in parts if p in maker}) == 1:
            return (v,)
        dropped.add(id(call))
        return parts

    pieces = tuple(
        tuple(addends(v) for v in (s if isinstance(s, tuple) else (s,))) for s in body.summed
    )
    ahead = [c for c in ahead if id(c) not in dropped]
    back = [c for c in back if id(c) not in dropped]
    keyed = {id(c): (FORWARD, stage[id(c)]) for c in ahead}
    keyed.update({id(c): (BACKWARD, stage[id(c)]) for c in back})
    if weights:
        for c in _waiting(back, stage):
            keyed[id(c)] = (WEIGHTS, stage[id(c)])
    task_calls: dict[tuple[str, int], list[Call]] = {
        (kind, s): []
        for kind in (FORWARD, BACKWARD, *((WEIGHTS,) if weights else ()))
        for s in range(count)
    }
    for c in (*ahead, *back):
        task_calls[keyed[id(c)]].append(c)
    made_by = {v: keyed[id(c)] for c in (*ahead, *back) for v in c.outs}
    first = (FORWARD, 0)
    sums: dict[tuple[str, int], set[int]] = {key: set() for key in task_calls}
    for p in {p for s in pieces for parts in s for p in parts if isinstance(p, int)}:
        sums[made_by.setdefault(p, first)].add(p)
    stacked: dict[tuple[str, int], set[int]] = {key: set() for key in task_calls}
    for p in {v for v in body.stacked if isinstance(v, int)}:
        stacked[made_by.setdefault(p, first)].add(p)
    tasks = {}
    spread_values = {v for c in spread for v in c.outs}
    fixed = set(body.flat.consts) | set(body.loop.split(body.flat.inputs)[0])
    rows = set(body.rows)
    for key, members in task_calls.items():
        wanted = (
            {v for c in members for v in c.ins if isinstance(v, int)} | sums[key] | stacked[key]
        )
        before = closure(spread, sorted(wanted & spread_values))
        calls = (*before, *members)
        results = {v for c in calls for v in c.outs}
        read = ({v for c in calls for v in c.ins if isinstance(v, int)} | wanted) - results
        tasks[key] = Task(
            *key,
            calls,
            tuple(members),
            tuple(sorted(read - fixed - rows)),
            tuple(sorted(read & fixed)),
            tuple(sorted(read & rows)),
            (),
            tuple(sorted(sums[key])),
            tuple(sorted(stacked[key])),
        )
    outs: dict[tuple[str, int], set[int]] = {key: set() for key in tasks}
    for task in tasks.values():
        for v in task.ins:
            outs[made_by[v]].add(v)
    tasks = {k: dataclasses.replace(t, outs=tuple(sorted(outs[k]))) for k, t in tasks.items()}
    return Split(body, count, tasks, made_by, pieces)


def _waiting(back: Sequence[Call], stage: dict[int, int]) -> Iterable[Call]:
    """Calls of the backward pass that no other stage waits for."""
    at = {v: stage[id(c)] for c in back for v in c.outs}
    needed = {
        v
        for c in back
        for v in c.ins
        if isinstance(v, int) and at.get(v, stage[id(c)]) != stage[id(c)]
    }
    out = []
    for c in reversed(back):
        if needed.intersection(c.outs):
            needed.update(v for v in c.ins if isinstance(v, int) and v in at)
        else:
            out.append(c)
    return out
