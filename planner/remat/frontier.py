"""Which values of a block to store: a minimum cut through its forward operations.

As in the min-cut partitioner of PyTorch's AOTAutograd, but with a price on recomputation instead of
a list of operations that must not be recomputed. An operation has a node (it is recomputed), and so
has each of its results (it is needed). A needed result of an operation that is not recomputed is
stored and costs its bytes. A recomputed operation costs its flop over the price, and all of its
operands are needed. A loop over chunks is one more operation: without it, the sums that leave it
can't be recomputed.
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
"""Flop per byte of result that an operation other than a product counts for. Its time is that of
memory traffic, and the kernels around it absorb most of it."""
LEAST_PRICE = 1e-3
"""Flop per byte if only values that must not be stored are to be recomputed."""
_SOURCE, _SINK = "source", "sink"


@dataclass(frozen=True)
class Loop:
    """Operations of the forward pass that run in chunks (``planner.chunks``).

    Attributes:
        leaving: sums that are complete only after the loop. Recomputing one of them runs the whole
            loop; values inside it are recomputed by the loop of the backward pass.
        flop: flop of the loop.
    """

    leaving: frozenset[int]
    flop: float


@dataclass(frozen=True)
class InChunks:
    """The parts of a program that run in chunks.

    Attributes:
        values: values that never exist whole, so they must not be stored.
        loops: the loops of the forward pass.
    """

    values: frozenset[int] = frozenset()
    loops: tuple[Loop, ...] = ()


WHOLE = InChunks()
"""For a program without parts that run in chunks."""


@dataclass(frozen=True, eq=False)
class Block:
    """A part of the forward pass.

    Attributes:
        calls: its operations, in order.
        wanted: values that the backward pass reads and that do not stay in memory otherwise.
        entries: values from outside that would have to be stored for it, with their bytes.
        held: values of the block that stay in memory anyway.
        never: values that must not be stored at any price.
        loops: loops of its operations that run in chunks.
    """

    calls: Sequence[Call]
    wanted: frozenset[int]
    entries: Mapping[int, int]
    held: frozenset[int]
    never: frozenset[int] = frozenset()
    loops: tuple[Loop, ...] = ()

    @property
    def bytes_now(self) -> int:
        """Bytes stored for the backward pass if nothing is recomputed."""
        return sum(n for v, n in _sizes(self).items() if v in self.wanted)

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for blocks of the same operations on the same types, connected in the same way."""
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
    """What a block stores and recomputes.

    Attributes:
        kept: values stored for the backward pass, besides those that stay in memory anyway.
        again: positions of its recomputed operations.
        kept_bytes: bytes of ``kept``.
        flop: cost of ``again`` (``call_cost``).
    """

    kept: frozenset[int]
    again: tuple[int, ...]
    kept_bytes: int
    flop: float


def cut(block: Block, policy: Policy) -> Cut:
    """The cheapest values to store under a policy."""
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
    # on the sink's side: recomputed operations and needed values
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

    They must not be stored if the values are recomputed: the gradient of a maximum divides by the
    number of values that are equal to it, and a compiler may round recomputed values differently.
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
    """The nodes on the sink's side of the minimum cut that has the fewest there."""
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
    """The operations among ``again`` that wanted values depend on."""
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
    """Whether an equation multiplies matrices, or contains one that does."""
    return product_flop(eqn) > 0.0


def call_cost(call: Call) -> float:
    """Flop of a call, plus the bytes of its results counted as flop."""
    moved = sum(nbytes(v.aval) for v in call.eqn.outvars)
    return product_flop(call.eqn) + ELEMENT_FLOP * moved


def product_flop(eqn: Any) -> float:
    """Flop of the products in an equation and what it calls."""
    return sum(flop_of(eqn).values())
