"""Readers of JSON values: each returns a field's value or raises ``Misfit``. No jax.

Nothing here trusts the text: it may come from another machine.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
Reader = Callable[[Any], Any]

LONGEST_TEXT = 1_000_000
MOST_BYTES = 2**63 - 1
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Line ends, control and bidirectional characters, and surrogates, which no plan may contain."""


class Misfit(Exception):
    """A value that a plan can't have. ``path`` leads to it, innermost step last."""

    def __init__(self, got: Any, expected: str) -> None:
        super().__init__(expected)
        self.got, self.expected = got, expected
        self.path: list[str] = []

    def __str__(self) -> str:
        where = "".join(reversed(self.path)).removeprefix(".") or "the plan"
        return f"{where} is {short(self.got)}, expected {self.expected}"


def short(value: Any) -> str:
    """A value on one line, in ASCII."""
    if isinstance(value, dict | list):
        kind, count = ("an object", "fields") if isinstance(value, dict) else ("a list", "items")
        return f"{kind} of {len(value)} {count}"
    if isinstance(value, int) and abs(value) > MOST_BYTES:
        return "a number beyond 2**63"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def text(pattern: str = ".*", expected: str = "a text of one line") -> Reader:
    """One line without control characters that matches as a whole."""
    matches = re.compile(pattern).fullmatch

    def read(value: Any) -> str:
        if type(value) is not str or len(value) > LONGEST_TEXT or not matches(value):
            raise Misfit(value, expected)
        if hidden := _HIDDEN.search(value):
            raise Misfit(value, f"{expected}, without {hidden.group()!a}")
        return value

    return read


def one_of(*names: str) -> Reader:
    """One of these texts."""

    def read(value: Any) -> str:
        if type(value) is not str or value not in names:
            raise Misfit(value, f"one of {', '.join(names)}")
        return value

    return read


def whole(least: int = 0, most: int = MOST_BYTES) -> Reader:
    """A whole number in a range."""

    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise Misfit(value, f"a whole number from {least} to {most}")
        return value

    return read


def number(least: float = -math.inf, *, missing: float | None = None) -> Reader:
    """A finite number of at least ``least``; null stands for ``missing``, if that is given."""
    expected = "a finite number" + (f" from {least:g} on" if least > -math.inf else "")

    def read(value: Any) -> float:
        if value is None and missing is not None:
            return missing
        known = type(value) is float or (type(value) is int and abs(value) <= MOST_BYTES)
        if not known or not math.isfinite(value) or value < least:
            raise Misfit(value, expected)
        return value  # type: ignore[no-any-return]

    return read


def flag(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise Misfit(value, "true or false")
    return value


def many(read: Reader, count: int | None = None) -> Reader:
    """A list, as a tuple; with ``count`` items, if that is given."""
    expected = "a list" if count is None else f"a list of {count} items"

    def read_all(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or count not in (None, len(value)):
            raise Misfit(value, expected)
        items: list[Any] = []
        try:
            for item in value:
                items.append(read(item))
        except Misfit as error:
            error.path.append(f"[{len(items)}]")
            raise
        return tuple(items)

    return read_all


def perhaps(read: Reader) -> Reader:
    """What ``read`` accepts, or null."""
    return lambda value: None if value is None else read(value)


def record(make: Callable[..., T], **readers: Reader) -> Callable[[Any], T]:
    """An object with a field for each reader, as a dataclass; fields with a default may be missing.

    Raises:
        TypeError: the dataclass has a field without a reader, or the other way round.
    """
    fields = {f.name: f for f in dataclasses.fields(make) if f.compare}  # type: ignore[arg-type]
    if set(fields) != set(readers):
        raise TypeError(f"{make}: {set(fields) ^ set(readers)} in the class or the schema alone")
    needed = [name for name, f in fields.items() if f.default is dataclasses.MISSING]

    def read(value: Any) -> T:
        if type(value) is not dict:
            raise Misfit(value, f"an object with {', '.join(needed)}")
        for name in needed:
            if name not in value:
                raise Misfit(value, f"a field {name!r} in it")
        parts = {}
        for name, part in value.items():
            if name not in readers:
                raise Misfit(value, f"no field {short(name)} in it")
            try:
                parts[name] = readers[name](part)
            except Misfit as error:
                error.path.append(f".{name}")
                raise
        return make(**parts)

    return read
