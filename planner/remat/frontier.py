"""Which values of a block to keep: a minimum cut through its forward operations.

As in the min-cut partitioner of PyTorch's AOTAutograd, with a price on what is done again in place
of a list of what must not be: two nodes stand for an operation (it is done again) and for each of
its results (it is needed). Needed and its operation not done again: it is kept, at its bytes.
Done again: at its flop over the price, and all that it reads is needed. A loop over chunks stands
for one operation more: without it the sums that leave it can't be done again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import networkx as nx

from planner import compat
from planner.graph.flat import Call, nbytes, runs_once
from planner.graph.jaxpr.products import flop_of
from planner.remat.policy import Policy

ELEMENT_FLOP = 16.0
"""Flop per byte of result that an operation other than a product counts for: its time is that of
memory, and most of it is absorbed by the kernels around."""
LEAST_PRICE = 1e-3
"""Flop per byte where nothing is to be done again but for what must not be kept."""
_SOURCE, _SINK = "source", "sink"


@dataclass(frozen=True)
class Loop:
    """Operations of the forward pass that are done a chunk at a time (``planner.chunks``).

    Attributes:
        leaving: sums that are complete after the loop alone. Whoever does one of them again runs
            the whole loop; what is inside it is done again by the backward pass's own loop.
        flop: of the loop.
    """

    leaving: frozenset[int]
    flop: float


@dataclass(frozen=True)
class InChunks:
    """What of a program is done in chunks.

    Attributes:
        values: those that are never whole, and so must not be kept.
        loops: those of the forward pass.
    """

    values: frozenset[int] = frozenset()
    loops: tuple[Loop, ...] = ()


WHOLE = InChunks()
"""A program of which nothing is done in chunks."""


@dataclass(frozen=True, eq=False)
class Block:
    """A part of the forward pass.

    Attributes:
        calls: its operations, in order.
        wanted: values that the backward pass reads, and that nothing else holds.
        entries: values from outside that would have to be kept for it, with their bytes.
        held: values made in it that stay in memory anyway.
        never: values that are not to be kept at any price.
        loops: of its operations that are done in chunks.
    """

    calls: Sequence[Call]
    wanted: frozenset[int]
    entries: Mapping[int, int]
    held: frozenset[int]
    never: frozenset[int] = frozenset()
    loops: tuple[Loop, ...] = ()

    @property
    def bytes_now(self) -> int:
        """Bytes that wait for the backward pass if nothing is done again."""
        return sum(n for v, n in _sizes(self).items() if v in self.wanted)

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for blocks of the same operations on the same types, joined in the same way."""
        number: dict[int, int] = {}

        def of(value: Any) -> Any:
            return number.setdefault(value, len(number)) if isinstance(value, int) else None

        calls = tuple(
            (
                c.kind,
                tuple(of(v) for v in c.ins),
                tuple(of(v) for v in c.outs),
                tuple(
                    (compat.aval_shape(v.aval), compat.dtype_name(v.aval)) for v in c.eqn.outvars
                ),
                tuple(compat.aval_shape(v.aval) for v in c.eqn.invars),
            )
            for c in self.calls
        )
        marks = (sorted(map(of, s)) for s in (self.wanted, self.held, self.never & number.keys()))
        entries = sorted((of(v), n) for v, n in self.entries.items())
        loops = tuple((tuple(sorted(map(of, x.leaving))), x.flop) for x in self.loops)
        return calls, tuple(map(tuple, marks)), tuple(entries), loops


@dataclass(frozen=True)
class Cut:
    """What a block keeps.

    Attributes:
        kept: values that the backward pass finds in memory, besides those held anyway.
        again: which of its operations are done again, by position.
        kept_bytes, flop: of all these.
    """

    kept: frozenset[int]
    again: tuple[int, ...]
    kept_bytes: int
    flop: float


