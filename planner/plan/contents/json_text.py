"""Parts of a plan as JSON, and the text of the file."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from planner.plan.contents.folded import fold_plan
from planner.spec import PLAIN, MeshSpec, Sharding


def plain(value: Any) -> Any:
    """A part of a plan as plain JSON data."""
    if isinstance(value, Sharding):
        return [list(e) if isinstance(e, tuple) else e for e in value.entries]
    if isinstance(value, MeshSpec):
        return dict(zip(value.names, value.sizes, strict=True))
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {k: plain(v) for k, v in fields.items() if k not in _UNSAID or v != _UNSAID[k]}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if isinstance(value, float) and math.isinf(value):
        return None
    return value


_UNSAID: dict[str, Any] = {"memory": "device", "fetched": (), "host_s": 0.0, "host_bytes": 0.0}
_UNSAID |= {"feed_s": 0.0, "device_bytes": 0.0, "frozen": False, "rows": False}
"""Fields of rows that are written only if they differ from these values."""

_LEFT_OUT = {
    **dataclasses.asdict(PLAIN),
    "examples": 0,
    "coupled": [],
    "recomputed": [],
    "chunked": [],
    "staged": [],
    "cuts": [],
    "order": [],
    "compute": [],
}
"""Fields of a plan that are written only if they differ from these values."""
_EXACT = frozenset(
    "op_index op_inputs op_table planning_s inputs outputs constraints activations".split()
)
"""Fields of a plan that hold no floats."""


def rounded(value: Any) -> Any:
    """The value with every float rounded to nine digits, so the text is the same on every host."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, tuple):
        return tuple(rounded(v) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, Sharding | MeshSpec):
        changed = {
            f.name: rounded(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.name not in _EXACT
        }
        return dataclasses.replace(value, **changed)  # type: ignore[type-var]
    return value


_LONG = frozenset({"op_index", "op_inputs"})
"""Lists that are written on one line."""


def _item(value: Any) -> str:
    if not (isinstance(value, dict) and "repeat" in value):
        return json.dumps(value)
    head = json.dumps({k: v for k, v in value.items() if k != "rows"})[:-1]
    rows = ",\n".join("      " + json.dumps(row) for row in value["rows"])
    return f'{head}, "rows": [\n{rows}\n    ]}}'


def json_text(fields: dict[str, Any], *, folded: bool = False) -> str:
    """The text of a plan, with one line per list item. ``folded``: whether ``fold_plan`` folds the
    lists, with one line per row of a block."""
    lines = []
    fields = fold_plan(fields) if folded else fields
    long = _LONG | {"op_table"} if folded else _LONG
    for key, value in fields.items():
        if key in ("decisions", "apart", "confirmed", "compiler_options") and not value:
            continue
        if key in _LEFT_OUT and value == _LEFT_OUT[key]:
            continue
        if isinstance(value, list) and value and key not in long:
            items = ",\n".join("    " + _item(v) for v in value)
            lines.append(f"  {json.dumps(key)}: [\n{items}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
