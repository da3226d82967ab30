"""What a kind of decision is: a choice that a group may have besides its sharding.

A decision is one file here, with everything that the planner must know of it, and one row in
``DECISIONS``; what the executor does about it is one function in ``executor.run.decisions``. It
reaches every room through this protocol:

===========  ====================================================================================
request      ``parse`` reads its option; ``demands`` says what the search may not choose
groups       ``values`` have the choice: their groups' strategies are multiplied by the options
facts        ``facts`` are what its seconds follow from, so equal groups are known to be equal
seconds      ``seconds`` are added to those of the group's strategies
memory       ``buffers`` changes what devices hold, and when, under each option
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
    """What a decision may ask of the cluster, for the strategies at hand: arrays [meshes,
    strategies]."""

    def local_bytes(self, nbytes: float, factors: frozenset[int], stored: bool) -> Array:
        """Bytes per device of an array, as it is stored between steps or as it is used."""
        ...

    def host_copy_s(self, nbytes: Array, ahead: bool) -> Array:
        """Seconds of one copy of so many bytes between a device and its host; of one that runs
        ``ahead`` of its use, those that do not hide under compute."""
        ...


class Decision(Protocol):
    """A kind of decision; see the module's docstring.

    Attributes:
        name: its name, that of its option and that in a plan.
        options: words for what may be chosen; the first holds where nothing is.
    """

    name: str
    options: tuple[str, ...]

    def parse(self, option_value: Any) -> Any:
        """What was asked for, checked; ``option_value`` is None where nothing was. Raises
        RequestError."""
        ...

    def demands(self, parsed: Any) -> int | None:
        """The option that all groups that have the choice must take; None: the search decides."""
        ...

    def values(self, graph: Graph, parsed: Any) -> frozenset[int]:
        """The values whose groups have the choice. Raises RequestError."""
        ...

    def facts(
        self, graph: Graph, groups: Groups, live: Sequence[bool], values: frozenset[int]
    ) -> Mapping[int, Hashable]:
        """By group, what the seconds follow from; groups without seconds are left out."""
        ...

    def seconds(self, facts: Any, option: IntArray, prices: Prices) -> Array:
        """[meshes, strategies] seconds; ``option`` [strategies] are those taken."""
        ...

    def buffers(
        self, buffers: Sequence[Buffer], graph: Graph, values: frozenset[int]
    ) -> Sequence[Buffer]:
        """What devices hold with the choice: buffers under ``When`` instead of some of those
        without it."""
        ...

    def entry(self, graph: Graph, value: int, option: int) -> str | None:
        """The option in words for the plan's list of decisions, for a value that has the choice;
        None where the plan says it elsewhere, or the first option needs no word."""
        ...


class NothingMore:
    """The parts of a decision that need not be said."""

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
