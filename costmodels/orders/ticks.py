"""1F1B in lockstep: all devices run one pass at a time, as a single program does."""

from __future__ import annotations

from costmodels.orders.order import BACKWARD, FORWARD, Order, OrderError, Task
from costmodels.orders.simulate import Simulated, Work


def in_ticks(stages: int, microbatches: int, work: Work) -> Simulated:
    """The schedule, with times, of a step whose stages are a dimension of its arrays.

    Forward ticks come first, then ticks with one forward and one backward pass, then backward
    ticks. In forward tick t, stage s runs microbatch t - s; in backward tick t, it runs microbatch
    t - (stages - 1 - s). The first ``stages - 1`` forward ticks have no backward tick beside them,
    and the last ``stages - 1`` backward ticks have no forward tick. A tick takes its full time on
    every device, even if the device has nothing to do.

    Args:
        stages: number of devices, or of groups of devices; each has one chunk.
        microbatches: number of microbatches.
        work: the work of one microbatch in a chunk; it is the same for all chunks.

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
    """Append the tasks of one tick to ``rows``."""
    for stage, number in enumerate(numbers):
        if 0 <= number < most:
            rows[stage].append((Task(kind, stage, number), end))
