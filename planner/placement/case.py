"""What a placement is decided from: the places that are asked for, and the prices of servers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from costmodels import Cluster
from planner.errors import ModelError, RequestError
from planner.graph.lookups.tables import LookUps
from planner.graph.trace import abstract
from planner.request.parsed import Request

SPMD, PS, WHOLE, AUTO = "spmd", "ps", "ps_whole", "auto"
"""Where a parameter lies: sharded over the devices; on servers, by rows; on servers, pulled and
pushed whole; one of the first two, by price."""

CALL_S = 2e-3
"""Seconds of a call to the servers besides its bytes; a step makes two. Measured: of 1,500 calls to
two Ray actors the fastest pull of one row took 2.0 ms and the fastest push 2.4 ms, on a 2-core host
that was busy with other work (threads in place of actors: 0.2 and 0.6 ms); with nothing beside them
the medians are 2.3 and 2.5 ms, and some 3 ms each in a run whose devices share the two cores."""

SERVER_BYTES_PER_S = 1.2e9
"""Rate at which a server reads and writes rows: gathers them, copies them into messages and out of
them, updates them. Measured on that host with two Ray actors, 7 and 27 MB a step, 64 and 256
columns, with no, one and two arrays of optimizer state (``benchmarks/ps_placement.py --calls``):
within 45 %, whether rows are many or wide."""


Rules = tuple[tuple[str, str], ...]


def parse_placement(placement: str | Mapping[str, str]) -> Rules:
    """Rules from ``"auto"`` or ``{"regex over parameter path": place}``.

    Raises:
        RequestError: an unknown place, or no regular expression.
    """
    if placement == AUTO:
        return (("", AUTO),)
    if not isinstance(placement, Mapping):
        raise RequestError(
            f"placement={placement!r}: expected 'auto' or a mapping such as {{'embed': 'ps'}}"
        )
    for pattern, place in placement.items():
        if place not in (SPMD, PS, WHOLE, AUTO):
            raise RequestError(
                f"placement of {pattern!r}: got {place!r}, expected 'ps', 'ps_whole', 'spmd' or "
                "'auto'"
            )
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise RequestError(
                f"placement: {pattern!r} is no regular expression over parameter paths: {error}"
            ) from error
    return tuple(placement.items())


def asked_places(rules: Rules, paths: Sequence[str]) -> dict[str, str]:
    """What is asked for of every parameter: the first rule that matches; else SPMD.

    Raises:
        RequestError: a rule matches no path.

    >>> asked_places((("embed", "ps"), ("", "spmd")), ["['embed']", "['head']"])
    {"['embed']": 'ps', "['head']": 'spmd'}
    """
    for pattern, _ in rules:
        if not any(re.search(pattern, path) for path in paths):
            seen = ", ".join(repr(p) for p in paths[:3])
            raise RequestError(
                f"placement: no parameter path matches {pattern!r}; paths look like {seen}"
            )
    places = {}
    for path in paths:
        matching = (place for pattern, place in rules if re.search(pattern, path))
        places[path] = next(matching, SPMD)
    return places


def served_seconds(cluster: Cluster, nbytes: float, moments: int) -> float:
    """Seconds a step of having ``nbytes`` of values on servers; none of them hides.

    The values cross the host's link to the device and their gradients come back; between hosts both
    cross the network, on one host its memory once more, which is taken to be as fast as the link to
    the device (``[host]`` in the catalog). The server reads the gradient, and reads and writes
    values and ``moments`` arrays of optimizer state of their size, at ``SERVER_BYTES_PER_S``; two
    calls cost ``CALL_S`` besides their bytes.

    Args:
        cluster: the devices, their host link and their network.
        nbytes: of the values that one step reads.
        moments: arrays of optimizer state per parameter.
    """
    host = cluster.host
    if host is None:
        return math.inf
    nodes = cluster.num_devices // cluster.devices_per_node
    wire = cluster.network if nodes > 1 and cluster.network is not None else host
    there_and_back = 2 * CALL_S + 2 * (host.latency_s + nbytes / host.bytes_per_s)
    there_and_back += 2 * (wire.latency_s + nbytes / wire.bytes_per_s)
    return there_and_back + (3 + 2 * moments) * nbytes / SERVER_BYTES_PER_S


@dataclass(frozen=True)
class Case:
    """What a placement is decided from; all but ``shapes`` by path.

    Attributes:
        cluster: that the step runs on.
        shapes: of the parameters, a pytree.
        leaves: the same by path.
        asked: where each parameter is asked to be.
        counts: of tables, rows that a batch asks for.
        sought: of tables, bytes of those.
        moments: optimizer moments of each parameter.
        price: of tables, seconds that the servers take for ``sought``.
    """

    cluster: Cluster
    shapes: Any
    leaves: Mapping[str, Any]
    asked: Mapping[str, str]
    counts: dict[str, int]
    sought: Mapping[str, int]
    moments: Mapping[str, int]
    price: Mapping[str, float]

    @property
    def whole(self) -> frozenset[str]:
        """Parameters that are asked to be on servers as a whole."""
        return frozenset(p for p, where in self.asked.items() if where == WHOLE)


def case_of(
    lookups: LookUps,
    params: Any,
    placement: str | Mapping[str, str],
    optimizer: Any,
    request: Request,
    asked_for: Mapping[str, int] | None,
) -> Case:
    """What the placement of ``lookups`` is decided from; arguments as for ``place_and_plan``.

    Raises:
        RequestError: a table is asked to be on servers by rows and can't be; says why.
    """
    (shapes,) = abstract((params,))
    named, _ = jax.tree_util.tree_flatten_with_path(shapes)
    leaves = {jax.tree_util.keystr(path): x for path, x in named}
    places = asked_places(parse_placement(placement), list(leaves))
    tables = {t.path: t for t in lookups.tables}
    counts = {p: min(t.rows, t.looked_up) for p, t in tables.items()} | dict(asked_for or {})
    _check_tables(places, lookups)
    sought = {p: tables[p].row_bytes * counts[p] for p in tables}
    moments = moments_of(optimizer, shapes)
    price = {p: served_seconds(request.cluster, sought[p], moments[p]) for p in tables}
    return Case(request.cluster, shapes, leaves, places, counts, sought, moments, price)


def _check_tables(places: Mapping[str, str], lookups: LookUps) -> None:
    for path, where in places.items():
        if where == PS and path in lookups.refused:
            raise RequestError(
                f"placement: {path} can't be served by rows: {lookups.refused[path]}; leave it "
                "under SPMD, or place it as 'ps_whole', which sends all of it every step"
            )


def moments_of(optimizer: Any, params: Any) -> dict[str, int]:
    """Arrays of optimizer state in the shape of each parameter, by its path.

    The state repeats the tree of the parameters, behind names of its own: an array of it belongs to
    the parameter with the longest path in which its own ends.

    Raises:
        ModelError: the optimizer does not take the parameters.
    """
    try:
        state = jax.eval_shape(optimizer.init, params)
    except Exception as error:
        raise ModelError("the optimizer's init of the parameters failed") from error
    shapes = dict(_shapes(params))
    counts = dict.fromkeys(shapes, 0)
    for at, shape in _shapes(state):
        path = max((p for p in shapes if at.endswith(p)), key=len, default=None)
        if path is not None and shape and shape == shapes[path]:
            counts[path] += 1
    return counts


def _shapes(tree: Any) -> list[tuple[str, tuple[int, ...]]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), x.shape) for path, x in leaves]
