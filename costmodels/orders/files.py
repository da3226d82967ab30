"""Orders in JSON files, which can be printed, edited and read again.

    {"schedule": "mine", "microbatches": 2, "place": [0, 1],
     "devices": [["F0.0", "F0.1", "B0.0", "B0.1"],
                 ["F1.0", "B1.0", "F1.1", "B1.1"]]}

A task is written as its kind, its chunk and, after the dot, its microbatch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from costmodels.orders.order import Order, OrderError, Task

_TASK = re.compile(r"([FBW])([0-9]{1,6})\.([0-9]{1,6})")


def rows_of(order: Order) -> tuple[str, ...]:
    """The tasks of each device as one line of text.

    >>> from costmodels.orders import named_order
    >>> rows_of(named_order("1f1b", 2, 2))
    ('F0.0 F0.1 B0.0 B0.1', 'F1.0 B1.0 F1.1 B1.1')
    """
    return tuple(
        " ".join(f"{t.kind}{t.chunk}.{t.microbatch}" for t in tasks) for tasks in order.devices
    )


def order_of_rows(name: str, rows: Sequence[str]) -> Order:
    """Build an order from the tasks of each device. A chunk is on the device that has its tasks.

    Raises:
        OrderError: the rows are not a schedule.
    """
    devices = tuple(tuple(_task(word, d) for word in row.split()) for d, row in enumerate(rows))
    place = {t.chunk: d for d, tasks in enumerate(devices) for t in tasks}
    counted = {t.microbatch for tasks in devices for t in tasks}
    if sorted(place) != list(range(len(place))):
        raise OrderError(f"schedule {name!r} has the chunks {sorted(place)}, which lack some")
    chunks = tuple(place[c] for c in range(len(place)))
    return Order(name, devices, chunks, max(counted, default=-1) + 1)


def write_order(order: Order) -> str:
    """An order as JSON text, one line per device, with a newline at the end."""
    rows = [json.dumps(row.split()) for row in rows_of(order)]
    head = (
        f'{{"schedule": {json.dumps(order.name)}, "microbatches": {order.microbatches}, '
        f'"place": {json.dumps(list(order.place))}'
    )
    return head + ',\n "devices": [\n  ' + ",\n  ".join(rows) + "]}\n"


def read_order(path: str | Path) -> Order:
    """Read the order in a file.

    Raises:
        OrderError: the file can't be read, or has no schedule; the message names the place.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise OrderError(f"schedule {str(path)!r} can't be read: {error}") from error
    try:
        return _order(data)
    except OrderError as error:
        raise OrderError(f"{path}: {error}") from None


def _order(data: Any) -> Order:
    fields = {"schedule": str, "microbatches": int, "place": list, "devices": list}
    for name, kind in fields.items():
        value = data.get(name) if isinstance(data, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise OrderError(f"{name}: got {value!r}, expected a value of type {kind.__name__}")
    place, rows = data["place"], data["devices"]
    for chunk, device in enumerate(place):
        known = isinstance(device, int) and not isinstance(device, bool)
        if not known or not 0 <= device < len(rows):
            raise OrderError(
                f"place: chunk {chunk} is on device {device!r}, of {len(rows)} devices"
            )
    devices = tuple(
        tuple(_task(word, device) for word in _list(row, device)) for device, row in enumerate(rows)
    )
    return Order(data["schedule"], devices, tuple(place), data["microbatches"])


def _list(row: Any, device: int) -> list[Any]:
    if not isinstance(row, list):
        raise OrderError(f"device {device}: got {row!r}, expected a list of tasks such as 'F0.0'")
    return row


def _task(word: Any, device: int) -> Task:
    match = _TASK.fullmatch(word) if isinstance(word, str) else None
    if match is None:
        raise OrderError(f"device {device}: task {word!r}, expected such as 'F0.0'")
    return Task(match[1], int(match[2]), int(match[3]))
