"""The orders of passes that have names.

- ``gpipe``: all forward passes first (Huang et al. 2019).
- ``1f1b``: one warmup forward pass per later stage, then one forward and one backward pass in turn
  (PipeDream-Flush: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training").
- ``interleaved``: the same over several chunks per device, with microbatches in groups of
  ``stages`` (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
  Using Megatron-LM", section 2.2).
- ``zb-h1``, ``zb-h2``: gradients of weights are separate passes, delayed by enough microbatches to
  fill the ramp (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2). With H1, every
  stage holds what the first stage of 1F1B holds; with H2, almost twice that.
- ``zb-v``: two chunks per device, placed forth and back, so that the device that begins the
  forward pass also ends it (the same paper, section 6). Every device holds what the first stage of
  1F1B holds, and idles only while the first microbatch reaches it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from costmodels.orders.order import BACKWARD, FORWARD, WEIGHTS, Order, OrderError, tasks_of

_Tasks = list[tuple[str, int, int]]


def _gpipe(p: int, m: int, device: int) -> _Tasks:
    forward = [(FORWARD, device, i) for i in range(m)]
    return [*forward, *((BACKWARD, device, i) for i in range(m))]


def _behind(m: int, device: int, ahead: int, late: int | None) -> _Tasks:
    """``ahead`` forward passes, then one forward and one backward pass in turn; gradients of
    weights follow ``late`` microbatches later."""
    out: _Tasks = [(FORWARD, device, i) for i in range(min(ahead, m))]
    for i in range(m):
        if i + ahead < m:
            out.append((FORWARD, device, i + ahead))
        out.append((BACKWARD, device, i))
        if late is not None and i >= late:
            out.append((WEIGHTS, device, i - late))
    if late is not None:
        out += [(WEIGHTS, device, i) for i in range(max(0, m - late), m)]
    return out


def _one_each(p: int, m: int, device: int) -> _Tasks:
    return _behind(m, device, p - 1 - device, None)


def _h1(p: int, m: int, device: int) -> _Tasks:
    return _behind(m, device, p - 1 - device, device)


def _h2(p: int, m: int, device: int) -> _Tasks:
    return _behind(m, device, 2 * (p - 1 - device), 2 * device)


_PLAIN: Mapping[str, Callable[[int, int, int], _Tasks]] = MappingProxyType(
    {"gpipe": _gpipe, "1f1b": _one_each, "zb-h1": _h1, "zb-h2": _h2}
)

NAMES = (*_PLAIN, "interleaved", "zb-v")
"""The schedules that ``named_order`` supports."""


def chunks_of(name: str) -> int:
    """Chunks of the model per device that a name specifies; 1 by default.

    >>> chunks_of("interleaved-2"), chunks_of("zb-v"), chunks_of("1f1b")
    (2, 2, 1)
    """
    if name == "zb-v":
        return 2
    base, _, count = name.partition("-")
    return int(count) if base == "interleaved" and count.isdecimal() else 1


def named_order(name: str, stages: int, microbatches: int, virtual: int = 1) -> Order:
    """A schedule by name.

    Args:
        name: one of `NAMES`, or ``"interleaved-2"`` for two chunks per device.
        stages: devices, or groups of them.
        microbatches: parts of the batch.
        virtual: chunks of the model per device; more than one only for ``interleaved``, and two
            for ``zb-v``.

    Raises:
        OrderError: the name is not known, or the schedule does not support these counts.

    >>> [str(task) for task in named_order("1f1b", 2, 2).devices[1][:2]]
    ['F0 of chunk 1', 'B0 of chunk 1']
    """
    virtual = max(virtual, chunks_of(name))
    if stages < 1 or microbatches < 1 or virtual < 1:
        raise OrderError(
            f"schedule {name!r}: {stages} stages, {microbatches} microbatches and {virtual} chunks "
            "per device; each must be at least 1"
        )
    if name.partition("-")[0] == "interleaved":
        return dataclasses.replace(_interleaved(stages, microbatches, virtual), name=name)
    if name == "zb-v" and virtual == 2:
        return _forth_and_back(stages, microbatches)
    if name not in _PLAIN:
        raise OrderError(f"no schedule {name!r}: use one of {', '.join(NAMES)}")
    if virtual != 1:
        raise OrderError(f"schedule {name!r} runs one chunk per device, not {virtual}")
    devices = tuple(tasks_of(_PLAIN[name](stages, microbatches, d)) for d in range(stages))
    return Order(name, devices, tuple(range(stages)), microbatches)


def _interleaved(p: int, m: int, v: int) -> Order:
    if v < 2 or m % p:
        raise OrderError(
            f"schedule 'interleaved' runs at least 2 chunks per device and a multiple of {p} "
            f"microbatches, not {v} and {m}"
        )

    def turn(k: int, device: int, back: bool) -> tuple[int, int]:
        """Chunk and microbatch of a device's k-th pass in one direction."""
        group, rest = divmod(k, p * v)
        chunk, i = divmod(rest, p)
        return (v - 1 - chunk if back else chunk) * p + device, group * p + i

    devices = []
    for d in range(p):
        ahead = min(m * v, 2 * (p - d - 1) + (v - 1) * p)
        tasks: _Tasks = [(FORWARD, *turn(k, d, False)) for k in range(ahead)]
        for k in range(m * v):
            if k + ahead < m * v:
                tasks.append((FORWARD, *turn(k + ahead, d, False)))
            tasks.append((BACKWARD, *turn(k, d, True)))
        devices.append(tasks_of(tasks))
    return Order("interleaved", tuple(devices), tuple(c % p for c in range(p * v)), m)


def _forth_and_back(p: int, m: int) -> Order:
    """ZB-V: device d has the chunks d and 2 p - 1 - d."""
    devices = [_v(p, max(m, 2 * p - 1), d) for d in range(p)]
    device_tasks = (tasks_of(t for t in tasks if t[2] < m) for tasks in devices)
    return Order("zb-v", tuple(device_tasks), (*range(p), *reversed(range(p))), m)


def _v(p: int, m: int, device: int) -> _Tasks:
    """The tasks of a device, for enough microbatches to fill the pipeline."""
    chunks = (device, 2 * p - 1 - device)
    out: _Tasks = []
    done: dict[tuple[str, int], int] = {}

    def run(side: int, *kinds: str) -> None:
        for kind in kinds:
            i = done.get((kind, side), 0)
            out.append((kind, chunks[side], i))
            done[kind, side] = i + 1

    for _ in range(2 * (p - device) - 1):
        run(0, FORWARD)
    for _ in range(device):
        run(1, FORWARD)
        run(0, FORWARD)
    for _ in range(p - device):
        run(1, FORWARD, BACKWARD, WEIGHTS)
    while done[FORWARD, 1] < m:
        if done[FORWARD, 0] < m:
            run(0, FORWARD)
        run(0, BACKWARD, WEIGHTS)
        run(1, FORWARD, BACKWARD, WEIGHTS)
    for _ in range(device):
        run(0, BACKWARD)
        run(1, BACKWARD)
    for _ in range(p - device):
        run(0, BACKWARD, WEIGHTS)
    for side in (1, 0):
        while done.get((WEIGHTS, side), 0) < done[BACKWARD, side]:
            run(side, WEIGHTS)
    return out
