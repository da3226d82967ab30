"""Steps that look wrong though they run: nothing comes back, or nothing that comes back is new."""

from __future__ import annotations

import re
from collections.abc import Iterable

from planner.graph.ir import SCALAR, Graph

_FLOATS = ("float", "bfloat")


def inert_notes(graph: Graph) -> tuple[str, ...]:
    """What looks wrong about the results of a step, a line each; none for a usual train step.

    Args:
        graph: the step.
    """
    inputs = graph.inputs
    if not inputs:
        return ()
    if not graph.ties:
        notes = [
            "no argument comes back as a result: this step updates nothing; that is right for an "
            "evaluation step; a train step returns its new state or updates NNX objects in place"
        ]
    elif all(inputs[i] == graph.outputs[o] for i, o in graph.ties):
        notes = [
            "every argument that comes back comes back unchanged: this step updates nothing, its "
            "parameters stay as they are"
        ]
    else:
        notes = _without_state(graph)
    return (*notes, *_unread(graph))


def _without_state(graph: Graph) -> list[str]:
    """A line when results besides the state do not depend on it."""
    carried = {o for _, o in graph.ties}
    others = [v for k, v in enumerate(graph.outputs) if k not in carried and v != SCALAR]
    floats = [v for v in others if graph.values[v].dtype.startswith(_FLOATS)]
    state = {graph.inputs[i] for i, _ in graph.ties}
    if not floats or state & _needed(graph, floats):
        return []
    return [
        "no result besides the state depends on the state: the loss does not depend on the "
        "parameters"
    ]


def _unread(graph: Graph) -> list[str]:
    """A line per argument that holds matrices of floats and that nothing reads."""
    back = {graph.inputs[i]: graph.outputs[o] for i, o in graph.ties}
    new = [o for o in graph.outputs if o != SCALAR and back.get(o, -1) != o]
    read = _needed(graph, new)
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
    found = graph.values[value]
    return len(found.shape) > 1 and found.dtype.startswith(_FLOATS)


def _needed(graph: Graph, wanted: Iterable[int]) -> set[int]:
    """The values that some values are computed from, these among them."""
    backs: dict[int, list[tuple[int, ...]]] = {}
    for op in graph.ops:
        if op.kind in ("loop_back", "loop_test"):
            for carry in op.inputs[1:]:
                backs.setdefault(carry, []).append(op.inputs)
    seen = set(wanted)
    stack = list(seen)
    while stack:
        value = stack.pop()
        made = graph.values[value].op
        sources = [*backs.get(value, []), *([graph.ops[made].inputs] if made >= 0 else [])]
        fresh = {i for inputs in sources for i in inputs if i != SCALAR} - seen
        seen |= fresh
        stack.extend(fresh)
    return seen
