"""The loops of a region: its operations, grouped by what must be complete before them.

The forward and the backward pass of an attention are one region, but the output of the forward pass
leaves it, and the cotangent that enters the backward pass depends on that output through the rest
of the step. An operation is in stage n if what it needs has left and entered the region n times.
Each stage is one loop. A later stage recomputes values of earlier ones that have both dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import jax.numpy as jnp

from planner.chunks.labels import SUMS, Program, Region, rows_factor
from planner.chunks.resize import splits
from planner.graph.flat import nbytes

ROUNDED_ONCE = frozenset(
    "dot_general mul div neg max min select_n convert_element_type transpose reshape "
    "broadcast_in_dim squeeze expand_dims copy stop_gradient".split()
)
"""Operations whose results do not depend on what a compiler fuses them with, if only such
operations come before them."""
LESS = 0.25
"""Largest ratio of the bytes that leave a region to those of its largest value."""


class Kind(Enum):
    """The form of a value in a loop over chunks."""

    WHOLE = "whole"
    ROWS = "rows"
    SUM = "sum"


@dataclass(frozen=True, eq=False)
class Stage:
    """One loop.

    Attributes:
        calls: its operations, in order.
        read: values that enter it whole.
        sliced: values that enter it by rows.
        stacked: results by rows.
        summed: results that are sums over rows.
    """

    calls: tuple[int, ...]
    read: tuple[int, ...]
    sliced: tuple[int, ...]
    stacked: tuple[int, ...]
    summed: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Stages:
    """A region as loops; ``dropped``: operations that they replace."""

    region: Region
    loops: tuple[Stage, ...]
    dropped: frozenset[int]


def stages_of(program: Program, region: Region) -> Stages | None:
    """The loops of a region. None if its rows depend on each other, if a comparison is not safe, or
    if a result that leaves it has no rows and is no sum over rows."""
    if not _compares_safely(program, region):
        return None
    flat, order = program.flat, sorted(region.calls)
    stage = _numbers(program, region)
    maker = {v: at for at in order for v in flat.calls[at].outs}
    fixed = _fixed(program, order)
    wanted = {v for v in flat.outputs if isinstance(v, int)}
    wanted |= {v for v in maker if not region.calls.issuperset(program.readers[v])}
    loops: list[Stage] = []
    for number in sorted(set(stage.values()), reverse=True):
        calls = _with_again(program, region, maker, stage, number)
        kinds = _kinds(program, region, calls)
        if kinds is None:
            return None
        stage_outputs = {v for at in calls if stage[at] == number for v in flat.calls[at].outs}
        left = sorted(stage_outputs & wanted - fixed)
        if any(kinds[v] is Kind.WHOLE for v in left):
            return None
        if not left:
            continue
        outputs = {v for at in calls for v in flat.calls[at].outs}
        read = {v for at in calls for v in flat.calls[at].ins if isinstance(v, int)}
        entering = sorted(read - outputs)
        wanted |= read - outputs
        loops.append(
            Stage(
                tuple(calls),
                tuple(v for v in entering if v not in region.row),
                tuple(v for v in entering if v in region.row),
                tuple(v for v in left if kinds[v] is Kind.ROWS),
                tuple(v for v in left if kinds[v] is Kind.SUM),
            )
        )
    needed = wanted & fixed
    for at in reversed(order):  # values computed from constants stay if they are read outside
        if needed.intersection(flat.calls[at].outs):
            needed.update(v for v in flat.calls[at].ins if isinstance(v, int))
    dropped = frozenset(at for at in order if not needed.intersection(flat.calls[at].outs))
    return Stages(region, tuple(reversed(loops)), dropped) if loops else None


def _compares_safely(program: Program, region: Region) -> bool:
    """Whether scores that are compared with their maximum are the same wherever they are computed.

    The gradient of a maximum divides by the number of scores that are equal to it. A compiler may
    compute the scores of a chunk in two kernels; if one fuses a product into a sum, and so rounds
    once, and the other does not, none may be equal, and 0/0 is NaN (seen with XLA:CPU).
    """
    flat = program.flat
    maker = {v: at for at in region.calls for v in flat.calls[at].outs}
    todo = [
        maker[v]
        for at in region.calls
        if flat.calls[at].kind in ("eq", "ne")
        for v in flat.calls[at].ins
        if isinstance(v, int) and v in region.both and v in maker
    ]
    seen: set[int] = set()
    while todo:
        at = todo.pop()
        call = flat.calls[at]
        if at in seen or not jnp.issubdtype(call.eqn.outvars[0].aval.dtype, jnp.floating):
            continue
        if call.kind not in ROUNDED_ONCE:
            return False
        seen.add(at)
        if call.kind != "dot_general":
            todo += [maker[v] for v in call.ins if isinstance(v, int) and v in maker]
    return True


def _numbers(program: Program, region: Region) -> dict[int, int]:
    """The stage of each call of a region. Effects come after earlier effects."""
    inside: dict[int, int] = {}
    outside: dict[int, int] = {}
    out: dict[int, int] = {}
    effects = 0
    calls, reads = program.flat.calls, program.reads
    for at in range(min(region.calls), max(region.calls) + 1):
        call = calls[at]
        if at in region.calls:
            levels = [inside[v] if v in inside else outside.get(v, 0) for v in reads[at]]
            out[at] = max(levels, default=0)
            inside.update(dict.fromkeys(call.outs, out[at]))
            continue
        level = 0  # also that of everything before the region, which is not recorded
        for v in reads[at]:
            if v in inside:
                level = max(level, inside[v] + 1)
            elif v in outside:
                level = max(level, outside[v])
        if call.eqn.effects:
            level = effects = max(level, effects)
        if level:
            outside.update(dict.fromkeys(call.outs, level))
    return out


def _fixed(program: Program, order: Sequence[int]) -> frozenset[int]:
    """Values that are computed from constants alone: masks and positions. Readers outside of the
    loops get them whole."""
    fixed: set[int] = set()
    for at in order:
        call = program.flat.calls[at]
        if all(v in fixed for v in call.ins if isinstance(v, int)):
            fixed.update(call.outs)
    return frozenset(fixed)


def _with_again(
    program: Program,
    region: Region,
    maker: Mapping[int, int],
    stage: Mapping[int, int],
    number: int,
) -> list[int]:
    """The calls of a stage, and those of earlier stages that it repeats: all but sums.

    A maximum is repeated because it must match the scores that it is compared with to the last
    digit: its gradient divides by the number of scores that are equal to it.
    """
    wanted = {at for at, s in stage.items() if s == number}
    todo = list(wanted)
    while todo:
        for v in program.flat.calls[todo.pop()].ins:
            if not isinstance(v, int) or v not in maker:
                continue
            at = maker[v]
            sums = program.flat.calls[at].kind in SUMS and v not in region.both
            if at not in wanted and not sums:
                wanted.add(at)
                todo.append(at)
    return sorted(wanted)


def _kinds(program: Program, region: Region, calls: Sequence[int]) -> dict[int, Kind] | None:
    """The kinds of the results of a loop's operations; None if rows depend on each other."""
    flat = program.flat
    kinds: dict[int, Kind] = {}
    for at in calls:
        call, rule = flat.calls[at], program.rules[at]
        assert rule is not None
        rows_in = [region.row.get(v) if isinstance(v, int) else None for v in call.ins]
        rows_out = [region.row.get(v) for v in call.outs]
        if any(kinds.get(v) is Kind.SUM for v in call.ins if isinstance(v, int)):
            return None
        factor = rows_factor(program, at, region.row)
        if factor is None:
            kinds.update(dict.fromkeys(call.outs, Kind.WHOLE))
            continue
        if factor in rule.replicated or not splits(call, rows_in, rows_out):
            return None
        if all(r is not None for r in rows_out):
            kinds.update(dict.fromkeys(call.outs, Kind.ROWS))
        elif factor in rule.reduction and call.kind in SUMS:
            kinds.update(dict.fromkeys(call.outs, Kind.SUM))
        else:
            return None
    return kinds


def pays(program: Program, stages: Stages) -> bool:
    """Whether the values that leave the loops are small compared with those inside."""
    flat, region = program.flat, stages.region
    sizes = {
        v: nbytes(var.aval)
        for at in region.calls
        for v, var in zip(flat.calls[at].outs, flat.calls[at].eqn.outvars, strict=True)
    }
    largest = max(sizes[v] for v in region.both if v in sizes)
    left = sum(sizes[v] for loop in stages.loops for v in loop.stacked if v in region.both)
    return left <= LESS * largest
