"""Stages of a model whose layers are written out one after the other: groups of equal blocks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.graph.flat import Call, FlatJaxpr
from planner.graph.ir import Block
from planner.graph.labels.blocks import blocks_of
from planner.remat.blocks import phases_of
from planner.remat.sites import common_line
from planner.stages.body import Body, depends
from planner.stages.chains.chain import Chain, Stack, Task, made_by, read_by
from planner.stages.chains.match import Keys, Match, all_laid
from planner.stages.errors import NoStagesError, refused

Groups = list[list[Call]]

TRIED = 8
"""Maximum number of places within a block at which cuts are tried."""


def group_chain(body: Body, count: int) -> Chain | None:
    """The chain of the largest run of equal forward blocks; None if there is none. The remaining
    blocks run after the stages.

    Raises:
        NoStagesError: the run can't be cut.
    """
    flat = body.flat
    runs = [
        run
        for run in blocks_of(np.array(flat.codes(), np.int64))
        if not any(c.backward for c in flat.calls[run.start : run.end])
    ]
    if not runs:
        return None
    run = max(runs, key=lambda r: r.length * r.count)
    each = run.count // count
    if not each:
        line = common_line(flat.calls[run.start : run.end])
        raise refused(f"there are {run.count} equal blocks at {line}, fewer than {count} stages")
    first: NoStagesError | None = None
    keys = Keys()
    for start in _starts(flat, run):
        ends = [start + k * each * run.length for k in range(count + 1)]
        if ends[-1] > len(flat.calls) or any(c.backward for c in flat.calls[start : ends[-1]]):
            continue
        grouping = _Grouping(body, ends, each, run.count, keys)
        for of_reader in (True, False):
            try:
                return grouping.chain(of_reader)
            except NoStagesError as error:
                first = first or error
    raise first or refused("its layers are not equal")


def _starts(flat: FlatJaxpr, run: Block) -> list[int]:
    """The calls at which the first block may begin: those that the fewest bytes cross."""
    phases = phases_of(flat, run.start, run.length, run.count, flat.readers)[:TRIED]
    starts = [run.start + p - back for back in (0, run.length) for p in phases]
    return [s for s in starts if s >= 0]


class _Grouping:
    """``group_chain`` in progress."""

    def __init__(
        self, body: Body, ends: Sequence[int], blocks: int, total: int, keys: Keys
    ) -> None:
        self.body, self.flat, self.ends = body, body.flat, ends
        self.blocks, self.found = blocks, total
        self.keys = keys
        self.count = len(ends) - 1
        self.position = {id(c): at for at, c in enumerate(self.flat.calls)}
        self.like = 1 if self.count > 2 else self.count - 1

    def chain(self, of_reader: bool) -> Chain:
        """The chain, if the groups are equal.

        Args:
            of_reader: whether the backward pass of a stage reads the stage's operands (else, its
                results).
        """
        ahead = self._forward()
        there, pattern = all_laid([Match() for _ in ahead], self.like, ahead, self.keys)
        forward = self._task(pattern, there, None)
        back = self._backward(there, forward, of_reader)
        ends = (0, self.body.batch)
        here, pattern_back = all_laid(there, self.like, back, self.keys, self.count - 1, ends)
        if not pattern_back:
            line = common_line(self.flat.calls[self.ends[0] : self.ends[-1]])
            raise refused(
                f"the stages at {line} have no equal operations in their backward "
                "pass: the layers differ, or none of them has one"
            )
        backward = self._task(pattern_back, here, forward)
        members = {self.position[id(c)]: True for m in there for c in m.calls}
        members |= {self.position[id(c)]: False for m in here for c in m.calls}
        wanted = {v for v in self.flat.outputs if isinstance(v, int)}
        for at, c in enumerate(self.flat.calls):
            if at not in members:
                wanted.update(v for v in c.ins if isinstance(v, int))
        line = common_line(pattern)
        what = f"{self.count} stages, each {self.blocks} of the {self.found} equal blocks at {line}"
        if left := self.found - self.count * self.blocks:
            what += f"; {left} behind the last"
        return Chain(
            _leaving(forward, there[-1], made_by(pattern), wanted),
            _leaving(backward, here[0], made_by(pattern_back), wanted),
            members,
            what,
        )

    def _forward(self) -> Groups:
        """The forward calls of each stage."""
        groups: Groups = []
        for s, (a, b) in enumerate(itertools.pairwise(self.ends)):
            calls = list(self.flat.calls[a:b])
            if s:
                before = made_by(self.flat.calls[self.ends[s - 1] : a])
                later = depends(calls, [v for v in before if v in read_by(calls)])
                calls = [c for c in calls if later.intersection(c.outs)]
            groups.append(calls)
        return self._joined(groups, list(self.flat.calls[: self.ends[-1]]), forward=True)

    def _joined(self, groups: Groups, calls: Sequence[Call], forward: bool) -> Groups:
        """The groups, each with those of ``calls`` whose results only this group reads; if
        ``forward``, readers in the backward pass do not count."""
        owner = {id(c): s for s, g in enumerate(groups) for c in g}
        readers: dict[int, set[Any]] = {}
        out = [{id(c) for c in g} for g in groups]
        open_ = {id(c) for c in calls}
        for c in reversed(self.flat.calls):
            group = owner.get(id(c))
            if forward and c.backward:
                continue
            if group is None:
                reading = {r for v in c.outs for r in readers.get(v, ())}
                batch = self.body.batch.intersection(c.outs)  # other values are computed once
                if batch and len(reading) == 1 and id(c) in open_ and None not in reading:
                    (group,) = reading
                    out[group].add(id(c))
            for v in c.ins:
                if isinstance(v, int):
                    readers.setdefault(v, set()).add(group)
        return [[c for c in self.flat.calls if id(c) in members] for members in out]

    def _backward(self, there: Sequence[Match], forward: Task, of_reader: bool) -> Groups:
        """The calls after the last stage, by the stage whose values they read."""
        count = self.count
        stage_of = {v: s for s, m in enumerate(there) for v in m.names.values()}
        for _, u, first in forward.carries:
            for s, m in enumerate(there):
                stage_of[m.names[u]] = s + of_reader
            if isinstance(first, int) and of_reader:
                stage_of[first] = 0
        for stack in forward.stacks.values():
            stage_of.update(zip(stack.values, range(count), strict=True))
        calls = self.flat.calls[self.ends[-1] :]
        crossing: dict[int, int] = {}
        for _ in range(2):  # the second time, values that a stage passes back count as its reader's
            stage = _stages(calls, stage_of, crossing, count)
            for c in calls:
                call_stage = stage.get(c.outs[0], count)
                for v in c.ins:
                    if isinstance(v, int) and call_stage < stage.get(v, -1):
                        crossing[v] = min(call_stage, crossing.get(v, call_stage))
        groups: Groups = [[] for _ in range(count)]
        for c in calls:
            if stage.get(c.outs[0], count) < count:
                groups[stage[c.outs[0]]].append(c)
        return self._joined(groups, [c for c in calls if c.outs[0] not in stage], forward=False)

    def _task(
        self,
        pattern: Sequence[Call],
        matches: Sequence[Match],
        forward: Task | None,
    ) -> Task:
        """The task of a pattern: sorts the values that the pattern reads."""
        count = self.count
        results = made_by(pattern)
        names = [{v: m.names[v] for v in results} for m in matches]
        carries: list[tuple[int, int, Any]] = []
        stacks: dict[int, Stack] = {}
        rows: dict[int, Stack] = {}
        shared: set[int] = set()
        residuals: list[int] = []
        reads = {} if forward is None else {r: None for r, _, _ in forward.carries}
        for a, call in read_by(pattern).items():
            if a in results:
                continue
            if forward is not None and (a in matches[0].names or a in reads):
                residuals.append(a)
                continue
            if forward is not None and a in forward.stacks:
                stacks[a] = forward.stacks[a]
                continue
            if forward is not None and a in forward.rows:
                rows[a] = forward.rows[a]
                continue
            values = [m.outer[a] for m in matches]
            numbers = [v for v in values if isinstance(v, int)]
            if len(numbers) == count and len(set(numbers)) == 1:
                shared.add(a)
                continue
            u = self._carried(values, names, forward is None)
            if u is not None:
                carries.append((a, u, values[0 if forward is None else -1]))
            elif len(numbers) == count and set(numbers) <= set(self.body.rows):
                rows[a] = Stack(tuple(numbers))
            elif len(numbers) == count and not self.body.batch.intersection(numbers):
                stacks[a] = Stack(tuple(numbers))
            else:
                raise refused(
                    f"{common_line([call])}: an operand of {call.kind} has no counterpart in some "
                    "stage; in one program all stages must be alike"
                )
        summed = self.body.added
        sums = {}
        for u in sorted(results):
            stage_values = tuple(n[u] for n in names)
            if summed.intersection(stage_values):
                if not summed.issuperset(stage_values):
                    raise refused("a sum of one stage is not added up in another")
                sums[u] = Stack(stage_values)
        return Task(
            tuple(pattern),
            tuple(carries),
            (),
            stacks,
            rows,
            frozenset(shared),
            sums,
            tuple(residuals),
        )

    def _carried(
        self, values: Sequence[Any], names: Sequence[Mapping[int, int]], forward: bool
    ) -> int | None:
        """The number of the pattern's result that the next stage reads as ``values``; None if the
        stage before does not make them."""
        order = range(1, self.count) if forward else range(self.count - 1)
        step = -1 if forward else 1
        candidates = [u for u in names[0] if all(names[s + step][u] == values[s] for s in order)]
        return candidates[0] if candidates else None


WIDENS = frozenset({"convert_element_type", "optimization_barrier"})
"""Operations on a gradient before it is added up."""


def _stages(
    calls: Sequence[Call], stage_of: Mapping[int, int], crossing: Mapping[int, int], count: int
) -> dict[int, int]:
    """The stage that makes each value of the backward pass; ``count``: after the last stage.

    A call belongs to the last stage whose forward values it reads, but to no later stage than the
    backward values that it reads. Calls that read neither are omitted.
    """
    stage: dict[int, int] = {}
    for call in calls:
        read = [v for v in call.ins if isinstance(v, int)]
        evidence = [stage_of[v] for v in read if v in stage_of]
        behind = [crossing.get(v, stage[v]) for v in read if v in stage]
        if not behind and not evidence:
            continue
        call_stage = count
        if call.backward:
            call_stage = min([max(evidence)] if evidence else behind)
            call_stage = min([call_stage, *behind])
        elif call.kind in WIDENS and behind:
            call_stage = min(behind)
        stage.update(dict.fromkeys(call.outs, call_stage))
    return stage


def _leaving(task: Task, match: Match, results: set[int], wanted: set[int]) -> Task:
    """The task with its exits: the values of its last stage that the rest of the step reads."""
    summed = {v for s in task.sums.values() for v in s.values}
    names = ((u, match.names[u]) for u in sorted(results))
    return dataclasses.replace(task, exits=tuple(x for x in names if x[1] in wanted - summed))
