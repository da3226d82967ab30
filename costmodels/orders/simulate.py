"""The time that an order of passes takes: an event simulation of single passes.

A task starts when the previous task on its device has ended and its inputs have arrived:

- ``F`` of a chunk reads ``F`` of the chunk before it,
- ``B`` reads ``B`` of the chunk behind it, and of the last chunk ``F``,
- ``W`` reads ``B`` of its chunk.

The results of ``F`` that ``B`` of the same chunk reads are available by then. Transfers take time
but occupy no device: a device sends while it computes the next task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.orders.deadlock import deadlock
from costmodels.orders.order import BACKWARD, FORWARD, WEIGHTS, Order, Task


@dataclass(frozen=True, slots=True)
class Work:
    """Time and memory that one microbatch takes in one chunk.

    Attributes:
        forward_s: seconds of the forward pass.
        backward_s: seconds of the input's gradient.
        weights_s: seconds of the weights' gradient; part of the backward pass where an order does
            not split that.
        held_bytes: bytes that the forward pass leaves for the backward passes.
        late_bytes: bytes that remain between ``B`` and ``W``, if the order has both.
    """

    forward_s: float
    backward_s: float
    weights_s: float = 0.0
    held_bytes: float = 0.0
    late_bytes: float = 0.0


@dataclass(frozen=True)
class Simulated:
    """An order with times.

    Attributes:
        order: the order.
        work: the work per chunk.
        ends: per device, the seconds at which its tasks end, in order.
        step_s: seconds until the last task ends.
        busy_s: per device, seconds of its tasks.
        peak_bytes: per device, the most bytes held for backward passes.
    """

    order: Order
    work: tuple[Work, ...]
    ends: tuple[tuple[float, ...], ...]
    step_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The share of the step for which the busiest device is idle."""
        return 1.0 - max(self.busy_s) / self.step_s if self.step_s > 0 else 0.0

    def seconds_of(self, task: Task) -> float:
        """How long a task takes."""
        return _seconds(self.order, self.work, task.kind, task.chunk)

    def held_over_time(self, device: int) -> list[tuple[float, float]]:
        """Pairs of a time in seconds, and the bytes held from then on."""
        now, out = 0.0, []
        for task, end in zip(self.order.devices[device], self.ends[device], strict=True):
            now += _change(self.order, self.work, task.kind, task.chunk)
            begun = end - self.seconds_of(task)
            out.append((begun if task.kind == FORWARD else end, now))
        return out


def _seconds(order: Order, work: Sequence[Work], kind: str, chunk: int) -> float:
    one = work[chunk]
    if kind == FORWARD:
        return one.forward_s
    if kind == WEIGHTS:
        return one.weights_s
    return one.backward_s if order.split else one.backward_s + one.weights_s


def _change(order: Order, work: Sequence[Work], kind: str, chunk: int) -> float:
    """Bytes that a task adds to what its device holds."""
    one = work[chunk]
    if kind == FORWARD:
        return one.held_bytes
    if kind == WEIGHTS:
        return -one.late_bytes
    return one.late_bytes - one.held_bytes if order.split else -one.held_bytes


def simulate(order: Order, work: Sequence[Work], transfer_s: float = 0.0) -> Simulated:
    """Compute when every task of an order runs, and what the devices hold.

    Args:
        order: the order.
        work: the work per chunk.
        transfer_s: seconds from the end of a pass until another device can read its result.

    Raises:
        DeadlockError: devices wait for each other; names the cycle.
        ValueError: ``work`` has another length than the order has chunks.
    """
    place = order.place
    if len(work) != len(place):
        raise ValueError(f"work of {len(work)} chunks for an order of {len(place)}")
    rows, most = _rows(order, work, transfer_s), []
    ends: list[list[float]] = [[] for _ in order.devices]
    at = [0] * len(order.devices)
    waiting: dict[int, int] = {}  # id of a row of results -> the device that waits for it
    ready = list(range(len(order.devices)))[::-1]
    while ready:
        device = ready.pop()
        tasks, device_ends = order.devices[device], ends[device]
        now, begin = (device_ends[-1] if device_ends else 0.0), at[device]
        for kind, chunk, i in tasks[begin:] if begin else tasks:
            source, into, seconds, late = rows[kind][chunk]
            known = source[i]
            if known is None:
                waiting[id(source)] = device
                break
            known += late
            now = (known if known > now else now) + seconds
            into[i] = now
            device_ends.append(now)
            if waiting:
                reader = waiting.pop(id(into), None)
                if reader is not None and reader != device:
                    ready.append(reader)
        at[device] = len(device_ends)
    if any(n < len(tasks) for n, tasks in zip(at, order.devices, strict=True)):
        raise deadlock(order, at)
    for tasks in order.devices:
        held = peak = 0.0
        change = {(k, c): _change(order, work, k, c) for k, c in {(t[0], t[1]) for t in tasks}}
        for kind, chunk, _ in tasks:
            held += change[kind, chunk]
            peak = max(peak, held)
        most.append(peak)
    busy = [0.0] * len(order.devices)
    for chunk, device in enumerate(place):
        kinds = (FORWARD, BACKWARD, WEIGHTS) if order.split else (FORWARD, BACKWARD)
        busy[device] += order.microbatches * sum(_seconds(order, work, k, chunk) for k in kinds)
    step_s = max(device_ends[-1] for device_ends in ends if device_ends)
    return Simulated(order, tuple(work), tuple(map(tuple, ends)), step_s, tuple(busy), tuple(most))


_Row = tuple[list[float | None], list[float | None], float, float]


def _rows(order: Order, work: Sequence[Work], transfer_s: float) -> dict[str, list[_Row]]:
    """Per kind and chunk: the times at which its inputs are ready, by microbatch; the list for the
    times at which it ends; its seconds; seconds of the transfer."""
    m, place = order.microbatches, order.place
    last = len(place) - 1
    end_times: dict[str, list[list[float | None]]] = {
        kind: [[None] * m for _ in place] for kind in (FORWARD, BACKWARD, WEIGHTS)
    }
    begun: list[float | None] = [0.0] * m
    out: dict[str, list[_Row]] = {FORWARD: [], BACKWARD: [], WEIGHTS: []}
    for c in range(len(place)):
        before = begun if c == 0 else end_times[FORWARD][c - 1]
        behind = end_times[FORWARD][c] if c == last else end_times[BACKWARD][c + 1]
        far = transfer_s if c and place[c - 1] != place[c] else 0.0
        back = transfer_s if c < last and place[c + 1] != place[c] else 0.0
        for kind, source, late in (
            (FORWARD, before, far),
            (BACKWARD, behind, back),
            (WEIGHTS, end_times[BACKWARD][c], 0.0),
        ):
            out[kind].append((source, end_times[kind][c], _seconds(order, work, kind, c), late))
    return out
