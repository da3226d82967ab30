"""Checks before the first batch whether all processes read the same data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from executor.data.common import Position
from executor.processes.agreement.alike import compare_parts, compare_settings
from executor.processes.agreement.fingerprints import Fingerprint
from executor.processes.meet import ProcessMismatchError, meet

log = logging.getLogger("meshwright")


def compare_data(
    position: Position,
    options: dict[str, Any],
    shardings: Sequence[jax.sharding.Sharding],
    content: Callable[[], tuple[Fingerprint, ...]],
) -> None:
    """Compare rows, seed, options and content of the data between all processes, if its batches go
    to devices of several processes.

    Args:
        position: position of the next batch.
        options: other options that the batches depend on, by name.
        shardings: shardings of the leaves of a batch.
        content: reads the rows, or a sample of them.

    Raises:
        ProcessMismatchError: the data differs; raised in all processes, and names the differing
            processes and values. Rows that are not the same each time they are read are not
            compared; a warning is logged instead.
    """
    devices: set[Any] = {device for sharding in shardings for device in sharding.device_set}
    processes = {device.process_index for device in devices}
    if len(processes) == 1 or jax.process_count() == 1:
        return
    compare_settings()
    settings = {
        "rows": position.rows or "an unknown number of",
        "batch_size": position.batch_size,
        "seed": position.seed,
        "lanes": position.lanes,
        "epoch": position.epoch,
        "batch": position.batch,
        **options,
    }
    entries = [Fingerprint(f"{k}={v}", _shown(k, v)) for k, v in settings.items()]
    compare_parts("first batch", {"data": entries})
    rows = content()
    try:
        compare_parts("rows of the data", {"data": rows})
    except ProcessMismatchError:
        if meet("rows read again", content() == rows, all):
            raise
        log.warning("the rows of the data are not the same when they are read again; not compared")


def _shown(name: str, value: Any) -> str:
    return f"{value} rows" if name == "rows" else f"{name}={value} of the data"
