"""What of a plan is reviewed: without line numbers, and without how it was found.

A comment or a moved line in the model changes nothing here; a sharding, a recipe, a collective or a
predicted figure does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NOISE = frozenset({"notes", "meshes", "search", "confirmed", "compute"})
"""Fields that say how a plan was found, what was tried, or go by lines."""
SORTED = frozenset({"collectives", "activations", "fallbacks"})
"""Lists whose order follows the lines of the model."""
_LINE = re.compile(r"(?<=\.py):\d+")


def without_line(text: str) -> str:
    """``gpt.py:51`` as ``gpt.py``."""
    return _LINE.sub("", text)


def canonical(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan's JSON that a review is about.

    Args:
        body: the fields, as plain data.
    """
    return {
        name: sorted(map(_lineless, value), key=repr) if name in SORTED else _lineless(value)
        for name, value in body.items()
        if name not in NOISE
    }


def _lineless(value: Any) -> Any:
    if isinstance(value, str):
        return without_line(value)
    if isinstance(value, Mapping):
        return {key: _lineless(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_lineless(v) for v in value]
    return value
