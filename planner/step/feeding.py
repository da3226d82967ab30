"""The arrays that the host feeds to a step: arguments that are new at every step.

A step that carries state gets its batch from the host, and each host loads the part for its
devices. The next batch is loaded and copied while a step runs. The rate is not part of a cluster's
description: the batch may come from memory, from a disk or from a decoder. So feeding has this
price: a step whose whole batch goes to every device costs ``SHARE`` of its ideal time more, and a
step whose batch is split into n pieces costs an n-th of that. A batch is then fed in shards unless
that costs the devices more than ``SHARE``, and no plan gets slower by more than that.

Whatever its source, the next batch passes the link from the host to each device while a step runs.
If this takes longer than the ideal step, the difference counts in full, but only in a step that
trains something: another function (a layer) may have weights where a step has its batch.

Arguments that hold any array of the state are not fed: their other arrays (frozen parameters, a
schedule) stay on the devices. In a step that carries no state, weights and batch can't always be
distinguished (``planner.graph.labels.untrained``); if they are not, feeding has no price.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.ir import Graph, Role
from planner.space.groups import Groups

SHARE = 1e-2
"""Cost of feeding the whole batch to every device, in ideal times of the step: an assumption."""


@dataclass(frozen=True)
class Fed:
    """An array that is fed: its share of all fed bytes, the factors that split it, and its size in
    bytes (0 if the step trains nothing)."""

    share: float
    factors: frozenset[int]
    nbytes: float = 0.0


def fed_inputs(graph: Graph) -> tuple[int, ...]:
    """The arrays that are fed: the batch, see ``planner.graph.labels.roles``."""
    return tuple(v for v in graph.batch if graph.values[v].shape)


def batch_of(graph: Graph) -> tuple[int, ...]:
    """The values that serve as the batch: those that the host may feed, or else, in a step that
    trains nothing, the state with a row per example (the samples)."""
    fed = tuple(v for v in graph.inputs if graph.values[v].fed)
    roles = {graph.values[v].role for v in graph.inputs}
    if fed or Role.PARAMETER in roles:
        return fed
    return tuple(v for v in graph.state if graph.values[v].role is Role.EXAMPLES)


def fed_of(graph: Graph, groups: Groups) -> tuple[tuple[Fed, ...], ...]:
    """Per group, its arrays that are fed."""
    out: list[list[Fed]] = [[] for _ in groups.groups]
    fed = [(v, home) for v in fed_inputs(graph) if (home := groups.home[v]) is not None]
    total = sum(graph.values[v].nbytes for v, _ in fed)
    trains = any(graph.values[v].role is Role.PARAMETER for v in graph.inputs)
    for value, (group, layout) in fed:
        factors = frozenset(f for f in layout if f >= 0)
        nbytes = float(graph.values[value].nbytes)
        out[group].append(Fed(nbytes / max(total, 1), factors, nbytes if trains else 0.0))
    return tuple(map(tuple, out))
