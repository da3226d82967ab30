"""The step with its loop bodies and repeated blocks computed again in the backward pass.

This is the program that ``jax.checkpoint`` around the body of each ``lax.scan``, or around each of
the equal blocks of an unrolled model, would give. It is made from the step's jaxpr, so the user's
code need not be changed to try it:

* A forward scan whose stacked results only a later scan of the same length reads: the stack of its
  carries replaces them, and the later scan computes the forward body again.
* Equal blocks of forward operations: what only the backward pass reads is made again, in front of
  the first operation that reads it. Blocks are cut where least crosses.

The program is planned, never run: nothing keeps a compiler from merging equal operations.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from planner import compat
from planner.advice.flat import Call, FlatJaxpr, execute, flatten, nbytes
from planner.graph.jaxpr.places import user_line, user_lines
from planner.graph.jaxpr.walk import Loop, loop_of
from planner.graph.labels.blocks import blocks_of
from planner.graph.trace import Traced

Leaves = Callable[[Sequence[Any]], list[Any]]
"""A program of flat operands and results."""


@dataclass(frozen=True, eq=False)
class Recomputed:
    """A step that computes parts of its forward pass again.

    Attributes:
        what: which parts, with the line of each.
        function: the step, with the same arguments and results.
    """

    what: str
    function: Callable[..., Any]


def recomputed(traced: Traced, *, on_host: bool = False) -> Recomputed | None:
    """The step with jax.checkpoint around its loop bodies and repeated blocks.

    Args:
        traced: the step.
        on_host: whether what is left for the backward pass waits in host memory.

    Returns:
        The step, or None where no loop body or block leaves anything to compute again.
    """
    names: list[str] = []
    run = _rewritten(traced.jaxpr, names, on_host)
    if run is None:
        return None

    def step(*args: Any) -> Any:
        return jax.tree_util.tree_unflatten(traced.out_tree, run(jax.tree_util.tree_leaves(args)))

    return Recomputed(" and ".join(dict.fromkeys(names)), step)


def _rewritten(jaxpr: Any, names: list[str], on_host: bool) -> Leaves | None:
    """The program of a jaxpr, parts of it computed again; None where none is."""
    flat = flatten(jaxpr)
    before = len(names)
    flat = _scans(flat, names, on_host)
    flat = _blocks(flat, names, on_host)
    if len(names) == before:
        return None
    return lambda leaves: execute(flat, leaves)


# ---- loops ----------------------------------------------------------------------------------


def _scans(flat: FlatJaxpr, names: list[str], on_host: bool) -> FlatJaxpr:
    """Forward and backward scans in pairs; scans that hold such pairs inside."""
    calls = list(flat.calls)
    readers = flat.readers()
    paired: set[int] = set()
    made = flat.values
    for at, call in enumerate(flat.calls):
        if call.kind != "scan" or at in paired:
            continue
        partner, dropped = _partner(flat, at, readers)
        if partner is None:
            inner = _rewritten(call.eqn.params["jaxpr"], names, on_host)
            if inner is not None:
                calls[at] = call.running(_looped(call.eqn, inner))
            continue
        stacks = tuple(range(made, made + loop_of(call.eqn).carries))
        made += len(stacks)
        calls[at] = _forward(call, dropped, stacks, on_host)
        calls[partner] = _backward(call, calls[partner], dropped, stacks, on_host)
        paired |= {at, partner}
        names.append(f"the body of the scan at {user_line(call.eqn) or 'an unknown line'}")
    return FlatJaxpr(tuple(calls), flat.inputs, flat.outputs, flat.consts, made)


def _partner(
    flat: FlatJaxpr, at: int, readers: Sequence[Sequence[int]]
) -> tuple[int | None, frozenset[int]]:
    """The scan that reads the stacked results of another, and those that only it reads, position by
    position; no scan where the carries would take as many bytes."""
    call = flat.calls[at]
    n_carry, length = loop_of(call.eqn).carries, call.eqn.params["length"]
    outputs = {v for v in flat.outputs if isinstance(v, int)}
    by_reader: dict[int, set[int]] = {}
    sizes = dict(zip(call.outs, (nbytes(v.aval) for v in call.eqn.outvars), strict=True))
    for value in call.outs[n_carry:]:
        mine = set(readers[value])
        if len(mine) != 1 or value in outputs:
            continue
        other = flat.calls[reader := mine.pop()]
        if other.kind != "scan" or other.eqn.params["length"] != length or len(other.ins) == 0:
            continue
        consts, carries, _ = loop_of(other.eqn).split(other.ins)
        if value not in (*consts, *carries):
            by_reader.setdefault(reader, set()).add(value)
    if not by_reader:
        return None, frozenset()
    best = max(by_reader, key=lambda r: sum(sizes[v] for v in by_reader[r]))
    stacked = sum(sizes[v] for v in call.outs[:n_carry]) * length
    if sum(sizes[v] for v in by_reader[best]) <= stacked:
        return None, frozenset()
    return best, frozenset(by_reader[best])


def _forward(call: Call, dropped: frozenset[int], stacks: tuple[int, ...], on_host: bool) -> Call:
    """A scan that stacks its carries instead of what is dropped."""
    loop = loop_of(call.eqn)
    n_carry, body = loop.carries, _iteration(loop)
    left = [k for k, v in enumerate(call.outs[n_carry:]) if v not in dropped]

    def run(values: Sequence[Any]) -> list[Any]:
        consts, first, rows = loop.split(values)

        def once(carry: Any, xs: Any) -> Any:
            results = body(*consts, *carry, *xs)
            ys = results[n_carry:]
            saved = [_to_host(c) for c in carry] if on_host else list(carry)
            return list(results[:n_carry]), ([ys[k] for k in left], saved)

        carry, (ys, saved) = _scan(call.eqn, once, first, rows)
        return [*carry, *ys, *saved]

    outs = (*call.outs[:n_carry], *(call.outs[n_carry + k] for k in left), *stacks)
    return Call(call.eqn, call.ins, outs, run, call.backward)


def _backward(
    forward: Call, call: Call, dropped: frozenset[int], stacks: tuple[int, ...], on_host: bool
) -> Call:
    """A scan that computes the forward body again, from its stacked carries."""
    loop, earlier = loop_of(call.eqn), loop_of(forward.eqn)
    body, again = _iteration(loop), _iteration(earlier)
    place = {v: k for k, v in enumerate(forward.outs)}
    consts, carries, rows = loop.split(call.ins)
    left = [v for v in rows if v not in dropped]
    f_consts, _, f_rows = earlier.split(forward.ins)
    cuts = np.cumsum([len(x) for x in (consts, carries, left, f_consts, f_rows)])

    def run(values: Sequence[Any]) -> list[Any]:
        parts = [list(values[a:b]) for a, b in zip((0, *cuts), (*cuts, None), strict=True)]
        consts, first, own, f_consts, f_xs, saved = parts

        def once(carry: Any, xs: Any) -> Any:
            mine, theirs, start = xs
            start = [_to_device(c) for c in start] if on_host else start
            made = again(*f_consts, *start, *theirs)
            given = iter(mine)
            full = [made[place[v]] if v in dropped else next(given) for v in rows]
            results = body(*consts, *carry, *full)
            return list(results[: loop.carries]), list(results[loop.carries :])

        carry, ys = _scan(call.eqn, once, first, (own, f_xs, saved))
        return [*carry, *ys]

    ins = (*consts, *carries, *left, *f_consts, *f_rows, *stacks)
    return Call(call.eqn, ins, call.outs, run, call.backward)


def _looped(eqn: Any, inner: Leaves) -> Leaves:
    """A scan with another body of the same operands and results."""
    loop = loop_of(eqn)

    def run(values: Sequence[Any]) -> list[Any]:
        consts, first, rows = loop.split(values)

        def once(carry: Any, xs: Any) -> Any:
            results = inner([*consts, *carry, *xs])
            return results[: loop.carries], results[loop.carries :]

        carry, ys = _scan(eqn, once, first, rows)
        return [*carry, *ys]

    return run


def _scan(eqn: Any, once: Callable[[Any, Any], Any], first: list[Any], rows: Any) -> Any:
    params = eqn.params
    with compat.provenance(eqn):
        return jax.lax.scan(
            once, first, rows, length=params["length"], reverse=bool(params["reverse"])
        )


def _iteration(loop: Loop) -> Callable[..., Any]:
    """The body of a scan, which has no constants of its own, as a function."""
    jaxpr = loop.bodies[0].jaxpr
    closed = jaxpr if hasattr(jaxpr, "jaxpr") else jex_core.ClosedJaxpr(jaxpr, ())
    run: Callable[..., Any] = jex_core.jaxpr_as_fun(closed)
    return run


# ---- repeated blocks ------------------------------------------------------------------------


def _blocks(flat: FlatJaxpr, names: list[str], on_host: bool) -> FlatJaxpr:
    """Equal blocks of the forward pass, computed again for the backward pass."""
    readers = flat.readers()
    segments: list[range] = []
    for block in blocks_of(np.array(flat.codes(), np.int64)):
        if any(c.backward for c in flat.calls[block.start : block.end]):
            continue
        cuts = _cuts(flat, block.start, block.length, block.count, readers)
        mine = [range(a, b) for a, b in itertools.pairwise(cuts) if a < b]
        if _dropped(flat, mine[len(mine) // 2], readers):
            segments += mine
            middle = flat.calls[mine[len(mine) // 2].start : mine[len(mine) // 2].stop]
            names.append(f"each of {block.count} equal blocks at {_common_line(middle)}")
    again: dict[int, list[Call]] = {}
    fresh, renamed = flat.values, dict[int, dict[int, int]]()
    for segment in segments:
        dropped = _dropped(flat, segment, readers)
        wanted = [r for v in dropped for r in readers[v] if flat.calls[r].backward]
        if not wanted:
            continue
        copies, names_of, fresh = _copies(flat, segment, readers, fresh)
        again.setdefault(min(wanted), []).extend(copies)
        for reader in set(wanted):
            renamed.setdefault(reader, {}).update({v: names_of[v] for v in dropped})
    out: list[Call] = []
    for at, call in enumerate(flat.calls):
        out += again.get(at, [])
        out.append(call.reading(renamed[at]) if at in renamed else call)
    kept = {v for s in segments for v in _crossing(flat, s, readers)} if on_host else set()
    return _on_host(FlatJaxpr(tuple(out), flat.inputs, flat.outputs, flat.consts, fresh), kept)


def _dropped(flat: FlatJaxpr, segment: range, readers: Sequence[Sequence[int]]) -> frozenset[int]:
    """What a block makes and only the backward pass reads outside of it."""
    outputs = {v for v in flat.outputs if isinstance(v, int)}
    return frozenset(
        value
        for at in segment
        for value in flat.calls[at].outs
        if value not in outputs
        and any(flat.calls[r].backward for r in readers[value])
        and all(r in segment or flat.calls[r].backward for r in readers[value])
    )


def _crossing(flat: FlatJaxpr, segment: range, readers: Sequence[Sequence[int]]) -> frozenset[int]:
    """What a block makes and the forward pass reads outside of it."""
    return frozenset(
        value
        for at in segment
        for value in flat.calls[at].outs
        if any(r not in segment and not flat.calls[r].backward for r in readers[value])
    )


def _copies(
    flat: FlatJaxpr, segment: range, readers: Sequence[Sequence[int]], fresh: int
) -> tuple[list[Call], dict[int, int], int]:
    """The operations of a block that make what is dropped, with results of new names; the names;
    and how many numbers are taken then."""
    kept = _crossing(flat, segment, readers)
    wanted = set(_dropped(flat, segment, readers))
    needed: list[Call] = []
    for at in reversed(segment):
        call = flat.calls[at]
        if wanted.intersection(call.outs):
            needed.append(call)
            wanted.update(v for v in call.ins if isinstance(v, int) and v not in kept)
    names: dict[int, int] = {}
    copies = []
    for call in reversed(needed):
        outs = tuple(range(fresh, fresh + len(call.outs)))
        fresh += len(outs)
        copies.append(dataclasses.replace(call.reading(names), outs=outs, backward=True))
        names.update((v, o) for v, o in zip(call.outs, outs, strict=True) if v not in kept)
    return copies, names, fresh


def _on_host(flat: FlatJaxpr, kept: Set[int]) -> FlatJaxpr:
    """Values that wait in host memory between the forward and the backward pass."""
    first: dict[int, int] = {}
    for at, call in enumerate(flat.calls):
        if call.backward:
            for value in kept & {v for v in call.ins if isinstance(v, int)}:
                first.setdefault(value, at)
    out: list[Call] = []
    fresh, names = flat.values, dict[int, int]()
    for at, call in enumerate(flat.calls):
        for value in sorted(v for v in call.ins if isinstance(v, int) and first.get(v) == at):
            out.append(Call(call.eqn, (names[value],), (fresh,), _each(_to_device), True))
            names[value] = fresh
            fresh += 1
        out.append(call.reading(names) if call.backward else call)
        for value in call.outs:
            if value in first:
                out.append(Call(call.eqn, (value,), (fresh,), _each(_to_host), False))
                names[value] = fresh
                fresh += 1
    return dataclasses.replace(flat, calls=tuple(out), values=fresh)


def _cuts(
    flat: FlatJaxpr, start: int, length: int, count: int, readers: Sequence[Sequence[int]]
) -> list[int]:
    """Where to cut equal blocks, once in each: where fewest bytes cross in the forward pass."""
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
    phase = int(np.argmin(inner))
    return sorted({start, end, *(start + phase + k * length for k in range(count))})


def _common_line(calls: Sequence[Call]) -> str:
    """The innermost line of the user's that all these operations were called from."""
    common: list[str] | None = None
    for call in calls:
        lines = user_lines(call.eqn)
        if not lines:
            continue
        same = lines if common is None else common
        pairs = zip(same, lines, strict=False)
        common = [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return common[-1] if common else "an unknown line"


def _each(move: Callable[[Any], Any]) -> Callable[[Sequence[Any]], list[Any]]:
    return lambda values: [move(v) for v in values]


def _to_host(value: Any) -> Any:
    return jax.device_put(value, jax.memory.Space.Host)


def _to_device(value: Any) -> Any:
    return jax.device_put(value, jax.memory.Space.Device)
