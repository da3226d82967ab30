"""A pipeline, event by event: what every stage runs in which order, and when.

Nothing of ``costmodels.schedule`` is used here: its closed forms are compared with this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Task = tuple[str, int, int]
"""("F" or "B", chunk of the model, microbatch); chunk c is on device c % devices."""


@dataclass(frozen=True)
class Simulated:
    """When the last task ends, and per device the most chunks in flight (run forward, not yet
    backward)."""

    end_s: float
    in_flight: tuple[int, ...]


def gpipe(stages: int, microbatches: int, virtual: int = 1) -> list[list[Task]]:
    """All forward passes, then all backward passes (Huang et al. 2019)."""
    assert virtual == 1
    every = range(microbatches)
    return [[("F", s, i) for i in every] + [("B", s, i) for i in every] for s in range(stages)]


def one_forward_one_backward(stages: int, microbatches: int, virtual: int = 1) -> list[list[Task]]:
    """A forward pass for each backward pass after a warm-up (Narayanan et al. 2021)."""
    assert virtual == 1
    orders = []
    for s in range(stages):
        warm = min(microbatches, stages - 1 - s)
        orders.append(_alternating(warm, [[(k, s, i) for i in range(microbatches)] for k in "FB"]))
    return orders


def interleaved(stages: int, microbatches: int, virtual: int) -> list[list[Task]]:
    """1F1B over chunks; microbatches go through a device's chunks in groups of ``stages``."""
    orders = []
    for s in range(stages):
        groups = range(0, microbatches, stages)
        chunks = [c * stages + s for c in range(virtual)]
        forward = [("F", c, g + i) for g in groups for c in chunks for i in range(stages)]
        back = [("B", c, g + i) for g in groups for c in chunks[::-1] for i in range(stages)]
        warm = min(len(forward), 2 * (stages - 1 - s) + (virtual - 1) * stages)
        orders.append(_alternating(warm, [forward, back]))
    return orders


def _alternating(warm: int, passes: Sequence[list[Task]]) -> list[Task]:
    forward, back = passes
    order = forward[:warm]
    for k in range(warm, len(forward)):
        order += [forward[k], back[k - warm]]
    return order + back[len(forward) - warm :]


def simulate(
    orders: Sequence[Sequence[Task]], forward_s: Sequence[float], backward_s: Sequence[float]
) -> Simulated:
    """Run orders of tasks, one task at a time on every device.

    Args:
        orders: per device, its tasks.
        forward_s: per chunk of the model, seconds of a forward pass.
        backward_s: the same of a backward pass.

    Raises:
        AssertionError: the orders wait for each other.
    """
    last = len(forward_s) - 1
    done: dict[Task, float] = {}
    clocks, at = [0.0] * len(orders), [0] * len(orders)
    flight, most = [0] * len(orders), [0] * len(orders)
    while any(n < len(order) for n, order in zip(at, orders, strict=True)):
        before = sum(at)
        for d, order in enumerate(orders):
            while at[d] < len(order):
                kind, chunk, i = order[at[d]]
                if kind == "F":
                    need = ("F", chunk - 1, i) if chunk else None
                else:
                    need = ("B", chunk + 1, i) if chunk < last else ("F", chunk, i)
                if need is not None and need not in done:
                    break
                start = max(clocks[d], done[need] if need is not None else 0.0)
                clocks[d] = start + (forward_s if kind == "F" else backward_s)[chunk]
                done[kind, chunk, i] = clocks[d]
                flight[d] += 1 if kind == "F" else -1
                most[d] = max(most[d], flight[d])
                at[d] += 1
        assert sum(at) > before, "deadlock"
    return Simulated(max(clocks), tuple(most))
