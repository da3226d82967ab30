"""Measured step time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def measure(
    step: Callable[..., Any], state: Any, batch: Any, *, steps: int = 10, warmup: int = 2
) -> tuple[float, Any]:
    """Median wall seconds of ``state, metrics = step(state, batch)``.

    Returns:
        (median seconds, state after the last step). The caller's state may be donated.
    """
    times = []
    for k in range(warmup + steps):
        begun = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        if k >= warmup:
            times.append(time.perf_counter() - begun)
    return statistics.median(times), state
