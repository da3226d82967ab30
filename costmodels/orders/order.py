"""Orders of passes: the tasks of every device of a pipeline, in sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
KINDS = (FORWARD, BACKWARD, WEIGHTS)


class OrderError(ValueError):
    """An order that is not a schedule: a pass is missing, occurs twice, or is on the wrong
    device."""


class Task(NamedTuple):
    """One pass of one microbatch through one chunk of the model.

    Attributes:
        kind: ``F``, the forward pass; ``B``, the backward pass (only the gradient of the input if
            the order has ``W``); ``W``, the gradient of the weights.
        chunk: counted in the order of the forward pass.
        microbatch: counted from 0.
    """

    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of chunk {self.chunk}"


@dataclass(frozen=True)
class Order:
    """A schedule: the tasks of every device, in order.

    Attributes:
        name: name of the schedule.
        devices: per device (or group of devices that holds a stage), its tasks in order.
        place: per chunk, the device that holds it.
        microbatches: parts of the batch.

    Raises:
        OrderError: a pass is missing, occurs twice, or is on a device that lacks the chunk.
    """

    name: str
    devices: tuple[tuple[Task, ...], ...]
    place: tuple[int, ...]
    microbatches: int

    @property
    def splits_weights(self) -> bool:
        """Whether the gradients of weights are separate passes."""
        return any(t.kind == "W" for tasks in self.devices for t in tasks)

    def __post_init__(self) -> None:
        if not self.place or self.microbatches < 1:
            raise OrderError(f"schedule {self.name!r} has no chunks or no microbatches")
        seen: set[Task] = set()
        for device, tasks in enumerate(self.devices):
            for task in tasks:
                self._check(device, task)
            seen.update(tasks)
        count = sum(map(len, self.devices))
        if len(seen) != count:
            self._twice()
        kinds = KINDS if self.split else KINDS[:2]
        if count != len(kinds) * len(self.place) * self.microbatches:
            wanted = (
                Task(kind, chunk, i)
                for i in range(self.microbatches)
                for chunk in range(len(self.place))
                for kind in kinds
            )
            lacking = next(task for task in wanted if task not in seen)
            raise OrderError(f"schedule {self.name!r} lacks {lacking}")

    def _check(self, device: int, task: Task) -> None:
        kind, chunk, i = task
        known = kind in KINDS and 0 <= chunk < len(self.place) and 0 <= i < self.microbatches
        if not known:
            raise OrderError(
                f"schedule {self.name!r}, device {device}: {task}; expected F, B or W, a chunk "
                f"below {len(self.place)} and a microbatch below {self.microbatches}"
            )
        if self.place[chunk] != device:
            raise OrderError(
                f"schedule {self.name!r}, device {device}: {task}, which device "
                f"{self.place[chunk]} holds"
            )

    def _twice(self) -> None:
        known: set[Task] = set()
        for tasks in self.devices:
            for task in tasks:
                if task in known:
                    raise OrderError(f"schedule {self.name!r} has {task} twice")
                known.add(task)

    @property
    def split(self) -> bool:
        """Whether gradients of weights are separate passes."""
        return any(task[0] == WEIGHTS for task in self.devices[self.place[0]])

    def in_flight(self) -> tuple[int, ...]:
        """Per device, the largest number of passes through its chunks whose activations it holds at
        once: the forward pass has run, and the last backward pass has not."""
        last = WEIGHTS if self.split else BACKWARD
        out = []
        for tasks in self.devices:
            now = most = 0
            for kind, _, _ in tasks:
                now += (kind == FORWARD) - (kind == last)
                most = max(most, now)
            out.append(most)
        return tuple(out)


def tasks_of(words: Iterable[tuple[str, int, int]]) -> tuple[Task, ...]:
    """Tasks from plain tuples."""
    return tuple(Task(*word) for word in words)
