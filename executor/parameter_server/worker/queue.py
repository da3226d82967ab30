"""A queue of items for workers, that gives the item of a lost worker to another.

It knows places in the order of all epochs, 0 to ``count * epochs``, and never the items. To
take is to say which place is finished. So a call that comes twice has the answer that it had, and a
worker that is started again has the item that it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner.errors import RequestError


@dataclass(frozen=True)
class ItemRequest:
    """What a worker takes items of.

    Attributes:
        queue: number of the queue, from 1: how many its worker has asked for.
        count: items of an epoch.
        epochs: how often each is given out.
        seed: of the order; None keeps that of the items.
    """

    queue: int
    count: int
    epochs: int
    seed: int | None


@dataclass(frozen=True)
class Taken:
    """An answer of a queue.

    Attributes:
        place: to work on; None: none now.
        held: the places that other workers have, by rank, when there is none but may be one later.
    """

    place: int | None
    held: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Queue:
    """Places that are left, and who has which.

    Attributes:
        count, epochs, seed: as for ``ItemRequest``.
        begun: the places below this were given out.
        back: of these, in order, those that came back with a lost worker.
        held: the place that each worker has, by rank.
    """

    count: int
    epochs: int
    seed: int | None
    begun: int = 0
    back: tuple[int, ...] = ()
    held: Mapping[int, int] = field(default_factory=dict)

    def take(self, worker: int, finished: int | None) -> tuple[Taken, Queue]:
        """The next place for a worker, who has ``finished`` one; None: it has just begun."""
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
        """A worker has finished a place, its own or, if it was taken for lost, one that is back."""
        if self.held.get(worker) == place:
            return replace(self, held={w: p for w, p in self.held.items() if w != worker})
        return replace(self, back=tuple(p for p in self.back if p != place))

    def leave(self, worker: int) -> Queue:
        """A worker has gone: what it had comes back."""
        if worker not in self.held:
            return self
        place = self.held[worker]
        return replace(self.done(worker, place), back=tuple(sorted((*self.back, place))))

    def to_facts(self) -> dict[str, Any]:
        """The queue as JSON has it."""
        held = {str(w): p for w, p in self.held.items()}
        return {**vars(self), "back": list(self.back), "held": held}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Queue:
        """The queue of ``to_facts``."""
        held = {int(w): p for w, p in facts["held"].items()}
        return cls(**{**facts, "back": tuple(facts["back"]), "held": held})


def queue_for(queue: Queue | None, wanted: ItemRequest) -> Queue:
    """The queue that a worker asks for, with as many epochs as any asked for.

    Raises:
        RequestError: it was begun with other items.
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
