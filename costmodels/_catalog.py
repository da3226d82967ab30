"""Constants of the known device kinds, read from the package's TOML files and checked."""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

Table = dict[str, Any]

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8", "int8")

_POSITIVE = {
    "device": (
        "memory_bytes",
        "memory_bytes_per_s",
        "vector_flops_per_s",
        "tile_rows",
        "tile_lanes",
    ),
    "node": ("devices_per_node",),
    "intra_node": ("bytes_per_s",),
    "inter_node": ("bytes_per_s",),
    "torus": ("bytes_per_s", "max_dims", "wrap_multiple"),
    "inter_slice": ("bytes_per_s",),
    "host": ("bytes_per_s",),
    "peak_flops_per_s": DTYPES,
}
_INTEGER = {
    "memory_bytes": 2**53,
    "devices_per_node": 2**20,
    "max_dims": 16,
    "wrap_multiple": 2**20,
    "tile_rows": 2**16,
    "tile_lanes": 2**16,
}
"""Constants that must be whole numbers, and the maximum of each."""
_LEAST, _MOST, _LONGEST_S = 1e-6, 1e24, 1e6
"""Range of rates and sizes, and the longest latency in seconds; times stay finite within them."""
_NOT_NEGATIVE = (
    "kernel_latency_s",
    "step_latency_s",
    "latency_s",
    "startup_s",
    "in_switch_latency_s",
    "matmul_store",
)
_UNIT_INTERVAL = (
    "matmul_efficiency",
    "convolution_efficiency",
    "attention_efficiency",
    "memory_efficiency",
    "efficiency",
)


def shown(value: object) -> str:
    """A value from a file as one short line of text."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or thousands of digits
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


class ClusterError(ValueError):
    """A cluster, device or mesh description that cannot be used; the text says what to change."""


@functools.lru_cache(maxsize=1)
def known_kinds() -> tuple[str, ...]:
    """Names of the device kinds that have a catalog file, sorted."""
    folder = resources.files(__package__) / "catalog"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


@functools.lru_cache(maxsize=1)
def _aliases() -> dict[str, str]:
    table: dict[str, str] = {}
    for kind in known_kinds():
        table[kind] = kind
        table.update(dict.fromkeys(_read(kind)["device"]["aliases"], kind))
    return table


def find_kind(name: str) -> str | None:
    """The device kind for a driver's device name such as 'NVIDIA A100-SXM4-40GB', if known.

    Among the kinds and aliases whose words all occur in the name, the one with the most words wins.
    Laptop GPUs match no kind: their chip differs from that of the card with the same name.
    """
    words = _words(name)
    if "laptop" in words:
        return None
    matches = [alias for alias in _aliases() if _words(alias) <= words]
    if not matches:
        return None
    return _aliases()[max(matches, key=lambda alias: (len(_words(alias)), alias))]


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


@functools.lru_cache(maxsize=32)
def _read(kind: str) -> Table:
    """Tables of a catalog file, merged over those of its `base` kind if it names one."""
    path = resources.files(__package__) / "catalog" / f"{kind}.toml"
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    base = content.pop("base", None)
    tables = {} if base is None else {name: dict(table) for name, table in _read(base).items()}
    for name, table in content.items():
        tables.setdefault(name, {}).update(table)
    return tables


def catalog_entry(name: str) -> Table:
    """Checked constants of one device kind as nested tables (a fresh copy).

    Raises:
        ClusterError: the name is neither a device kind nor an alias of one.
    """
    kind = _aliases().get(name.strip().lower())
    if kind is None:
        near = difflib.get_close_matches(name.strip().lower(), _aliases(), n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ClusterError(
            f"unknown device {name!r}; known devices: {', '.join(known_kinds())}; {meant}"
            "pick one of these, or describe yours in a .toml file that starts from one of them"
        )
    entry = {table: dict(values) for table, values in _read(kind).items()}
    check_entry(entry, where=f"catalog of {kind}")
    return entry


def merge_overrides(entry: Table, overrides: Mapping[str, Any], where: str) -> Table:
    """The catalog entry with some constants replaced.

    Raises:
        ClusterError: a table or key that the entry does not have, or a value out of range.
    """
    merged = {table: dict(values) for table, values in entry.items()}
    for table, values in overrides.items():
        if table not in merged:
            raise ClusterError(
                f"{where}: unknown table [{shown(table)[1:-1]}]; this device has "
                f"[cluster], {', '.join(f'[{name}]' for name in merged)}; rename or drop it"
            )
        if not isinstance(values, dict):
            raise ClusterError(
                f"{where}: {table} must be a table, got {shown(values)}; write "
                f"[{table}] and its keys"
            )
        fixed = ("kind", "aliases") if table == "device" else ()
        keys = set(DTYPES if table == "peak_flops_per_s" else merged[table]).difference(fixed)
        for key, value in values.items():
            if key not in keys:
                raise ClusterError(
                    f"{where}: unknown key {shown(key)} in [{table}]; "
                    f"expected one of: {', '.join(sorted(keys))}; rename or drop it"
                )
            merged[table][key] = value
    check_entry(merged, where)
    return merged


def check_entry(entry: Table, where: str) -> None:
    """Check types and ranges of every constant of an entry.

    Raises:
        ClusterError: a constant of the wrong type or out of range.
    """
    for table, values in entry.items():
        for key, value in values.items():
            if key in ("kind", "aliases"):
                continue
            problem = _problem(table, key, value)
            if problem:
                raise ClusterError(
                    f"{where}: [{table}] {key} must be {problem}, got {shown(value)}; correct "
                    "the value"
                )


def _problem(table: str, key: str, value: object) -> str:
    """What the value must be, in words; empty if the value is valid."""
    if key in ("shared_cores", "native_reduce_scatter", "fuses_operands"):
        return "" if isinstance(value, bool) else "true or false"
    if key == "wires":
        return "" if _is_wiring(value) else "[] or a symmetric matrix of link counts"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "a number"
    if value != value or value in (float("inf"), float("-inf")):
        return "a finite number"
    if key in _POSITIVE.get(table, ()):
        most = _INTEGER.get(key, _MOST)
        if value <= 0:
            return "positive"
        if key in _INTEGER and int(value) != value:
            return "a whole number"
        return "" if _LEAST <= value <= most else f"from {_LEAST:g} to {most:g}"
    if key == "lane_bytes":  # 0: as elements are stored
        return "" if value in (0, 2, 4, 8) else "0, 2, 4 or 8"
    if key == "store_power":
        return "" if 1 <= value <= 100 else "from 1 to 100"
    if key in _NOT_NEGATIVE:
        if value < 0:
            return "zero or positive"
        return "" if value <= _LONGEST_S else f"at most {_LONGEST_S:g}"
    if key in ("memory_bytes_per_device", "fast_memory_bytes"):  # 0: not known
        return "" if 0 <= value <= _MOST else f"from 0 to {_MOST:g}"
    if key == "memory_reserve":
        return "" if 0 <= value < 1 else "at least 0 and below 1"
    if key in _UNIT_INTERVAL:
        return "" if 0 < value <= 1 else "above 0 and at most 1"
    return "" if 0 <= value <= 1 else "between 0 and 1"


def _is_wiring(value: object) -> bool:
    """Whether a value is a symmetric square matrix of counts with a link in every row, or []."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return False
    counts = all(type(count) is int and 0 <= count < 2**20 for row in value for count in row)
    square = all(len(row) == len(value) and any(row) for row in value)
    return counts and square and value == [list(column) for column in zip(*value, strict=True)]
