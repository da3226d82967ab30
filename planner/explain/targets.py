"""Find the values of a step that a text names: a path, a line, a value's number, an operation."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from planner.errors import RequestError
from planner.graph.ir import SCALAR, Graph

_LINE = re.compile(r"(?:(?P<file>[^:]+\.py):)?(?P<line>\d+)")
_VALUE = re.compile(r"%(?P<index>\d+)")
_KEYS = re.compile(r"(?:\[[^\]]*\]|\.\w+)+")
"""A piece of a path, which is not used as a regular expression."""
NEAREST = 5


def find_values(graph: Graph, target: str) -> tuple[int, ...]:
    """The values that a text names, in the order of the program.

    ======================  =========================================================
    ``%12``                 value 12 of the graph
    ``model.py:49``, ``49``  the results of the operations of that line of the user's code
    ``dot_general``         the results of operations of that kind
    anything else           an argument's path, the end or a part of one, or a regular
                            expression that is searched in the paths
    ======================  =========================================================

    Raises:
        RequestError: nothing has that name; the message has the nearest names.
    """
    if match := _VALUE.fullmatch(target):
        index = int(match["index"])
        if index >= len(graph.values):
            raise RequestError(
                f"no value {target}: the step has values %0 to %{len(graph.values) - 1}"
            )
        return (index,)
    if match := _LINE.fullmatch(target):
        return _of_line(graph, match["file"], int(match["line"]))
    paths = dict(zip(graph.input_paths, graph.inputs, strict=True))
    if target in paths:
        return (paths[target],)
    for found_in in (str.endswith, str.__contains__):
        if matched := tuple(value for path, value in paths.items() if found_in(path, target)):
            return matched
    if not _KEYS.fullmatch(target) and (matched := _matching(paths, target)):
        return matched
    results = tuple(o for op in graph.ops if op.kind == target for o in op.outputs)
    if results:
        return results
    kinds = {op.kind for op in graph.ops}
    raise RequestError(f"nothing is called {target!r}{_nearest(target, [*paths, *kinds])}")


def _matching(paths: dict[str, int], target: str) -> tuple[int, ...]:
    try:
        wanted = re.compile(target)
    except re.error:
        return ()
    return tuple(value for path, value in paths.items() if wanted.search(path))


def _of_line(graph: Graph, file: str | None, line: int) -> tuple[int, ...]:
    """Results of the operations of a line; ``file`` None means any of the user's files."""
    sources = dict.fromkeys(op.source for op in graph.ops if op.source)
    name = None if file is None else file.replace("\\", "/").rpartition("/")[2]
    wanted = {
        source
        for source in sources
        if source.rpartition(":")[2] == str(line)
        and (name is None or source.rpartition(":")[0] == name)
    }
    values = tuple(o for op in graph.ops if op.source in wanted for o in op.outputs)
    if values:
        return values
    same = [s for s in sources if name is None or s.rpartition(":")[0] == name] or list(sources)
    near = sorted(same, key=lambda s: abs(int(s.rpartition(":")[2]) - line))[:NEAREST]
    where = f"{name}:{line}" if name else f"line {line}"
    raise RequestError(
        f"no operation of the step comes from {where}; the nearest lines are {', '.join(near)}"
        if near
        else f"no operation of the step comes from {where}"
    )


def _nearest(target: str, names: Sequence[str]) -> str:
    """The names that are most similar to a text, as the end of a message."""
    close = difflib.get_close_matches(target, names, NEAREST, 0.3)
    inside = [n for n in names if target.strip("[]'\"").lower() in n.lower()]
    near = list(dict.fromkeys([*inside, *close]))[:NEAREST] or list(names[:NEAREST])
    return f"; the nearest names are {', '.join(near)}" if near else ""


def values_of(graph: Graph, values: Sequence[int]) -> tuple[int, ...]:
    """The values that have dimensions to split."""
    return tuple(v for v in values if v != SCALAR and graph.values[v].splits)
