"""Agreement between processes that each read different files: numbers of steps and of rows.

All functions except `own_files` are small collectives: all processes have to call them, in the same
order with respect to their other collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from executor.data.common import DataError
from executor.processes.agreement.alike import compare_settings


def own_files(files: Sequence[Any]) -> tuple[Any, ...]:
    """This process's files: every n-th of a list that is the same in all n processes.

    Raises:
        DataError: fewer files than processes.
    """
    count, index = jax.process_count(), jax.process_index()
    if len(files) < count:
        raise DataError(
            f"{len(files)} files for {count} processes: every process needs one; split them further"
        )
    return tuple(files[index::count])


def agreed_steps(mine: int, policy: str = "drop") -> int:
    """How many steps all processes run when their numbers differ: with "drop" the smallest number,
    with "pad" the largest (processes with fewer repeat some). Call it once per epoch: a process
    that continued alone would hang.

    Raises:
        DataError: the policy is "leave" or unknown: all processes must run the same number of
            steps.
    """
    if policy not in ("drop", "pad"):
        raise DataError(f"policy {policy!r}: processes can't make different numbers of steps")
    counts = everyones(np.asarray([mine]))
    return int(counts.min() if policy == "drop" else counts.max())


def everyones(local_array: NDArray[Any]) -> NDArray[Any]:
    """The arrays of all processes, [processes, ...]; all have the same shape and dtype."""
    if jax.process_count() == 1:
        return local_array[np.newaxis]
    from jax.experimental import multihost_utils

    compare_settings()
    return np.asarray(multihost_utils.process_allgather(local_array))


def everyones_bytes(local_bytes: bytes) -> list[bytes]:
    """The byte strings of all processes, of any lengths; two collectives."""
    lengths = everyones(np.asarray([len(local_bytes)]))[:, 0]
    padded = np.zeros(max(1, int(lengths.max())), np.uint8)
    padded[: len(local_bytes)] = np.frombuffer(local_bytes, np.uint8)
    gathered = everyones(padded)
    return [gathered[k, :n].tobytes() for k, n in enumerate(lengths)]
