"""Formats numbers: SI units, three significant digits. No jax."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.spec import Sharding

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_TIMES = ("ns", "us", "ms", "s")
_DTYPES = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


def bytes_text(count: float) -> str:
    """``80e9`` -> ``"80.0 GB"``; decimal SI units, whole bytes below 1 kB, "-" if unknown."""
    if count < 0 or not math.isfinite(count):
        return "-"
    if round(count) < 1000:
        return f"{round(count)} B"
    return _scaled(float(count), _BYTES)


def time_text(seconds: float) -> str:
    """``0.0123`` -> ``"12.3 ms"``; "-" if unknown (negative or not finite)."""
    if seconds < 0 or not math.isfinite(seconds):
        return "-"
    return "0 s" if seconds < 5e-13 else _scaled(seconds * 1e9, _TIMES)


def range_text(low_s: float, high_s: float) -> str:
    """``0.395, 0.498`` -> ``"395 to 498 ms"``."""
    low, high = time_text(low_s), time_text(high_s)
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """``"a, b and c"``; for more than ``most`` names, the first ones and how many more."""
    shown = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)


def more_time(seconds: float) -> str:
    """A difference of times: ``"+1.20 ms"``; ``"same"`` below a nanosecond."""
    return "same" if abs(seconds) < 1e-9 else _sign(seconds) + time_text(abs(seconds))


def more_bytes(count: float) -> str:
    """A difference of sizes: ``"-3.00 MB"``; ``"same"`` below a byte."""
    return "same" if abs(count) < 1 else _sign(count) + bytes_text(abs(count))


def count_text(count: float) -> str:
    """``12.0`` -> ``"12"``, ``3.25`` -> ``"3.25"``."""
    return f"{round(count):d}" if abs(count - round(count)) < 1e-9 else f"{count:.3g}"


def percent_text(fraction: float) -> str:
    """``0.394`` -> ``"39.4 %"``; "unknown" if not finite."""
    if not math.isfinite(fraction):
        return "unknown"
    percent = 100.0 * max(fraction, 0.0)
    return "0 %" if percent < 1e-7 else f"{percent:.1f} %" if percent >= 0.05 else "<0.1 %"


def array_text(shape: tuple[int, ...], dtype: str) -> str:
    """``(8, 16), "float32"`` -> ``"f32[8,16]"``, as jax prints it."""
    for name, short in _DTYPES:
        if dtype.startswith(name):
            dtype = short + dtype[len(name) :]
            break
    return f"{dtype}[{','.join(map(str, shape))}]"


def limit_text(limit_bytes: float, device_bytes: float) -> str:
    """``"60.0 GB (80.0 GB less a reserve of 25.0 %)"``; without a reserve, only the limit."""
    if device_bytes <= limit_bytes:
        return bytes_text(limit_bytes)
    reserve = percent_text(1.0 - limit_bytes / device_bytes)
    return f"{bytes_text(limit_bytes)} ({bytes_text(device_bytes)} less a reserve of {reserve})"


def _sign(difference: float) -> str:
    return "-" if difference < 0 else "+"


def sharding_text(stored: Sharding, used: Sharding) -> str:
    """``P('data') used as P()``; the use is left out if it is the same."""
    return str(stored) if stored == used else f"{stored} used as {used}"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    step = 0
    while value >= 999.5 and step < len(units) - 1:
        value, step = value / 1000.0, step + 1
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[step]}"
