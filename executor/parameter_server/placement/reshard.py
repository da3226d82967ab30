"""Changes the number of servers. Every element of values and optimizer state keeps its place in its
array, whichever server holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
import optax

from executor.parameter_server.placement.layout import Array, Layout
from executor.parameter_server.server import tables
from executor.parameter_server.server.answers import Counts
from executor.parameter_server.server.snapshots import Dump, busy_of
from executor.parameter_server.server.store import (
    OTHER,
    SECOND,
    STATE,
    TABLES,
    VALUES,
    states,
    without_prefix,
)
from planner.errors import RequestError

Flats = Mapping[str, Array]


def respread(old: Layout, new: Layout, flats: Sequence[Flats]) -> list[dict[str, Array]]:
    """Redistribute flat arrays, by the dtype of the parameters, from one layout to another.

    Args:
        old, new: layouts of the same arrays.
        flats: those of every server of ``old``; their dtypes may differ from the parameters'.

    Returns:
        Those of every server of ``new``.
    """
    if (old.shapes, old.dtypes) != (new.shapes, new.dtypes):
        raise RequestError("layouts of different arrays: nothing says what goes where")
    kinds: dict[str, np.dtype[Any]] = {}
    for held in flats:
        for d, x in held.items():
            kinds[d] = np.promote_types(kinds.get(d, x.dtype), x.dtype)
    leaves = [
        np.empty(int(np.prod(shape)), kinds.get(dtype, np.dtype(dtype)))
        for shape, dtype in zip(old.shapes, old.dtypes, strict=True)
    ]
    for p in old.pieces:
        there = flats[p.server][old.dtypes[p.leaf]]
        leaves[p.leaf][p.begin : p.end] = there[p.offset : p.offset + p.size]
    new_flats = [{d: np.empty(n, kinds[d]) for d, n in sizes.items()} for sizes in new.sizes]
    for p in new.pieces:
        flat = new_flats[p.server][new.dtypes[p.leaf]]
        flat[p.offset : p.offset + p.size] = leaves[p.leaf][p.begin : p.end]
    return new_flats


def reshard(
    old: Layout,
    new: Layout,
    dumps: Sequence[Dump],
    optimizer: optax.GradientTransformation | None,
) -> list[Dump]:
    """The dumps of the servers of one layout as dumps for the servers of another.

    Arrays of optimizer state that are as large as the values are redistributed with them. State
    that a server has once (Adam's count of updates) comes from the server with the most updates
    among those that hold values, if possible one that has it in the dtype of the new server. Counts
    also come from the server with the most updates; a server that takes part in nothing has none.
    Of the numbers of each worker's pushes, the smallest is used: a push that not all servers
    accepted is sent again.
    """
    facts = max((facts for facts, _ in dumps), key=lambda f: int(f["version"]))
    holding = [d for d in dumps if _holds(d[1])] or dumps
    holding = sorted(holding, key=lambda d: int(d[0]["version"]))
    _, first = holding[-1]
    busy = [dumps[k] for k in busy_of(facts)]
    last = {w: [min(_number(d, w) for d in busy), True] for w in facts["last"]}
    values = respread(old, new, [without_prefix(arrays, VALUES) for _, arrays in dumps])
    second = {name: first[name] for name in (VALUES + SECOND,) if name in first}
    new_arrays = [second | {f"{VALUES}{d}": x for d, x in flat.items()} for flat in values]
    check_dumps(dumps, optimizer)
    if optimizer is not None:
        forms = [_places(optimizer, arrays) for _, arrays in dumps]
        once: dict[tuple[str, np.dtype[Any] | None], Array] = {}
        for _, arrays in holding:  # the furthest last
            for (name, dtype), (k, _) in _places(optimizer, arrays).items():
                if dtype is None:
                    x = arrays[f"{STATE}{k}"]
                    once[name, None] = once[name, x.dtype] = x
        spread: dict[str, list[dict[str, Array]]] = {}
        for name in {name for form in forms for name, dtype in form if dtype is not None}:
            flats = [
                {d: arrays[f"{STATE}{k}"] for (n, d), (k, _) in form.items() if n == name and d}
                for form, (_, arrays) in zip(forms, dumps, strict=True)
            ]
            spread[name] = respread(old, new, flats)
        for server, arrays in enumerate(new_arrays):
            for (name, dtype), (k, leaf_dtype) in _places(optimizer, arrays).items():
                arrays[f"{STATE}{k}"] = (
                    once.get((name, leaf_dtype), once[name, None])
                    if dtype is None
                    else spread[name][server][dtype]
                )
    rows = tables.reshard_tables(
        [without_prefix(arrays, TABLES) for _, arrays in dumps], new.servers
    )
    for arrays, part in zip(new_arrays, rows, strict=True):
        arrays.update({f"{TABLES}{name}": x for name, x in part.items()})
    about = dict(facts["about"]) | new.about
    changed = {"last": last, "about": about, "queues": dumps[0][0]["queues"]}
    taking_part = new.busy(tables=bool(about.get("tables")))
    counts = [facts["counts"] if k in taking_part else asdict(Counts()) for k in range(new.servers)]
    return [
        (dict(facts) | changed | {"counts": server_counts}, arrays)
        for server_counts, arrays in zip(counts, new_arrays, strict=True)
    ]


def check_dumps(dumps: Sequence[Dump], optimizer: optax.GradientTransformation | None) -> None:
    """Raises RequestError if the dumps have the state of another optimizer."""
    for _, arrays in dumps:
        if len(states(arrays)) != (0 if optimizer is None else len(_places(optimizer, arrays))):
            raise RequestError(OTHER)


def _holds(arrays: Flats) -> bool:
    return any(name != SECOND for name in without_prefix(arrays, VALUES))


def _number(dump: Dump, worker: str) -> int:
    return int(dump[0]["last"].get(worker, [0, True])[0])


def _places(
    optimizer: optax.GradientTransformation, arrays: Flats
) -> dict[tuple[str, str | None], tuple[int, np.dtype[Any]]]:
    """Index and initial dtype of every leaf of optimizer state, by its name, and by the dtype of
    the values for leaves that are redistributed with them (else None)."""
    values = without_prefix(arrays, VALUES)
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.eval_shape(optimizer.init, values))
    places: dict[tuple[str, str | None], tuple[int, np.dtype[Any]]] = {}
    for k, (path, leaf) in enumerate(leaves):
        key = getattr(path[-1], "key", None) if path else None
        if key in values and key != SECOND and leaf.shape == values[key].shape:
            places[jax.tree_util.keystr(path[:-1]), str(key)] = k, leaf.dtype
        else:
            places[jax.tree_util.keystr(path), None] = k, leaf.dtype
    return places
