"""Folds the lists of a plan for its file: 96 equal layers take the lines of one.

A block ``{"repeat": n, "rows": [...]}`` stands for n repetitions of its rows. In a row, ``{a+bi}``
is an integer that grows with i = 0, 1, ..., n - 1. If i takes other values, they are listed as
``"order"`` (``layer_10`` sorts before ``layer_2``).

Constraints of one operation share one row. Results with the same rows as the arguments that they
replace are given by the positions of those arguments.

>>> rows = [{"path": f"['layers'][{k}]['w']", "op": 7 + 3 * k} for k in range(40)]
>>> fold(rows)
[{'repeat': 40, 'rows': [{'path': "['layers'][{0+1i}]['w']", 'op': '{7+3i}'}]}]
>>> unfold(fold(rows)) == rows
True
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEWEST = 3
"""Fewest repetitions of a block."""
WORTH = 16
"""Fewest rows that a block saves: short lists read better unfolded."""
LONGEST = 256
"""Most rows of a block."""
MOST, MOST_TEXT = 1_000_000, 1 << 30
"""Most rows that a list may stand for, and most characters of their texts."""

_NUMBER = re.compile(r"(?<![\d.])(?:0|[1-9]\d*)(?![\d.])")
_HOLE = re.compile(r"\{(-?\d+)([+-]\d+)i\}")

Order = list[int] | None


def fold(rows: Sequence[Any]) -> list[Any]:
    """The rows, with blocks in place of repeated rows.

    Args:
        rows: rows of a list of a plan, as plain JSON data.
    """
    texts = [json.dumps(row) for row in rows]
    if len(rows) < WORTH + 1 or any(_HOLE.search(text) or '"repeat"' in text for text in texts):
        return list(rows)
    shapes: dict[str, int] = {}
    codes, numbers = [], []
    for row in rows:
        ints: list[int] = []
        numbers.append(ints)
        shape = json.dumps(_mapped(row, lambda n, ints=ints: ints.append(n)))  # type: ignore[misc]
        codes.append(shapes.setdefault(shape, len(shapes)))
    runs = _runs(np.asarray(codes))
    out: list[Any] = []
    at = 0
    while at < len(rows):
        block = _block(at, rows, numbers, runs)
        if block is None:
            out.append(rows[at])
            at += 1
        else:
            out.append(block)
            at += block["repeat"] * len(block["rows"])
    return out


def unfold(rows: Sequence[Any]) -> list[Any]:
    """The rows that a folded list stands for.

    Raises:
        ValueError: a block is malformed, or stands for too much (``MOST``, ``MOST_TEXT``).
    """
    out: list[Any] = []
    size = 0
    for row in rows:
        if not (isinstance(row, dict) and "repeat" in row):
            out.append(row)
            continue
        count, inner, order = row["repeat"], row.get("rows"), row.get("order")
        whole = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if not whole or not isinstance(inner, list) or row.keys() - {"repeat", "rows", "order"}:
            raise ValueError('a block is {"repeat": number, "rows": [...]}, and "order" or not')
        size += count * len(json.dumps(inner))
        if len(out) + count * max(len(inner), 1) > MOST or size > MOST_TEXT:
            raise ValueError(f"stands for more than {MOST} rows or {MOST_TEXT} characters")
        order = list(range(count)) if order is None else order
        if not isinstance(order, list) or len(order) != count:
            raise ValueError(f'"order" of a block of {count} has {count} whole numbers')
        if any(isinstance(i, bool) or not isinstance(i, int) for i in order):
            raise ValueError('"order" of a block holds whole numbers')
        out += [_filled(r, i) for i in order for r in inner]
    return out


def _mapped(value: Any, what: Callable[[int], Any]) -> Any:
    """The value with ``what`` applied to every integer in it, including those in texts. ``what``
    may return None, which leaves a gap that differs from any number."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return what(value)
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return _NUMBER.sub(lambda m: str(what(int(m[0]))), value)
    if isinstance(value, list):
        return [_mapped(v, what) for v in value]
    if isinstance(value, dict):
        return {k: _mapped(v, what) for k, v in value.items()}
    return value


def _filled(value: Any, i: int) -> Any:
    """A row of a block in repetition ``i``."""
    if isinstance(value, str):
        if hole := _HOLE.fullmatch(value):
            return int(hole[1]) + int(hole[2]) * i
        return _HOLE.sub(lambda m: str(int(m[1]) + int(m[2]) * i), value)
    if isinstance(value, list):
        return [_filled(v, i) for v in value]
    if isinstance(value, dict):
        return {k: _filled(v, i) for k, v in value.items()}
    return value