def cut(block: Block, policy: Policy) -> Cut:
    """The cheapest values to keep under a policy."""
    sizes, costs = _sizes(block), [call_cost(c) for c in block.calls]
    price = policy.flop_per_byte or (LEAST_PRICE if block.never & block.wanted else 0.0)
    if not price or not block.wanted:
        saved = frozenset(v for v in block.wanted if v not in block.held)
        return Cut(saved, (), sum(sizes[v] for v in saved), 0.0)
    net = nx.DiGraph()
    net.add_nodes_from((_SOURCE, _SINK))
    maker = {v: k for k, c in enumerate(block.calls) for v in c.outs}
    for v in sorted(maker.keys() | block.entries.keys()):
        if v not in block.held:
            above: Any = ("op", maker[v]) if v in maker else _SOURCE
            room = {} if v in block.never else {"capacity": max(sizes[v], 1)}
            net.add_edge(above, ("value", v), **room)
    for k, call in enumerate(block.calls):
        fixed = not policy.products and not block.never.intersection(call.outs)
        stays = runs_once(call.eqn) or (fixed and is_product(call.eqn))
        room = {} if stays else {"capacity": round(costs[k] / price)}
        net.add_edge(_SOURCE, ("op", k), **room)
        for v in {v for v in call.ins if isinstance(v, int)}:
            if (v in maker or v in block.entries) and v not in block.held:
                net.add_edge(("value", v), ("op", k))
    for number, loop in enumerate(block.loops):
        net.add_edge(_SOURCE, ("loop", number), capacity=round(loop.flop / price))
        for k in sorted({maker[v] for v in loop.leaving}):
            net.add_edge(("loop", number), ("op", k))
    for v in sorted(block.wanted - block.held):
        net.add_edge(("value", v), _SINK)
    # on the sink's side: operations that are done again, values that are needed
    reached = _sink_side(net)
    again = tuple(k for k in range(len(block.calls)) if ("op", k) in reached)
    saved = frozenset(
        v
        for v in maker.keys() | block.entries.keys()
        if ("value", v) in reached and not (v in maker and ("op", maker[v]) in reached)
    )
    needed = _needed(block, again, saved)
    read = {v for k in needed for v in block.calls[k].ins if isinstance(v, int)} | block.wanted
    saved &= read
    recomputed = {v for k in needed for v in block.calls[k].outs}
    flop = sum(costs[k] for k in needed)
    flop += sum(loop.flop for loop in block.loops if recomputed & loop.leaving)
    return Cut(saved, needed, sum(sizes[v] for v in saved), flop)


def compared_maxima(calls: Sequence[Call]) -> frozenset[int]:
    """Maxima and minima that operations compare values with.

    They must not be kept where the values are computed again: the gradient of a maximum divides by
    the number of values that are equal to it, and a compiler may round the second time otherwise.
    """
    maxima: set[int] = set()
    moved: dict[int, int] = {}
    for call in calls:
        if call.kind in ("reduce_max", "reduce_min"):
            moved[call.outs[0]] = call.outs[0]
        elif call.kind in ("reshape", "broadcast_in_dim", "squeeze", "transpose"):
            source = call.ins[0]
            if isinstance(source, int) and source in moved:
                moved[call.outs[0]] = moved[source]
        elif call.kind in ("eq", "ne"):
            maxima.update(moved[v] for v in call.ins if isinstance(v, int) and v in moved)
    return frozenset(maxima)


def _sink_side(net: Any) -> Set[Any]:
    """The nodes of the sink's side of a minimum cut, the one with the fewest."""
    residual = nx.algorithms.flow.boykov_kolmogorov(net, _SOURCE, _SINK)
    back = residual.reverse(copy=False)
    seen, stack = {_SINK}, [_SINK]
    while stack:
        for node, edge in back[stack.pop()].items():
            if node not in seen and edge["flow"] < edge["capacity"]:
                seen.add(node)
                stack.append(node)
    return seen


def _needed(block: Block, again: Sequence[int], saved: Set[int]) -> tuple[int, ...]:
    """Of the operations that may be done again, those that what is wanted depends on."""
    wanted = {v for v in block.wanted if v not in saved}
    out = []
    for k in reversed(again):
        call = block.calls[k]
        if wanted.intersection(call.outs):
            out.append(k)
            wanted.update(v for v in call.ins if isinstance(v, int) and v not in saved)
    return tuple(reversed(out))


def _sizes(block: Block) -> dict[int, int]:
    result_sizes = (
        (v, nbytes(var.aval))
        for c in block.calls
        for v, var in zip(c.outs, c.eqn.outvars, strict=True)
    )
    return dict(itertools.chain(block.entries.items(), result_sizes))


def is_product(eqn: Any) -> bool:
    """Whether an equation multiplies matrices, or holds one that does."""
    return product_flop(eqn) > 0.0


def call_cost(call: Call) -> float:
    """Flop, and bytes counted as flop."""
    moved = sum(nbytes(v.aval) for v in call.eqn.outvars)
    return product_flop(call.eqn) + ELEMENT_FLOP * moved


def product_flop(eqn: Any) -> float:
    """Flop of the products in an equation and what it calls."""
    return sum(flop_of(eqn).values())
