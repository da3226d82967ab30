"""The inputs of a placement decision: the requested places, and the cost of servers."""

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
"""Where a parameter is stored: sharded over the devices; on servers, by rows; on servers, pulled
and pushed whole; the cheaper of the first two."""

CALL_S = 2e-3
"""Seconds of a call to the servers besides its bytes; a step makes two calls. Measured with 1,500
calls to two Ray actors on a 2-core host that was busy with other work: the fastest pull of one row
took 2.0 ms, the fastest push 2.4 ms (threads instead of actors: 0.2 and 0.6 ms). On an idle host
the medians are 2.3 and 2.5 ms; about 3 ms each in a run whose devices share the two cores."""

SERVER_BYTES_PER_S = 1.2e9
"""Rate at which a server reads and writes rows: gathering, copying into and out of messages, and
updating. Measured on the same host with two Ray actors, 7 and 27 MB per step, 64 and 256 columns,
with zero, one and two arrays of optimizer state (``benchmarks/ps_placement.py --calls``): accurate
within 45 %, for many rows and for wide rows."""


Rules = tuple[tuple[str, str], ...]


def parse_placement(placement: str | Mapping[str, str]) -> Rules:
    """Rules from ``"auto"`` or ``{"regex over parameter path": place}``.

    Raises:
        RequestError: a place is unknown, or a pattern is not a regular expression.
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
    """The requested place of every parameter: that of the first rule that matches, else SPMD.

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
    """Seconds per step of keeping ``nbytes`` of values on servers, without any overlap.

    The values cross the link from host to device, and their gradients come back. Between hosts,
    both also cross the network. On one host, both also cross its memory, which is assumed to be as
    fast as the link to the device (``[host]`` in the catalog). The server reads the gradient, and
    reads and writes the values and ``moments`` arrays of optimizer state of the same size, at
    ``SERVER_BYTES_PER_S``. Each of the two calls costs ``CALL_S`` besides its bytes.

    Args:
        cluster: the devices, their host link and their network.
        nbytes: bytes of the values that one step reads.
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
    """The inputs of a placement decision; the mappings are keyed by path.

    Attributes:
        cluster: the cluster that the step runs on.
        shapes: shapes of the parameters, a pytree.
        leaves: the same, by path.
        asked: requested place of each parameter.
        counts: number of rows of each table that a batch reads.
        sought: bytes of those rows, for each table.
        moments: number of optimizer moments of each parameter.
        price: seconds per step on servers for ``sought``, for each table.
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
        """Parameters that are requested on servers as a whole."""
        return frozenset(p for p, where in self.asked.items() if where == WHOLE)


def case_of(
    lookups: LookUps,
    params: Any,
    placement: str | Mapping[str, str],
    optimizer: Any,
    request: Request,
    asked_for: Mapping[str, int] | None,
) -> Case:
    """The inputs of the placement decision for ``lookups``; arguments as for ``place_and_plan``.

    Raises:
        RequestError: a table is requested on servers by rows and can't be served; says why.
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
    """Number of optimizer state arrays in the shape of each parameter, by its path.

    The state repeats the tree of the parameters under additional prefixes. An array of the state
    belongs to the parameter with the longest path that the path of the array ends with.

    Raises:
        ModelError: the optimizer's ``init`` fails on the parameters.
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
