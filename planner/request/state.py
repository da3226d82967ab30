"""Requests for the training state as a whole: ZeRO levels, opt-outs, a size threshold.

The *state* consists of the inputs that come back as results. Its moments
(``planner.graph.labels.roles``) are *optimizer state*. All other state counts as *parameters*, and
so do frozen weights, which do not come back. State with a row per example goes with the batch, and
buffers larger than all trained parameters are neither. ZeRO (Rajbhandari et al. 2020) shards over
the data axes: level 1 the optimizer state, level 2 also the gradients, level 3 also the parameters.
Gradients are always reduced directly into the shards of what they update, so levels 1 and 2 give
one plan here.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import RequestError
from planner.graph.ir import Graph, Role
from planner.space.factors import Layout
from planner.space.groups import Group, Groups
from planner.space.strategies import digits, strategies_of
from planner.spec import MeshSpec

Mask = NDArray[np.bool_]

LEVELS = (0, 1, 2, 3)
DATA_AXES = frozenset({"data", "fsdp"})


@dataclass(frozen=True)
class StateRequest:
    """The options for the state.

    Attributes:
        zero: ZeRO level 0 to 3; None leaves it to the search.
        whole_below: arrays with fewer bytes are stored whole.
        never_fsdp: regular expressions over argument paths; matching arrays are stored as they are
            used, so that they are not gathered.
    """

    zero: int | None = None
    whole_below: float = 0.0
    never_fsdp: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != StateRequest()


def check_state_request(
    zero: int | None, whole_below: float, never_fsdp: str | Sequence[str]
) -> StateRequest:
    """Validate; raises RequestError."""
    if zero is not None and zero not in LEVELS:
        raise RequestError(f"zero={zero!r}: expected a ZeRO level, one of {LEVELS}, or None")
    if not whole_below >= 0:
        raise RequestError(f"whole_below={whole_below!r}: expected bytes, as 65536 or '64KB'")
    patterns = (never_fsdp,) if isinstance(never_fsdp, str) else tuple(never_fsdp)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise RequestError(
                f"never_fsdp: {pattern!r} is no regular expression: {error}"
            ) from error
    return StateRequest(zero, float(whole_below), patterns)


def data_axes(mesh: MeshSpec) -> tuple[str, ...]:
    """The mesh axes of data parallelism: by name (``DATA_AXES``), else the first axis."""
    named = tuple(n for n in mesh.names if n.rstrip("23456789") in DATA_AXES)
    return named or mesh.names[:1]


@dataclass(frozen=True)
class TrainingState:
    """The arrays of a step's state: graph values, and which of them are parameters.

    ``others`` are optimizer state; ``bound`` are the arrays that match ``never_fsdp``.
    """

    parameters: frozenset[int]
    others: frozenset[int]
    bound: frozenset[int]

    @property
    def arrays(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(sorted(self.parameters | self.others | self.bound))

    def label(self, value: int) -> Hashable:
        """A key that distinguishes a value from others of its shape."""
        return value in self.parameters, value in self.others, value in self.bound


def find_state(graph: Graph, request: StateRequest) -> TrainingState:
    """The state of a step, and the arrays in it that a request names.

    Raises:
        RequestError: a pattern matches no argument; says what paths look like.
    """
    bound: set[int] = set()
    for pattern in request.never_fsdp:
        hits = [
            v
            for v, path in zip(graph.inputs, graph.input_paths, strict=True)
            if re.search(pattern, path)
        ]
        if not hits:
            paths = ", ".join(repr(p) for p in graph.input_paths[:3])
            raise RequestError(
                f"never_fsdp: no argument path matches {pattern!r}; paths look like {paths}"
            )
        bound.update(hits)
    others = frozenset(v for v in graph.state if graph.values[v].role is Role.MOMENT)
    rows = {v for v in graph.state if graph.values[v].role is Role.EXAMPLES}
    frozen = {v for v in graph.inputs if graph.values[v].role is Role.FROZEN}
    # replay buffers, memories: gathered whole in every step, they would cost more than all else
    trained = sum(
        v.nbytes for v in map(graph.values.__getitem__, graph.state) if v.role is Role.PARAMETER
    )
    buffers = {
        v
        for v in graph.state
        if graph.values[v].role is Role.STATISTIC and graph.values[v].nbytes > trained > 0
    }
    parameters = frozenset(graph.state) - others - rows - buffers | {
        v for v in frozen if graph.values[v].splits
    }
    return TrainingState(parameters, others, frozenset(bound))


def state_masks(
    state: TrainingState,
    request: StateRequest,
    pinned: frozenset[int],
    graph: Graph,
    groups: Groups,
    mesh: MeshSpec,
    hard: Mapping[int, Mask],
) -> dict[int, Mask]:
    """Masks that enforce a request as far as pins, divisibility and the operations allow.

    Args:
        state: the state of the graph.
        request: the options for the state.
        pinned: values whose stored sharding the user pinned; it does not change.
        graph, groups, mesh: as for ``pins.pin_masks``.
        hard: masks so far.
    """
    masks = dict(hard)
    data = [mesh.names.index(n) for n in data_axes(mesh)]

    def narrow(group: int, wanted: Mask) -> None:
        both = masks[group] & wanted if group in masks else wanted
        if both.any():
            masks[group] = both

    for value in state.arrays:
        home = groups.home[value]
        if home is None:
            continue
        group, layout = home
        g = groups.groups[group]
        full = strategies_of(g, mesh.sizes)
        store = digits(full.store, layout, frozenset(), len(layout))
        use = digits(full.use, layout, frozenset(), len(layout))
        if value in state.bound:
            narrow(group, (store == use).all(axis=1))
        if value in pinned or value not in state.parameters | state.others:
            continue
        if graph.values[value].nbytes < request.whole_below:
            narrow(group, (store == 0).all(axis=1))
        elif request.zero is not None:
            parameter = value in state.parameters
            split = value not in state.bound and request.zero >= (3 if parameter else 1)
            narrow(
                group, _along(data, store, use, whole=not split or not is_value_group(g, layout))
            )
    return masks


def is_value_group(group: Group, layout: Layout) -> bool:
    """Whether a group determines only the dimensions of one value. A bias shares its group with
    activations, which must not follow it."""
    return all(f in layout for f, ok in enumerate(group.shardable) if ok)


def _along(
    axes: Sequence[int], store: NDArray[np.int64], use: NDArray[np.int64], whole: bool
) -> Mask:
    """Strategies that store a value whole along some axes, or split as far as it divides. A value
    is gathered for use along an axis that splits only its store."""
    split = (store[:, axes] > 0).sum(axis=1)
    if whole:
        return np.asarray(split == 0)
    apart = (use != store).any()  # an input that products read
    good = (use[:, axes] == 0).all(axis=1) if apart else np.ones(len(store), bool)
    return np.asarray(good & (split == split[good].max()))
