"""Notes on steps that run but look wrong: no argument is returned, or none with a new value."""

from __future__ import annotations

import re

from planner.graph.ir import SCALAR, Graph

_FLOATS = ("float", "bfloat")


def inert_notes(graph: Graph) -> tuple[str, ...]:
    """Notes on results of a step that look wrong, one line each; none for a usual train step.

    Args:
        graph: the step.
    """
    inputs = graph.inputs
    if not inputs:
        return ()
    if not graph.state:
        notes = [
            "no argument comes back as a result: this step updates nothing; that is right for an "
            "evaluation step; a train step returns its new state or updates NNX objects in place"
        ]
    elif all(old == new for old, new in graph.next_values.items()):
        notes = [
            "every argument that comes back comes back unchanged: this step updates nothing, its "
            "parameters stay as they are"
        ]
    else:
        notes = _without_state(graph)
    return (*notes, *_unread(graph))


def _without_state(graph: Graph) -> list[str]:
    """A note if no result besides the state depends on the state."""
    floats = [v for v in graph.reports if graph.values[v].dtype.startswith(_FLOATS)]
    if not floats or not graph.needed_for(floats)[0].isdisjoint(graph.state):
        return []
    return [
        "no result besides the state depends on the state: the loss does not depend on the "
        "parameters"
    ]


def _unread(graph: Graph) -> list[str]:
    """A note per argument that has matrices of floats and that no result depends on."""
    new = [o for o in graph.outputs if o != SCALAR and graph.next_values.get(o, -1) != o]
    read, _ = graph.needed_for(new)
    arguments: dict[str, list[int]] = {}
    for value, path in zip(graph.inputs, graph.input_paths, strict=True):
        root = re.match(r"\[\d+\]", path)
        arguments.setdefault(root.group() if root else path, []).append(value)
    return [
        f"no result depends on argument {name} ({len(values)} arrays): the step does not use it"
        for name, values in arguments.items()
        if not read.intersection(values) and any(_is_matrix(graph, v) for v in values)
    ]


def _is_matrix(graph: Graph, value: int) -> bool:
    array = graph.values[value]
    return len(array.shape) > 1 and array.dtype.startswith(_FLOATS)
