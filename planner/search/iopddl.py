"""Reads and writes the public IOPDDL contest form (ASPLOS 2025 / EuroSys 2025).

An instance is ``{"problem": {"name", "nodes": {"intervals", "costs", "usages"}, "edges": {"nodes",
"costs"}, "usage_limit"}}``: one interval and one usage per strategy for each node, edge costs
row-major over the strategies of the nodes they name, 1e18 for a forbidden pair.  A node's usage
counts in the moments [start, end) of its interval.  The form allows one usage per node; a further
usage is written as an alias node, tied by an edge that is infinite off its diagonal.

A choice is a JSON list of strategy indices, one per node, as the contest's solvers print it.

Instances repeat the same lists of numbers, which would take most of the time to parse as JSON.  So
the innermost lists are cut out of the text, and each distinct list is parsed once.  The remaining
text, a few percent, is parsed unchanged.  Lists of equal text become one array.

Paper: Moffitt and Fegade, "The ASPLOS 2025 / EuroSys 2025 Contest on Intra-Operator Parallelism for
Distributed Deep Learning", 2025.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner.files import MIB, gunzipped, read_bytes, unique
from planner.search.problem import FORBIDDEN, Array, Edge, Problem, Usage, verify

_MARK = "\x01"
"""First character of the text that replaces a cut-out list; no JSON string can contain it."""
LARGEST = 512 * MIB
"""Maximum bytes of a file, and of the contents of a gzip file."""
_MOST = 1e300
"""Maximum magnitude of the memory limit."""
_FAR = 2**62
"""Moments must be smaller than this in magnitude, to fit into 64 bits."""
_KINDS: dict[type, str] = {dict: "an object", list: "a list"}


def read_iopddl(path: str | Path) -> Problem:
    """Read an instance; a file whose name ends in ``.gz`` is decompressed.

    Args:
        path: the file.

    Returns:
        The problem; nodes are named n0, n1, ...  Equal tables are one array.

    Raises:
        OSError: if the file can't be read, is no regular file or is larger than ``LARGEST``.
        ValueError: if it does not hold a well-formed instance; the message, one line, names the
            file, the node or edge, the value and what was expected.
    """
    file = Path(path)
    raw = read_bytes(file, LARGEST)
    try:
        problem = _problem(_parsed(gunzipped(raw, LARGEST) if file.suffix == ".gz" else raw))
        verify(problem)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    taken = {id(usage.bytes): bool(usage.bytes.any()) for usage in problem.usages}
    live = (u for u in problem.usages if u.start < u.end and taken[id(u.bytes)])
    return dataclasses.replace(problem, usages=tuple(live))


def write_iopddl(problem: Problem, path: str | Path) -> None:
    """Write an instance; the form has no names or levels, so they are omitted.

    Args:
        problem: the problem.
        path: the file; if its name ends in ``.gz``, it is compressed.

    Raises:
        OSError: if the file can't be written.
    """
    text = _Writer()
    costs = [text.of(cost) for cost in problem.cost_s]
    intervals = ["[0, 0]"] * len(costs)
    usages = [text.of(np.zeros(size)) for size in (cost.size for cost in problem.cost_s)]
    ends = [f"[{edge.a}, {edge.b}]" for edge in problem.edges]
    tables = [text.of(edge.cost_s) for edge in problem.edges]
    written: set[int] = set()
    for usage in problem.usages:
        span, taken = f"[{usage.start}, {usage.end}]", text.of(usage.bytes)
        if usage.node not in written:
            intervals[usage.node], usages[usage.node] = span, taken
            written.add(usage.node)
            continue
        size = usage.bytes.size
        ends.append(f"[{usage.node}, {len(costs)}]")
        tables.append(text.of(np.where(np.eye(size, dtype=bool), 0.0, FORBIDDEN)))
        costs.append(text.of(np.zeros(size)))
        intervals.append(span)
        usages.append(taken)
    nodes = f'{{"intervals": {_rows(intervals)}, "costs": {_rows(costs)}, "usages": {_rows(usages)}'
    edges = f'{{"nodes": {_rows(ends)}, "costs": {_rows(tables)}'
    limit = problem.limit_bytes
    last = f', "usage_limit": {json.dumps(_number(limit))}' if math.isfinite(limit) else ""
    name = json.dumps(Path(path).name.split(".")[0])
    raw = (
        f'{{"problem": {{"name": {name}, "nodes": {nodes}}}, "edges": {edges}}}{last}}}}}'.encode()
    )
    Path(path).write_bytes(gzip.compress(raw) if str(path).endswith(".gz") else raw)


@dataclasses.dataclass(frozen=True, eq=False)
class _Body:
    """JSON with its innermost lists stored separately; mark k stands for ``lists[k]``."""

    json: Any
    lists: Sequence[Any]
    arrays: dict[Any, Array] = dataclasses.field(default_factory=dict)

    def list(self, value: Any) -> Any:
        """The list that a mark stands for; any other value unchanged."""
        marked = type(value) is str and value.startswith(_MARK)
        return self.lists[int(value[1:])] if marked else value

    def under(self, part: Any, key: str, kind: type) -> Any:
        """The list or object under a key of an object."""
        if key not in part:
            raise ValueError(f"no {key!r} where there is {_got(part)}")
        member = self.list(part[key])
        if type(member) is not kind:
            raise ValueError(f"{key!r} is {_got(member)}, expected {_KINDS[kind]}")
        return member

    def numbers(self, value: Any, where: str, what: str, shape: tuple[int, ...] = (-1,)) -> Array:
        """An array of a shape, one object per distinct text; ``(-1,)`` allows any length."""
        key = (value, shape) if type(value) is str else None
        if key in self.arrays:
            return self.arrays[key]
        row = self.list(value)
        if type(row) is not list or not set(map(type, row)) <= {int, float}:
            raise ValueError(f"{where}: {what} are {_got(row)}, expected a list of numbers")
        if shape != (-1,) and len(row) != math.prod(shape):
            size = f"{math.prod(shape)}" + (f" ({shape[0]} x {shape[1]})" if shape[1:] else "")
            raise ValueError(f"{where}: {len(row)} {what}, expected {size}")
        try:
            array = np.array(row, dtype=np.float64).reshape(shape)
        except OverflowError as error:
            raise ValueError(f"{where}: {what} hold a number that no float can") from error
        if key is not None:
            self.arrays[key] = array
        return array


def _parsed(raw: bytes) -> _Body:
    """Parse an instance; each distinct innermost list is parsed once."""
    seen: dict[bytes, int] = {}
    pieces: list[bytes] = []
    for piece in raw.split(b"]"):
        head, bracket, row = piece.rpartition(b"[")
        if bracket:
            pieces.append(b'%s"%s%d"' % (head, _MARK.encode(), seen.setdefault(row, len(seen))))
        else:
            pieces.append(row + b"]")
    try:
        text = b"".join(pieces).removesuffix(b"]")
        frame = json.loads(text, strict=False, object_pairs_hook=unique)
        return _Body(frame, json.loads(b"[[" + b"],[".join(seen) + b"]]"))
    except (ValueError, RecursionError):
        pass  # a string with brackets in it, or no JSON at all
    try:
        return _Body(json.loads(raw, object_pairs_hook=unique), ())
    except RecursionError as error:
        raise ValueError("not JSON: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def _problem(body: _Body) -> Problem:
    """The problem that a parsed instance holds."""
    top = body.list(body.json)
    if type(top) is not dict:
        raise ValueError(f"holds {_got(top)}, expected an object")
    parts = body.under(top, "problem", dict)
    nodes = body.under(parts, "nodes", dict)
    rows = [body.under(nodes, key, list) for key in ("intervals", "costs", "usages")]
    if len({len(row) for row in rows}) > 1:
        counts = ", ".join(str(len(row)) for row in rows)
        raise ValueError(f"nodes: {counts} intervals, costs and usages, expected equal numbers")
    if not rows[0]:
        raise ValueError("nodes: there are none, expected at least one")
    costs = [body.numbers(cost, f"node {node}", "costs") for node, cost in enumerate(rows[1])]
    usages = []
    for node, (interval, usage) in enumerate(zip(rows[0], rows[2], strict=True)):
        start, end = _interval(body.list(interval), node)
        taken = body.numbers(usage, f"node {node}", "usages", costs[node].shape)
        usages.append(Usage(node, start, end, taken))
    edges = _edges(body, body.under(parts, "edges", dict), costs)
    limit = body.list(parts.get("usage_limit"))
    if limit is not None and (type(limit) not in (int, float) or not abs(limit) <= _MOST):
        raise ValueError(f"'usage_limit' is {_got(limit)}, expected a number")
    return Problem(
        tuple(f"n{node}" for node in range(len(costs))),
        tuple(costs),
        edges,
        tuple(usages),
        math.inf if limit is None else float(limit),
    )


def _interval(interval: Any, node: int) -> tuple[int, int]:
    """Two moments, the first not after the second."""
    if type(interval) is list and [type(moment) for moment in interval] == [int, int]:
        start, end = interval
        if -_FAR < start <= end < _FAR:
            return start, end
    raise ValueError(
        f"node {node}: interval {_got(interval)}, expected [start, end], whole, start <= end"
    )


def _edges(body: _Body, links: Any, costs: list[Array]) -> tuple[Edge, ...]:
    """The edges; the costs of an edge with one node are added to ``costs`` in place."""
    ends, tables = (body.under(links, key, list) for key in ("nodes", "costs"))
    if len(ends) != len(tables):
        raise ValueError(
            f"edges: {len(ends)} nodes and {len(tables)} costs, expected equal numbers"
        )
    count, edges = len(costs), []
    for index, (value, table) in enumerate(zip(ends, tables, strict=True)):
        pair = body.list(value)
        where = f"edge {index}"
        if type(pair) is not list or not 1 <= len(pair) <= 2 or set(map(type, pair)) != {int}:
            raise ValueError(f"{where}: nodes {_got(pair)}, expected one or two node indices")
        if min(pair) < 0 or max(pair) >= count:
            raise ValueError(f"{where}: nodes {_got(pair)}, expected 0 to {count - 1}")
        if len(set(pair)) < len(pair):
            raise ValueError(f"{where}: nodes {_got(pair)}, expected two different ones")
        shape = tuple(costs[node].size for node in pair)
        cost = body.numbers(table, f"{where} {pair}", "costs", shape)
        if len(pair) == 1:
            costs[pair[0]] = costs[pair[0]] + cost
        else:
            edges.append(Edge(pair[0], pair[1], cost))
    return tuple(edges)


def _got(value: Any) -> str:
    """A value in words, short enough for one line."""
    if type(value) is dict:
        return "an object with " + (", ".join(map(repr, list(value)[:8])) or "nothing in it")
    if type(value) is list and any(type(item) in (str, list, dict) for item in value):
        return f"a list of {len(value)} things that are no numbers"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Writer:
    """Writes arrays as text, once per object."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Array, str]] = {}

    def of(self, values: Array) -> str:
        """The numbers of an array as a flat list."""
        entry = self.known.get(id(values))
        if entry is None:
            text = json.dumps([_number(value) for value in values.ravel().tolist()])
            entry = self.known[id(values)] = (values, text)
        return entry[1]


def _number(value: float) -> float:
    """A float in the form's notation: forbidden becomes 1e18, whole numbers become integers."""
    value = min(float(value), FORBIDDEN)
    return int(value) if value.is_integer() else value


def _rows(rows: Sequence[str]) -> str:
    """Several texts as one JSON list."""
    return f"[{', '.join(rows)}]"
