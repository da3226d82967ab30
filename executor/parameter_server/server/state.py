"""The state of a server besides its store, as names and arrays that can be saved in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np

from executor.parameter_server.placement.layout import Array
from executor.parameter_server.server.answers import Counts
from executor.parameter_server.server.clock import Clocks
from executor.parameter_server.server.store import Pushed, Store
from executor.parameter_server.worker.queue import Queue


class ServerState(Protocol):
    """The attributes of a server (``server.shard.Shard``) that are saved and restored."""

    store: Store
    about: dict[str, Any]
    workers: int
    version: int
    seen: int
    last: dict[int, tuple[int, bool]]
    clocks: Clocks
    counts: Counts
    at_barrier: dict[int, int]
    left: set[int]
    queues: dict[int, Queue]
    published: tuple[Any, Any]
    read_at: dict[int, int]
    waiting: dict[int, Pushed]


def laid_aside(waiting: Mapping[int, Pushed]) -> dict[str, Array]:
    """Copies of the pushes that wait for those of others, by name; ``take_up`` reads them."""
    arrays: dict[str, Array] = {}
    for worker, pushed in waiting.items():
        for dtype, x in pushed.dense.items():
            arrays[f"waiting/{worker}/dense/{dtype}"] = np.array(x)
        for name, (ids, x) in pushed.rows.items():
            arrays[f"waiting/{worker}/ids/{name}"] = np.array(ids)
            arrays[f"waiting/{worker}/rows/{name}"] = np.array(x)
    return arrays


def differ(got: Mapping[str, Any], held: Mapping[str, Any]) -> str:
    """The first difference between two descriptions of parameters, as text."""
    got_forms, held_forms = (
        dict(zip(x["paths"], zip(x["dtypes"], x["shapes"], strict=True), strict=True))
        | x.get("tables", {})
        for x in (got, held)
    )
    for path in sorted({*got_forms, *held_forms}):
        one, other = got_forms.get(path), held_forms.get(path)
        if one is None or other is None or list(one) != list(other):
            return f"{path}: got {one}, they have {other}"
    return "cut in another way"


def shard_facts(shard: ServerState) -> dict[str, Any]:
    """The state that is not in arrays, as JSON data; ``take_up`` reads it."""
    facts = {
        "begun": shard.store.values is not None,
        "about": shard.about,
        "workers": shard.workers,
        "version": shard.version,
        "last": {w: list(pair) for w, pair in shard.last.items()},
        "clocks": shard.clocks.at,
        "aside": shard.clocks.aside,
        "barriers": shard.at_barrier,
        "left": sorted(shard.left),
        "queues": {n: queue.to_facts() for n, queue in shard.queues.items()},
        "counts": asdict(shard.counts),
    }
    json_facts: dict[str, Any] = json.loads(json.dumps(facts))
    return json_facts


def take_up(shard: ServerState, facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Set up a new server to resume from these facts and arrays."""
    shard.published = (None, None)
    if facts["begun"]:
        shard.store.load(arrays)
    shard.about = facts["about"]
    shard.version = shard.seen = facts["version"]
    shard.last = {int(w): (n, took) for w, (n, took) in facts["last"].items()}
    shard.clocks.at = _by_rank(facts["clocks"])
    shard.clocks.aside = _by_rank(facts.get("aside", {}))  # older snapshots have none
    shard.at_barrier = _by_rank(facts["barriers"])
    shard.left = set(facts["left"])
    shard.queues = {int(n): Queue.from_facts(q) for n, q in facts["queues"].items()}
    counts: dict[str, Any] = facts["counts"]
    count_fields: dict[str, Any] = {
        k: _by_rank(v) if isinstance(v, dict) else v for k, v in counts.items()
    }
    shard.counts = Counts(**count_fields)
    shard.read_at.clear()
    shard.waiting = _waiting_from(arrays)


def _by_rank(by_name: Mapping[str, Any]) -> dict[int, Any]:
    """The mapping with integer keys, which JSON does not have."""
    return {int(k): v for k, v in by_name.items()}


def _waiting_from(arrays: Mapping[str, Array]) -> dict[int, Pushed]:
    """The waiting pushes, from dumped arrays."""
    waiting: dict[int, Pushed] = {}
    for name, x in arrays.items():
        if not name.startswith("waiting/"):
            continue
        _, worker, kind, key = name.split("/", 3)
        pushed = waiting.setdefault(int(worker), Pushed({}, {}))
        if kind == "dense":
            waiting[int(worker)] = replace(pushed, dense={**pushed.dense, key: x})
        elif kind == "ids":
            rows = (x, arrays[f"waiting/{worker}/rows/{key}"])
            waiting[int(worker)] = replace(pushed, rows={**pushed.rows, key: rows})
    return waiting
