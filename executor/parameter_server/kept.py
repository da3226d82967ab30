"""What a server holds beside its store, as names and arrays that can be kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from executor.parameter_server.layout import Array
from executor.parameter_server.store import Pushed


def laid_aside(waiting: Mapping[int, Pushed]) -> dict[str, Array]:
    """Pushes that wait for others, copied, by name; ``waiting_from`` reads them."""
    arrays: dict[str, Array] = {}
    for worker, pushed in waiting.items():
        for dtype, x in pushed.dense.items():
            arrays[f"waiting/{worker}/dense/{dtype}"] = np.array(x)
        for name, (ids, x) in pushed.rows.items():
            arrays[f"waiting/{worker}/ids/{name}"] = np.array(ids)
            arrays[f"waiting/{worker}/rows/{name}"] = np.array(x)
    return arrays


def differ(got: Mapping[str, Any], held: Mapping[str, Any]) -> str:
    """What differs in two descriptions of parameters, the first of it."""
    mine, theirs = (
        dict(zip(x["paths"], zip(x["dtypes"], x["shapes"], strict=True), strict=True))
        | x.get("tables", {})
        for x in (got, held)
    )
    for path in sorted({*mine, *theirs}):
        one, other = mine.get(path), theirs.get(path)
        if one is None or other is None or list(one) != list(other):
            return f"{path}: got {one}, they have {other}"
    return "cut in another way"


def by_rank(found: Mapping[str, Any]) -> dict[int, Any]:
    """With numbers for names, which JSON has not."""
    return {int(k): v for k, v in found.items()}


def waiting_from(arrays: Mapping[str, Array]) -> dict[int, Pushed]:
    """Pushes laid aside, from dumped arrays."""
    found: dict[int, Pushed] = {}
    for name, x in arrays.items():
        if not name.startswith("waiting/"):
            continue
        _, worker, kind, key = name.split("/", 3)
        pushed = found.setdefault(int(worker), Pushed({}, {}))
        if kind == "dense":
            found[int(worker)] = replace(pushed, dense={**pushed.dense, key: x})
        elif kind == "ids":
            rows = (x, arrays[f"waiting/{worker}/rows/{key}"])
            found[int(worker)] = replace(pushed, rows={**pushed.rows, key: rows})
    return found
