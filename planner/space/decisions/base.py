"""The interface of a decision: a choice that a group may have besides its sharding.

A decision is one file here, which contains everything that the planner needs, and one row in
``DECISIONS``; its part of the executor is one function in ``executor.run.decisions``. All parts of
the planner use it through this protocol:

===========  ====================================================================================
request      ``parse`` reads its option; ``demands`` may fix an option, so the search can't choose
groups       ``values`` have the choice: their groups' strategies are multiplied by the options
facts        ``facts`` determine its seconds, so that equal groups are recognized
seconds      ``seconds`` are added to those of the group's strategies
memory       ``buffers`` changes the buffers on devices, and their times, under each option
plan         ``entry`` puts the chosen option into the plan
===========  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.graph.ir import Graph
from planner.space.buffer import Buffer
from planner.space.groups import Groups

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Prices(Protocol):
    """The cluster's prices for the current strategies, as arrays [meshes, strategies]."""

    def local_bytes(self, nbytes: float, factors: frozenset[int], stored: bool) -> Array:
        """Bytes per device of an array, as it is ``stored`` between steps or as it is used."""
        ...

    def host_copy_s(self, nbytes: Array, ahead: bool) -> Array:
        """Seconds of one copy of ``nbytes`` between a device and its host. For a copy that runs
        ``ahead`` of its use, only the seconds that compute does not hide."""
        ...


class Decision(Protocol):
    """A kind of decision; see the module's docstring.

    Attributes:
        name: the name of the decision, of its option, and of its entry in a plan.
        options: the names of the choices; the first is the default.
    """

    name: str
    options: tuple[str, ...]

    def parse(self, option_value: Any) -> Any:
        """Parse and check the option; ``option_value`` is None if it is not set. Raises
        RequestError."""
        ...

    def demands(self, parsed: Any) -> int | None:
        """The option that all groups with the choice must take; None: the search decides."""
        ...

    def values(self, graph: Graph, parsed: Any) -> frozenset[int]:
        """The values whose groups have the choice. Raises RequestError."""
        ...

    def facts(
        self, graph: Graph, groups: Groups, live: Sequence[bool], values: frozenset[int]
    ) -> Mapping[int, Hashable]:
        """Per group, the facts that determine its seconds; groups without seconds are omitted."""
        ...

    def seconds(self, facts: Any, option: IntArray, prices: Prices) -> Array:
        """[meshes, strategies] seconds; ``option`` [strategies] is the option of each strategy."""
        ...

    def buffers(
        self, buffers: Sequence[Buffer], graph: Graph, values: frozenset[int]
    ) -> Sequence[Buffer]:
        """The buffers on devices with the choice: buffers under ``When`` replace some of those
        without it."""
        ...

    def entry(self, graph: Graph, value: int, option: int) -> str | None:
        """The option in words for the plan's list of decisions, for a value that has the choice;
        None if the plan states it elsewhere, or the first option needs no entry."""
        ...


class NothingMore:
    """Defaults for the optional parts of a decision."""

    def facts(
        self, graph: Graph, groups: Groups, live: Sequence[bool], values: frozenset[int]
    ) -> Mapping[int, Hashable]:
        """No seconds."""
        return {}

    def seconds(self, facts: Any, option: IntArray, prices: Prices) -> Array:
        """No seconds."""
        return np.zeros((1, len(option)))

    def buffers(
        self, buffers: Sequence[Buffer], graph: Graph, values: frozenset[int]
    ) -> Sequence[Buffer]:
        """The same buffers."""
        return buffers

    def entry(self, graph: Graph, value: int, option: int) -> str | None:
        """Nothing in the plan's list."""
        return None
