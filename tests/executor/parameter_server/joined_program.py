"""A process of several with one mesh: trains with rows that a store in every process has whole."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from test_hybrid import DATA, ROWS, SGD, Fake, fresh, loss

from executor import initialize
from executor.parameter_server import Rule, hybrid
from planner.errors import RequestError

SLOTS = 256


class Shared(Fake):
    """The same store in every process: what is pushed is the mean of what all push."""

    rule, on_lost, clock = Rule(), "fail", 0

    def __init__(self) -> None:
        super().__init__(jax.process_count())
        self.rank = jax.process_index()

    def init(self, params: Any, tables: Any) -> Any:
        whole = fresh()
        named = {f"['{name}']": x for name, x in whole.items()}
        return super().init({k: named[k] for k in params}, {k: named[k] for k in tables})

    def push(self, gradients: Any, rows: Any = None) -> None:
        for name, (ids, x) in sorted((rows or {}).items()):
            slots = np.zeros(SLOTS, np.int32), np.zeros((SLOTS, x.shape[1]), np.float32)
            slots[0][: len(ids)], slots[1][: len(ids)] = ids, x
            every, changes = multihost_utils.process_allgather(slots)
            super().push(None, {name: (every.reshape(-1), changes.reshape(-1, x.shape[1]) / 2)})
        if gradients is not None:
            every = multihost_utils.process_allgather(gradients)
            super().push(jax.tree.map(lambda x: x.mean(axis=0), every))


def batches(kind: str) -> Any:
    """Of the whole batch what this process is to give."""
    me, count = jax.process_index(), jax.process_count()
    for ids, y in DATA:
        if kind == "parts":
            mesh = jax.make_mesh((jax.device_count(),), ("d",))
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
            mine = slice(me * len(y) // count, (me + 1) * len(y) // count)
            yield tuple(jax.make_array_from_process_local_data(sharding, x[mine]) for x in (ids, y))
        elif kind == "others" and me:
            yield ids, y + 1
        else:
            yield ids, y


def say(*words: Any) -> None:
    """In one piece: Gloo's threads write to the same output."""
    sys.stdout.write(json.dumps(words) + "\n")


def main(kind: str) -> None:
    role = initialize(timeout_s=60)
    server = Shared()
    places = {"embed": "ps", "out": "ps_whole"} if kind == "whole" else {"embed": "ps"}
    cluster = f"cpu:{jax.device_count()}"
    run = hybrid(loss, fresh(), SGD, server=server, placement=places, cluster=cluster)
    try:
        losses = [float(run(*batch)) for batch in batches(kind)]
    except RequestError as error:
        say(role.process, str(error))
        return
    asked = [x["['embed']"] for x in server.asked]
    table = server.tables["['embed']"]
    assert table.shape[0] == ROWS
    say(role.process, losses, asked, table.astype(float).sum(axis=1).tolist())


if __name__ == "__main__":
    main(sys.argv[1])
