"""Arrays of the training state that live in host memory between steps (``offload=``)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import RequestError
from planner.graph.ir import Graph
from planner.graph.memory.fetches import fetches
from planner.space.groups import Groups
from planner.space.strategies import enumerate_strategies
from planner.spec import MeshSpec

Mask = NDArray[np.bool_]

AUTO = "auto"
DEVICE, HOST = "device", "pinned_host"
"""Memory kinds, by jax's names."""

WORTH = 1_000_000
"""Bytes from which on ``offload="auto"`` looks at an array: smaller ones free next to nothing."""


@dataclass(frozen=True)
class Offload:
    """What is asked: the paths to keep in host memory, or (``auto``) that the search decides."""

    patterns: tuple[str, ...] = ()
    auto: bool = False


@dataclass(frozen=True)
class Hosted:
    """An array that is copied over the host link: bytes of the whole, its factors, and how often a
    step copies its shard, there and back. State is copied only where it is kept in host memory;
    ``always`` what the model itself puts there."""

    nbytes: float
    factors: frozenset[int]
    copies: float
    always: bool = False


def check_offload(offload: str | Sequence[str]) -> Offload:
    """Parse; raises RequestError for what is no regular expression."""
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


def hostable(graph: Graph, asked: Offload) -> frozenset[int]:
    """The inputs that may (``auto``) or must live in host memory: arrays of the state.

    Raises:
        RequestError: a pattern that matches no array of the state, or an argument that does not
            come back as a result; says which.
    """
    carried = graph.next_values
    named = list(zip(graph.inputs, graph.input_paths, strict=True))
    if asked.auto:
        return frozenset(v for v, _ in named if v in carried and graph.values[v].nbytes >= WORTH)
    out: set[int] = set()
    for pattern in asked.patterns:
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


def with_host(groups: Groups, values: frozenset[int]) -> Groups:
    """The groups, those of ``values`` with a choice of memory."""
    mine = {home[0] for v in values if (home := groups.home[v]) is not None}
    if not mine:
        return groups
    made = tuple(dataclasses.replace(g, host=g.index in mine) for g in groups.groups)
    return dataclasses.replace(groups, groups=made)


def hosted_of(
    graph: Graph, groups: Groups, live: Sequence[bool], values: frozenset[int]
) -> tuple[tuple[Hosted, ...], ...]:
    """Per group, its arrays that are copied between device and host: those of the state that may be
    kept there (``values``), and what the model itself puts there and takes back."""
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


def host_masks(
    asked: Offload, groups: Groups, mesh: MeshSpec, hard: Mapping[int, Mask]
) -> dict[int, Mask]:
    """Masks under which what the user named is kept in host memory."""
    masks = dict(hard)
    for g in groups.groups:
        if g.host and not asked.auto:
            full = enumerate_strategies(g.sizes, g.shardable, mesh.sizes, g.kind, g.host)
            masks[g.index] = masks[g.index] & full.host if g.index in masks else full.host
    return masks
