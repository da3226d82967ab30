"""What a worker sees: the parameters as a pytree, pulled and pushed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

from executor.parameter_server.clock import Rule
from executor.parameter_server.codec import Feedback
from executor.parameter_server.layout import SPLIT_BYTES, Layout, layout_of
from executor.parameter_server.links import Links
from executor.parameter_server.partition import Partitioner
from executor.parameter_server.store import Pushed
from planner.errors import RequestError

GRACE_S = 10.0
"""What a worker waits longer than a server, whose error says more."""


class ParameterServer:
    """The parameters of a job, as one of its workers sees them.

    Args:
        links: to the servers.
        rank: of this worker.
        num_workers: how many there are.
        rule, optimizer: what the servers do.
        wait_s: deadline of every wait, in seconds.
        split_bytes, partition: as for ``layout_of``.
        compress: gradients travel as "bf16", "int8" or "2bit", with error feedback; None: as they
            are.
    """

    def __init__(
        self,
        links: Links,
        rank: int,
        num_workers: int,
        *,
        rule: Rule = Rule(),  # noqa: B008  it is frozen
        optimizer: optax.GradientTransformation | None = None,
        wait_s: float = 300.0,
        split_bytes: int = SPLIT_BYTES,
        partition: Partitioner | None = None,
        compress: str | None = None,
    ) -> None:
        self.rank, self.num_workers = rank, num_workers
        self._links, self._wait_s = links, wait_s
        self._cut: dict[str, Any] = {"split_bytes": split_bytes, "partition": partition}
        self.rule, self.optimizer = rule, optimizer
        self._feedback = None if compress is None else Feedback(compress, links.count)
        self._layout: Layout | None = None
        self._number = 0
        self.version = 0

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, who gives the first values; and saves and shows, where one
        worker is to do it for all."""
        return self.rank == 0

    @property
    def layout(self) -> Layout:
        """Which server holds what; raises RequestError before ``init``."""
        if self._layout is None:
            raise RequestError("call init(params) first: nothing says what the parameters are")
        return self._layout

    @property
    def shapes(self) -> Any:
        """The parameters as ShapeDtypeStructs; None before ``init``."""
        return None if self._layout is None else self._layout.like

    def init(self, params: Any) -> Any:
        """Say what the parameters are; the chief's (worker 0's) values are the first.

        Returns:
            The values that the servers have: the chief's, or those of a run that goes on.

        Raises:
            WaitError: the chief did not call it in time.
        """
        self._layout = layout_of(params, self._links.count, **self._cut)
        if self.is_chief:
            self._call("init", [(flat,) for flat in self._layout.scatter(jax.device_get(params))])
            self._call("describe", [(self.shapes,)] * self._links.count)
        self._number = max(self._call("join", [(self.rank,)] * self._links.count))
        return self.pull()

    def pull(self) -> Any:
        """The parameters, as soon as this worker may read them: NumPy arrays of its own.

        Raises:
            WaitError: it might not in time; names the workers that are behind.
        """
        layout = self.layout
        found = self._call("pull", [(self.rank,)] * self._links.count)
        self.version = min(x.version for x in found)
        return layout.gather([x.values for x in found])

    def push(self, gradients: Any) -> bool:
        """Send gradients (or, without an optimizer on the servers, what is to be added).

        Returns:
            Whether all servers took it; the rule may leave out what comes late.
        """
        return all(self._call("push", self._numbered(gradients)))

    def push_pull(self, gradients: Any) -> Any:
        """``push``, then ``pull``, in one message to each server and back."""
        layout = self.layout
        found = self._call("push_pull", self._numbered(gradients))
        self.version = min(x.version for x in found)
        return layout.gather([x.values for x in found])

    def _numbered(self, gradients: Any) -> list[tuple[Any, ...]]:
        """What every server is told of a push; sent again, it must be the same objects."""
        flats = self.layout.scatter(jax.device_get(gradients))
        self._number += 1
        if self._feedback is None:
            return [(self.rank, self._number, Pushed(flat)) for flat in flats]
        made = [self._feedback.encode(server, flat) for server, flat in enumerate(flats)]
        return [(self.rank, self._number, Pushed(dense, coded=coded)) for dense, coded in made]

    def leave(self) -> None:
        """Say that this worker has finished; the others no longer wait for it."""
        self._call("leave", [(self.rank,)] * self._links.count)

    def barrier(self) -> None:
        """Wait until every worker that is there has come here.

        Raises:
            WaitError: some did not in time; names them.
        """
        self._links.call(
            "barrier", [(self.rank,)] + [(None,)] * (self._links.count - 1), self._late
        )

    def members(self) -> tuple[int, ...]:
        """The ranks of the workers that are there."""
        found: Sequence[int] = self._call("members", [()] * self._links.count)[0]
        return tuple(found)

    @property
    def _late(self) -> float:
        return self._wait_s + GRACE_S

    def _call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._links.call(method, args, self._late)