def fold_plan(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan's JSON, folded as in its file."""
    out = {k: fold(v) if k in FOLDED else v for k, v in fields.items()}
    if "constraints" in out:
        out["constraints"] = fold(_by_operation(fields["constraints"]))
    if "outputs" in out:
        out["outputs"] = fold(_as_inputs(fields["outputs"], fields["inputs"]))
    return out


def unfold_plan(fields: dict[str, Any]) -> dict[str, Any]:
    """The inverse of ``fold_plan``; fields that are not folded stay as they are.

    Raises:
        ValueError: a list can't be unfolded; says which.
    """
    out = dict(fields)
    for name in (*FOLDED, "constraints", "outputs"):
        if isinstance(fields.get(name), list):
            try:
                rows = unfold(fields[name])
                if name == "constraints":
                    rows = [row for entry in rows for row in _of_operation(entry)]
                if name == "outputs":
                    rows = [row for entry in rows for row in _named_inputs(entry, out["inputs"])]
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
            out[name] = rows
    return out


FOLDED = ("inputs", "collectives", "pins", "decisions")
"""Lists whose rows are folded as they are; constraints and outputs have special forms."""


def _by_operation(rows: Sequence[Any]) -> list[Any]:
    """Join consecutive rows of one operation: ``{"op": 4, "at": {"in 0": [...], ...}}``."""
    out: list[Any] = []
    for row in rows:
        place = f"{row['slot']} {row['position']}"
        if row.keys() != {"op", "slot", "position", "spec"}:
            out.append(row)
        elif out and out[-1].get("op") == row["op"] and place not in out[-1].get("at", {place: 0}):
            out[-1]["at"][place] = row["spec"]
        else:
            out.append({"op": row["op"], "at": {place: row["spec"]}})
    return out


def _of_operation(entry: Any) -> list[Any]:
    if not (isinstance(entry, dict) and "at" in entry):
        return [entry]
    out = []
    for place, spec in entry["at"].items():
        slot, _, position = place.rpartition(" ")
        out.append({"op": entry["op"], "slot": slot, "position": int(position), "spec": spec})
    return out


_UNUSED = {"used_as": None}


def _as_inputs(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Replace runs of rows that equal those of arguments, except for ``used_as``, by
    ``{"inputs": [first, count]}``."""
    places: dict[str, int] = {}
    for k, row in enumerate(inputs):
        places.setdefault(json.dumps({**row, **_UNUSED}), k)
    out: list[Any] = []
    for row in outputs:
        at = places.get(json.dumps(row))
        if at is None:
            out.append(row)
        elif out and "inputs" in out[-1] and sum(out[-1]["inputs"]) == at:
            out[-1]["inputs"][1] += 1
        else:
            out.append({"inputs": [at, 1]})
    return out


def _named_inputs(entry: Any, inputs: Sequence[Any]) -> list[Any]:
    if not (isinstance(entry, dict) and "inputs" in entry):
        return [entry]
    first, count = entry["inputs"]
    if not (first >= 0 and count > 0 and first + count <= len(inputs)):
        raise ValueError(f"names inputs {first} to {first + count - 1} of {len(inputs)}")
    return [{**row, **_UNUSED} for row in inputs[first : first + count]]


def _runs(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """[period - 1, row]: number of rows from there on that have the codes of those a period
    later."""
    size = min(LONGEST, len(codes) // FEWEST)
    out = np.zeros((size, len(codes)), np.int32)
    for period in range(1, size + 1):
        alike = codes[:-period] == codes[period:]
        ends = np.flatnonzero(~np.append(alike, False))
        where = np.arange(len(alike))
        out[period - 1, : len(alike)] = ends[np.searchsorted(ends, where)] - where
    return out.astype(np.int64)


def _block(
    at: int, rows: Sequence[Any], numbers: Sequence[Sequence[int]], runs: NDArray[np.int64]
) -> dict[str, Any] | None:
    """The block that begins at a row and saves the most rows; None if it saves too few."""
    periods = np.arange(1, len(runs) + 1)
    counts = runs[:, at] // periods + 1
    saved = np.where(counts >= FEWEST, periods * (counts - 1), 0)
    for k in np.lexsort((periods, -saved)):
        if saved[k] < WORTH:
            return None
        period, count = int(periods[k]), int(counts[k])
        count, order = _repeats(at, period, count, numbers)
        if count >= FEWEST and period * (count - 1) >= WORTH:
            inner = [_row(rows[at + j], numbers, at + j, period, order) for j in range(period)]
            ordered = {} if order is None else {"order": order}
            return {"repeat": count, **ordered, "rows": inner}
    return None


def _repeats(
    at: int, period: int, count: int, numbers: Sequence[Sequence[int]]
) -> tuple[int, Order]:
    """Number of repetitions of a block of a period, at most ``count``, and the order of its numbers
    if they do not grow evenly."""
    columns = []
    for j in range(at, at + period):
        rows = [numbers[j + r * period] for r in range(count)]
        columns += [column for column in zip(*rows, strict=True) if len(set(column)) > 1]
    even = min((_along(column, range(count)) for column in columns), default=count)
    if even == count:
        return count, None
    order = next(c for c in columns if _along(c, range(count)) < count)
    good = min(_along(c, order) for c in columns) if order[0] != order[1] else 0
    return (good, list(order[:good])) if good > even else (even, None)


def _along(numbers: Sequence[int], order: Sequence[int]) -> int:
    """How many of the first numbers are one linear function (``base + step * i``) of ``order``."""
    step, rest = divmod(numbers[1] - numbers[0], order[1] - order[0])
    if rest:
        return 0
    base = numbers[0] - step * order[0]
    pairs = enumerate(zip(numbers, order, strict=False))
    return next((r for r, (x, i) in pairs if x != base + step * i), len(numbers))


def _row(row: Any, numbers: Sequence[Sequence[int]], at: int, period: int, order: Order) -> Any:
    """A row with holes where its numbers change from repetition to repetition."""
    pairs = iter(zip(numbers[at], numbers[at + period], strict=True))

    def hole(number: int) -> Any:
        here, there = next(pairs)
        if here == there:
            return number
        step, base = there - here, here
        if order is not None:
            step //= order[1] - order[0]
            base -= step * order[0]
        return f"{{{base}{step:+d}i}}"

    return _mapped(row, hole)
