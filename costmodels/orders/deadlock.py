"""Orders in which devices wait for each other forever."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.orders.order import BACKWARD, FORWARD, Order, OrderError, Task


class DeadlockError(OrderError):
    """No device can continue; the message has a cycle of devices that wait for each other."""


def awaited(order: Order, task: Task) -> Task | None:
    """The task that a task directly waits for."""
    kind, chunk, i = task
    if kind == FORWARD:
        return Task(FORWARD, chunk - 1, i) if chunk else None
    if kind == BACKWARD:
        last = chunk == len(order.place) - 1
        return Task(FORWARD, chunk, i) if last else Task(BACKWARD, chunk + 1, i)
    return Task(BACKWARD, chunk, i)


def deadlock(order: Order, at: Sequence[int]) -> DeadlockError:
    """The error for an order in which no device can continue.

    Args:
        order: the order.
        at: per device, the index of the task that is blocked.
    """
    device = next(d for d, tasks in enumerate(order.devices) if at[d] < len(tasks))
    way: list[int] = []
    said: dict[int, str] = {}
    while device not in said:
        task = order.devices[device][at[device]]
        need = awaited(order, task)
        assert need is not None  # the first chunk's forward pass waits for nothing
        other = order.place[need.chunk]
        said[device] = f"device {device} waits with {task} for {need} of device {other}"
        way.append(device)
        device = other
    cycle = way[way.index(device) :]
    lines = "; ".join(said[d] for d in cycle)
    return DeadlockError(f"schedule {order.name!r} deadlocks: {lines}")
