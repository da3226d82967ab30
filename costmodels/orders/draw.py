"""A schedule as text."""

from __future__ import annotations

from costmodels.orders.order import BACKWARD, FORWARD
from costmodels.orders.simulate import Simulated


def drawn(done: Simulated, columns: int = 72) -> str:
    """One line per device, with time from left to right.

    A digit is a forward pass and a letter a backward pass of the microbatch with that number
    (counted from 0 and ``a``; the count starts again after 9 and ``z``). ``+`` is a separate pass
    for the gradient of weights, and a dot is idle time. Times are rounded to columns.

    Args:
        done: the result of ``simulate``.
        columns: number of columns for the whole step.

    >>> from costmodels.orders import Work, named_order, simulate
    >>> print(drawn(simulate(named_order("1f1b", 2, 3), [Work(1.0, 1.0)] * 2), columns=8))
    0  01.a2b.c
    1  .0a1b2c.
    """
    wide = len(str(len(done.ends) - 1))
    lines = []
    for device, (tasks, ends) in enumerate(zip(done.order.devices, done.ends, strict=True)):
        row = ["."] * columns
        for task, end in zip(tasks, ends, strict=True):
            if task.kind == FORWARD:
                sign = str(task.microbatch % 10)
            elif task.kind == BACKWARD:
                sign = chr(ord("a") + task.microbatch % 26)
            else:
                sign = "+"
            begun = end - done.seconds_of(task)
            first, behind = (round(x / done.step_s * columns) for x in (begun, end))
            row[first:behind] = sign * (behind - first)
        lines.append(f"{device:>{wide}}  {''.join(row)}")
    return "\n".join(lines)
