"""Arrays of the training state that live in host memory between steps (``offload=``)."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.errors import RequestError
from planner.graph.fetches import fetches
from planner.graph.ir import Graph
from planner.space.decisions.base import Array, IntArray, NothingMore, Prices
from planner.space.groups import Groups

OFFLOAD = "offload"
AUTO = "auto"
DEVICE, HOST = "device", "pinned_host"
"""JAX's names of memory kinds."""

WORTH = 1_000_000
"""Minimum bytes of an array for ``offload="auto"``: smaller arrays free next to no memory."""


@dataclass(frozen=True)
class Offload:
    """The parsed option: the paths to keep in host memory, or ``auto``: the search decides."""

    patterns: tuple[str, ...] = ()
    auto: bool = False


@dataclass(frozen=True)
class Hosted:
    """An array that is copied over the host link: bytes of the whole array, its factors, and the
    number of copies of its shard per step, in both directions. State is copied only if it is kept
    in host memory; ``always`` marks arrays that the model itself puts there."""

    nbytes: float
    factors: frozenset[int]
    copies: float
    always: bool = False


def check_offload(offload: str | Sequence[str]) -> Offload:
    """Parse the option; raises RequestError for an invalid regular expression."""
    patterns = (offload,) if isinstance(offload, str) else tuple(offload)
    if patterns == (AUTO,):
        return Offload(auto=True)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise RequestError(
                f"offload: {pattern!r} is no regular expression over argument paths: {error}"
            ) from error
    return Offload(patterns)


def hostable(graph: Graph, offload: Offload) -> frozenset[int]:
    """The inputs that may (``auto``) or must live in host memory: arrays of the state.

    Raises:
        RequestError: a pattern matches no array of the state, or an argument that does not come
            back as a result; the message names it.
    """
    carried = graph.next_values
    named = list(zip(graph.inputs, graph.input_paths, strict=True))
    if offload.auto:
        return frozenset(v for v, _ in named if v in carried and graph.values[v].nbytes >= WORTH)
    out: set[int] = set()
    for pattern in offload.patterns:
        hits = [(v, p) for v, p in named if re.search(pattern, p)]
        arrays = [(v, p) for v, p in hits if graph.values[v].shape]
        if not arrays:
            what = "only scalars match" if hits else "no argument path matches"
            paths = ", ".join(repr(p) for _, p in named[:3])
            raise RequestError(f"offload: {what} {pattern!r}; paths look like {paths}")
        for v, path in arrays:
            if v not in carried:
                raise RequestError(
                    f"offload: {pattern!r} matches argument {path}, which does not come back as a "
                    "result; only arrays of the training state can live in host memory: name those"
                )
        out.update(v for v, _ in arrays)
    return frozenset(out)


def hosted_of(
    graph: Graph, groups: Groups, live: Sequence[bool], values: frozenset[int]
) -> tuple[tuple[Hosted, ...], ...]:
    """Per group, its arrays that are copied between device and host: arrays of the state that may
    be kept there (``values``), and arrays that the model itself moves there and back."""
    out: list[list[Hosted]] = [[] for _ in groups.groups]
    for op in graph.ops:
        entry = groups.op_layouts[op.index]
        if live[op.index] and entry is not None and graph.changes_memory(op):
            weight = graph.regions[op.region].weight
            for k in graph.memory_changes(op):
                factors = frozenset(f for f in entry[1][k] if f >= 0)
                nbytes = float(graph.values[op.inputs[k]].nbytes)
                out[entry[0]].append(Hosted(nbytes, factors, weight, always=True))
    if not values:
        return tuple(map(tuple, out))
    for value, spans in fetches(graph, live, sorted(values)).items():
        home = groups.home[value]
        if home is not None:
            factors = frozenset(f for f in home[1] if f >= 0)
            copies = len(spans) + (graph.next_values[value] != value)
            if copies:  # else it only passes through
                out[home[0]].append(Hosted(float(graph.values[value].nbytes), factors, copies))
    return tuple(map(tuple, out))


class HostMemory(NothingMore):
    """Whether an array of the state lives in device or in host memory between steps."""

    name = OFFLOAD
    options: tuple[str, ...] = (DEVICE, HOST)

    def parse(self, option_value: Any) -> Offload:
        """Regular expressions over argument paths, or ``"auto"``."""
        return check_offload(() if option_value is None else option_value)

    def demands(self, parsed: Offload) -> int | None:
        """Arrays that patterns name must be kept in host memory."""
        return None if parsed.auto else 1

    def values(self, graph: Graph, parsed: Offload) -> frozenset[int]:
        """See ``hostable``."""
        return hostable(graph, parsed)

    def facts(
        self, graph: Graph, groups: Groups, live: Sequence[bool], values: frozenset[int]
    ) -> Mapping[int, Hashable]:
        """The arrays that are copied between device and host."""
        by_group = enumerate(hosted_of(graph, groups, live, values))
        return {group: arrays for group, arrays in by_group if arrays}

    def seconds(self, facts: Sequence[Hosted], option: IntArray, prices: Prices) -> Array:
        """Copies between devices and their hosts. Arrays that the program itself puts there
        (activations that wait for the backward pass) are copied during compute, asynchronously,
        like prefetched gathers. Compute does not hide copies of the state around its update."""
        total: Array = np.zeros((1, len(option)))
        for array in facts:
            local = prices.local_bytes(array.nbytes, array.factors, stored=not array.always)
            one = array.copies * prices.host_copy_s(local, ahead=array.always)
            total = total + np.where((option == 1) | array.always, one, 0.0)
        return total
