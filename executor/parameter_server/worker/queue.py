"""A queue of items for workers; the item of a lost worker goes to another worker.

The queue handles places in the order of all epochs, 0 to ``count * epochs``, never the items. A
worker that takes a place reports which place it has finished. A repeated call therefore gets the
same answer, and a restarted worker gets the item that it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner.errors import RequestError


@dataclass(frozen=True)
class ItemRequest:
    """A worker's request for items.

    Attributes:
        queue: number of the queue: 1 for the first that the worker requests, and so on.
        count: number of items in an epoch.
        epochs: how often each item is given out.
        seed: shuffles the items; None keeps their order.
    """

    queue: int
    count: int
    epochs: int
    seed: int | None


@dataclass(frozen=True)
class Taken:
    """An answer of a queue.

    Attributes:
        place: the place to work on; None if there is none now.
        held: the places of other workers, by rank, if there is none now but may be one later.
    """

    place: int | None
    held: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Queue:
    """The remaining places, and the place of each worker.

    Attributes:
        count, epochs, seed: as for ``ItemRequest``.
        begun: the places below this were given out.
        back: those of them that lost workers returned, in order.
        held: the place of each worker, by rank.
    """

    count: int
    epochs: int
    seed: int | None
    begun: int = 0
    back: tuple[int, ...] = ()
    held: Mapping[int, int] = field(default_factory=dict)

    def take(self, worker: int, finished: int | None) -> tuple[Taken, Queue]:
        """The next place for a worker; ``finished``: the place that it has finished, None at
        first."""
        queue = self if finished is None else self.done(worker, finished)
        if worker in queue.held:
            return Taken(queue.held[worker]), queue
        if queue.back:
            place, *rest = queue.back
            queue = replace(queue, back=tuple(rest))
        elif queue.begun < self.count * self.epochs:
            place = queue.begun
            queue = replace(queue, begun=place + 1)
        else:
            return Taken(None, queue.held), queue
        return Taken(place), replace(queue, held={**queue.held, worker: place})

    def done(self, worker: int, place: int) -> Queue:
        """Mark a place as finished: the worker's own or, if the worker was presumed lost, a
        returned one."""
        if self.held.get(worker) == place:
            return replace(self, held={w: p for w, p in self.held.items() if w != worker})
        return replace(self, back=tuple(p for p in self.back if p != place))

    def leave(self, worker: int) -> Queue:
        """Remove a worker; its place returns to the queue."""
        if worker not in self.held:
            return self
        place = self.held[worker]
        return replace(self.done(worker, place), back=tuple(sorted((*self.back, place))))

    def to_facts(self) -> dict[str, Any]:
        """The queue as JSON-compatible values."""
        held = {str(w): p for w, p in self.held.items()}
        return {**vars(self), "back": list(self.back), "held": held}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Queue:
        """The queue from the values of ``to_facts``."""
        held = {int(w): p for w, p in facts["held"].items()}
        return cls(**{**facts, "back": tuple(facts["back"]), "held": held})


def queue_for(queue: Queue | None, wanted: ItemRequest) -> Queue:
    """The queue that a worker requests, with the largest number of epochs requested so far.

    Raises:
        RequestError: the queue was begun with other items.
    """
    if queue is None:
        return Queue(wanted.count, wanted.epochs, wanted.seed)
    if (queue.count, queue.seed) != (wanted.count, wanted.seed):
        raise RequestError(
            f"shares: queue {wanted.queue} of this job has {queue.count} items and seed "
            f"{queue.seed}, got {wanted.count} and {wanted.seed}; call it with the same on every "
            "worker, and in a job that goes on"
        )
    return replace(queue, epochs=max(queue.epochs, wanted.epochs))
