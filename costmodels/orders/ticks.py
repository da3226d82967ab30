"""1F1B in step: all devices do a pass at a time, as one program does it."""

from __future__ import annotations

from costmodels.orders.order import BACKWARD, FORWARD, Order, OrderError, Task
from costmodels.orders.simulate import Simulated, Work


def in_ticks(stages: int, microbatches: int, work: Work) -> Simulated:
    """The schedule of a step whose stages are a dimension of its arrays, with times.

    Forward ticks, ticks of one forward and one backward pass, backward ticks: in forward tick t,
    stage s does microbatch t - s; in backward tick t, microbatch t - (stages - 1 - s). The first
    ``stages - 1`` forward ticks have no backward tick beside them, nor do the last
    ``stages - 1`` backward ticks have a forward one. A tick takes its time on every device, also
    where a device has nothing to do.

    Args:
        stages: devices, or groups of them; one chunk each.
        microbatches: parts of the batch.
        work: of one microbatch in any chunk.

    Raises:
        OrderError: fewer than one stage or microbatch.

    >>> in_ticks(4, 8, Work(1.0, 2.0)).step_s
    33.0
    """
    if stages < 1 or microbatches < 1:
        raise OrderError(f"{stages} stages and {microbatches} microbatches: give at least 1 each")
    p, m, ramp = stages, microbatches, stages - 1
    back = work.backward_s + work.weights_s
    rows: list[list[tuple[Task, float]]] = [[] for _ in range(p)]
    now = 0.0
    for tick in range(m + 2 * ramp):
        if tick < m + ramp:
            now += work.forward_s
            _do(rows, FORWARD, [tick - s for s in range(p)], m, now)
        if tick >= ramp:
            now += back
            _do(rows, BACKWARD, [tick - 2 * ramp + s for s in range(p)], m, now)
    order = Order(
        "1f1b in ticks", tuple(tuple(task for task, _ in row) for row in rows), tuple(range(p)), m
    )
    return Simulated(
        order,
        (work,) * p,
        tuple(tuple(end for _, end in row) for row in rows),
        now,
        (m * (work.forward_s + back),) * p,
        tuple(min(m, 2 * (ramp - s) + 1) * work.held_bytes for s in range(p)),
    )


def _do(
    rows: list[list[tuple[Task, float]]], kind: str, numbers: list[int], most: int, end: float
) -> None:
    """One tick."""
    for stage, number in enumerate(numbers):
        if 0 <= number < most:
            rows[stage].append((Task(kind, stage, number), end))
