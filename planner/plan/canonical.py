"""The parts of a plan that a review covers: no files, no lines, and not how the plan was chosen.

A comment, a moved line or a renamed file of the model does not change them; a sharding, a recipe, a
collective or a predicted figure does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NOISE = frozenset({"notes", "meshes", "search", "confirmed", "compute", "activations"})
"""Fields that record what was tried, or that depend on lines."""
SORTED = frozenset({"collectives", "fallbacks"})
"""Lists whose order follows the lines of the model."""
_PLACE = re.compile(r"[\w.\-]+\.py:\d+")


def without_place(text: str) -> str:
    """``dot (gpt.py:51)`` as ``dot (.py)``."""
    return _PLACE.sub(".py", text)


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """The reviewed fields in which two plans differ."""
    a, b = canonical(before), canonical(after)
    return tuple(name for name in {**a, **b} if a.get(name) != b.get(name))


def canonical(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan's JSON that a review covers.

    Args:
        body: the fields, as plain data.
    """
    return {
        name: sorted(map(_placeless, value), key=repr) if name in SORTED else _placeless(value)
        for name, value in body.items()
        if name not in NOISE
    }


def _placeless(value: Any) -> Any:
    if isinstance(value, str):
        return without_place(value)
    if isinstance(value, Mapping):
        return {key: _placeless(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_placeless(v) for v in value]
    return value
