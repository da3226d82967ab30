"""The usual manual plans as requests, and notes where a plan differs from its description."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from planner.graph.ir import Graph
from planner.graph.trace import Traced
from planner.plan.plan import Plan
from planner.request.axes.sequence import batch_inputs, sequences
from planner.request.marks import marks
from planner.request.pins import axis_names
from planner.request.state import StateRequest, find_state
from planner.search.registry import FAST
from planner.spec import MeshSpec


@dataclass(frozen=True)
class Kind:
    """A kind of plan as a request."""

    name: str
    what: str
    batch: int
    """Devices that the batch is split over."""
    options: dict[str, Any]
    axes: tuple[str, ...] = ()
    """Mesh axes of the batch's dimensions, by position; empty if they are not prescribed."""
    tensor: str = ""
    sequence: str = ""


def kinds(graph: Graph, devices: int) -> Iterator[Kind]:
    """The manual plans that a number of devices allows."""
    data = {"mode": "DATA_PARALLEL", "search": FAST}
    search = {"mode": "AUTO_PARALLEL", "search": FAST}
    yield Kind("data parallel", "batch split, everything else whole", devices, {**data, "zero": 0})
    if devices == 1:
        return
    for name, what, level in (
        ("ZeRO-1", "data parallel, optimizer state split", 1),
        ("FSDP", "data parallel, parameters and state split", 3),
    ):
        mesh = MeshSpec(("data",), (devices,))
        yield Kind(name, what, devices, {**search, "mesh": mesh, "zero": level}, ("data",))
    degrees = [t for t in range(2, devices + 1) if devices % t == 0]
    for t in degrees:
        mesh = MeshSpec(("data", "model"), (devices // t, t))
        yield Kind(
            f"tensor {t}",
            f"every matrix split over {t}, batch over {devices // t}",
            devices // t,
            {**search, "mesh": mesh, "zero": 0},
            ("data",),
            tensor="model",
        )
    for t in degrees[:-1]:
        mesh = MeshSpec(("data", "model"), (devices // t, t))
        yield Kind(
            f"FSDP {devices // t} x tensor {t}",
            f"every matrix split over {t}, batch and state over {devices // t}",
            devices // t,
            {**search, "mesh": mesh, "zero": 3},
            ("data",),
            tensor="model",
        )
    shapes = [graph.values[v].shape for v in sequences(graph)]
    for t in degrees:
        if shapes and all(s[1] % t == 0 for s in shapes):
            yield Kind(
                f"sequence {t}",
                f"second dimension of the batch over {t}, the first over {devices // t}",
                devices // t,
                {**search, "mesh": MeshSpec(("data", "sequence"), (devices // t, t))},
                ("data", "sequence"),
                sequence="sequence",
            )


MOST = 0.9
"""Share of the bytes that must be split as the kind says; below it, the plan has a note."""


def with_marked(mesh: MeshSpec | None, traced: Traced) -> MeshSpec | None:
    """The mesh, extended by axes of size 1 for other names that marks in the model use."""
    if mesh is None:
        return None
    more = [name for name in axis_names(marks(traced, set())) if name not in mesh.names]
    return MeshSpec((*mesh.names, *more), (*mesh.sizes, *[1] * len(more))).slim()


def note(graph: Graph, kind: Kind, plan: Plan | None) -> str:
    """A note if the plan differs from its kind: the share of the parameters or the state."""
    if plan is None:
        return ""
    parameters = find_state(graph, StateRequest()).parameters
    leaves = dict(zip(graph.inputs, plan.inputs, strict=True))
    sizes = {
        v: graph.values[v].nbytes for v, leaf in leaves.items() if leaf.tied or v in parameters
    }

    def share(values: frozenset[int], axes: Sequence[str]) -> float:
        whole = sum(sizes[v] for v in values)
        split = sum(sizes[v] for v in values if set(leaves[v].spec.axes) & set(axes))
        return split / whole if whole else 1.0

    if kind.tensor and (part := share(parameters, (kind.tensor,))) < MOST:
        return f"{part:.0%} of the parameters' bytes are split over {kind.tensor}"
    level = kind.options.get("zero")
    if level == 1 and (part := share(parameters, ("data",))) > 1 - MOST:
        return f"{part:.0%} of the parameters' bytes are split, too: one decision with their state"
    if level == 3 and (part := share(frozenset(sizes), ("data",))) < MOST and kind.batch > 1:
        return f"{part:.0%} of the state's bytes are split over data"
    return ""


def divides(graph: Graph, devices: int) -> bool:
    """Whether an input of the batch can be split over this number of devices."""
    shapes = [graph.values[v].shape for v in batch_inputs(graph)]
    return devices == 1 or any(shape[0] % devices == 0 for shape in shapes)


def batch_rules(
    graph: Graph, mesh: MeshSpec | None, axes: Sequence[str]
) -> dict[str, PartitionSpec]:
    """Path rules that put the batch's dimensions on mesh axes, where they divide."""
    if mesh is None or not axes:
        return {}
    out = {}
    paths = dict(zip(graph.inputs, graph.input_paths, strict=True))
    for value in batch_inputs(graph):
        shape = graph.values[value].shape
        entries = [
            axis if n % mesh.size(axis) == 0 else None for n, axis in zip(shape, axes, strict=False)
        ]
        out[f"^{re.escape(paths[value])}$"] = PartitionSpec(*entries)
    return out


def whole_rules(graph: Graph) -> dict[str, PartitionSpec]:
    """Path rules that replicate the state."""
    paths = [graph.values[v].name for v in graph.state]
    return {f"^{re.escape(path)}$": PartitionSpec() for path in paths}
