"""Derives the role of each mesh axis from a plan, and the plan's strategy as one line.

The role of an axis is what it splits in the matrix products and convolutions of the step, weighted
by their FLOPs. In a product of an activation and a parameter (or a value computed from parameters
alone):

=============================================  =========
an axis that splits                            has role
=============================================  =========
the first dimension of the activation          data
another dimension that the parameter lacks     seq
a dimension of the parameter, summed or not    model
a dimension of both operands and the result    expert
the same, if it is the axis of stages          stage
=============================================  =========

Only those dimensions of the activation count that the parameter lacks. An axis with the role
``data`` or ``seq`` becomes ``fsdp`` if at least half of the bytes of the parameters are stored
sharded over it: such a product needs them whole along it. Without such products, the shardings of
the arguments determine the role.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.choose.simplest import idle_axes
from planner.graph.ir import PRODUCTS, SCALAR, Graph, Role
from planner.graph.labels.examples import example_dims
from planner.plan.contents.kinds import DATA, ENSEMBLE, EXPERT, FSDP, IDLE, MODEL, SEQ, WORDS
from planner.plan.extract import Extraction
from planner.request.axes.sequence import followed
from planner.request.state import StateRequest, find_state
from planner.spec import STAGE, MeshSpec
from planner.step.feeding import batch_of, fed_inputs

HALF = 0.5
"""Least share of the bytes of parameters, or of optimizer state, that an axis splits to count."""
SMALL = 0.03
"""An array of the batch is small below this share of the bytes of the largest one."""


@dataclass(frozen=True)
class Roles:
    """The role of each mesh axis, and ``zero``, the axes that shard optimizer state alone (ZeRO-1).
    ``batch``: number of shards of the batch; ``examples``: number of these along examples;
    ``rest``: least number of shards of its small arrays."""

    of: tuple[str, ...]
    zero: frozenset[int]
    batch: int
    examples: int
    rest: int


def roles_of(plan: Extraction) -> Roles:
    """The roles of a plan's axes."""
    priced, graph = plan.priced, plan.graph
    sizes = priced.mesh.sizes
    inner = example_dims(graph, priced.analysis.rules)
    votes = _votes(plan, inner)
    idle = idle_axes(priced, plan.choice)
    state = find_state(graph, StateRequest())
    fed = _batch(graph)
    roles, zero = [], set[int]()
    for k in range(len(sizes)):
        parameters = _share(plan, sorted(state.parameters.difference(fed)), k) >= HALF
        if sizes[k] == 1 or (k in idle and not parameters):
            roles.append(IDLE)
            continue
        role = max(votes[k], key=lambda r: votes[k][r]) if votes[k] else ""
        if role == EXPERT and priced.mesh.names[k] == STAGE:
            role = STAGE
        if role in (EXPERT, MODEL) and _is_of_members(plan, k):
            role = ENSEMBLE
        if role in (SEQ, ""):
            role = _cuts(plan, fed or graph.inputs, k, inner) or role or DATA
        if role in (DATA, SEQ) and parameters:
            role = FSDP
        elif role == DATA and _share(plan, sorted(state.others), k) >= HALF:
            zero.add(k)
        roles.append(role)
    return Roles(tuple(roles), frozenset(zero), *(_pieces(plan, fed, inner) if fed else (0, 0, 0)))


def renamed(mesh: MeshSpec, roles: Roles, named: frozenset[str]) -> MeshSpec:
    """The mesh with axes named by what they do; axes in ``named`` and those of one device stay as
    they are."""
    fixed = {n for n, size in zip(mesh.names, mesh.sizes, strict=True) if n in named or size == 1}
    taken, names = set(fixed), []
    for name, role in zip(mesh.names, roles.of, strict=True):
        if name not in fixed:
            name = next(n for n in (role, *(f"{role}{i}" for i in range(2, 9))) if n not in taken)
            taken.add(name)
        names.append(name)
    return MeshSpec(tuple(names), mesh.sizes, mesh.ones)


def strategy_text(sizes: Sequence[int], roles: Roles) -> str:
    """The plan's strategy in standard terms, such as ``FSDP over 16 x tensor parallel over 4; batch
    split 64 ways``."""
    if math.prod(sizes) == 1:
        return "one device"
    parts, idle = [], 1
    for k, (size, role) in enumerate(zip(sizes, roles.of, strict=True)):
        if role == IDLE:
            idle *= size
        else:
            words = f"{WORDS[role]} over {size}"
            parts.append(f"{words} (ZeRO-1)" if k in roles.zero else words)
    if idle > 1:
        parts.append(f"{idle} groups that repeat the same work" if parts else "no parallelism")
    batch = f"batch split {roles.batch} ways" if roles.batch > 1 else "batch whole on every device"
    split = math.prod(n for n, role in zip(sizes, roles.of, strict=True) if role in (DATA, FSDP))
    if not roles.batch:
        batch = "no argument holds a batch"
    elif roles.batch == 1 < split:
        batch = f"batch stored whole on every device, activations split {split} ways"
    if roles.examples < roles.batch:
        along = roles.batch // roles.examples
        batch += f", {roles.examples} by examples and {along} along other dimensions"
    if roles.rest < roles.batch:
        batch += f", small arrays {roles.rest} ways" if roles.rest > 1 else ", small arrays whole"
    return f"{' x '.join(parts)}; {batch}"


def with_names(plan: Extraction, mesh: MeshSpec) -> Extraction:
    """The plan on a mesh of the same sizes with other names."""
    return Extraction(dataclasses.replace(plan.priced, mesh=mesh), plan.choice)


def _votes(plan: Extraction, inner: Mapping[int, int]) -> list[dict[str, float]]:
    """Per axis, the FLOPs of products that it splits, by role; ``inner``: ``example_dims``."""
    graph, groups = plan.graph, plan.priced.analysis.groups
    light, places = _weights(graph), None
    if inner:
        rows = [v for v in graph.inputs if graph.values[v].has_examples and graph.values[v].splits]
        reach = (followed(groups, [v], inner.get(v, 0)) for v in rows)
        places = frozenset[tuple[int, int]]().union(*reach)
    live = graph.live_ops()
    votes: list[dict[str, float]] = [{} for _ in plan.priced.mesh.sizes]
    for op in graph.ops:
        entry = groups.op_layouts[op.index]
        if op.kind not in PRODUCTS or entry is None or not live[op.index]:
            continue
        if SCALAR in op.inputs[:2] or light[op.inputs[0]] == light[op.inputs[1]]:
            continue
        group, ins, outs = entry
        acts, weights = (ins[1], ins[0]) if light[op.inputs[0]] else (ins[0], ins[1])
        flops = graph.regions[op.region].weight * math.prod(
            groups.groups[group].sizes[f] for f in {*acts, *weights, *outs[0]} if f >= 0
        )
        for k, factor in enumerate(plan.rows["use"][group]):
            if factor < 0 or factor not in {*acts, *weights, *outs[0]}:
                continue
            if factor not in weights:
                rows = [f for f in acts if f >= 0 and f not in weights]
                first = rows[:1] == [factor] if places is None else (group, factor) in places
                role = DATA if first else SEQ
            else:
                apart = factor in acts and factor in outs[0]  # a batch dimension, as of experts
                channels = op.kind == "conv_general_dilated"  # of a depthwise convolution
                role = EXPERT if apart and not channels else MODEL
            votes[k][role] = votes[k].get(role, 0.0) + flops
    return votes


def _batch(graph: Graph) -> tuple[int, ...]:
    """The inputs that are new in every step, or the rows that a step samples. In a step without
    state, or one that trains nothing and whose results all look like state, the left operands of
    products."""
    fed = fed_inputs(graph)
    trains = any(graph.values[v].role is Role.PARAMETER for v in graph.state)
    if fed and (trains or len(graph.state) < len(graph.outputs)):
        return fed
    if not fed and (rows := batch_of(graph)) and all(graph.values[v].carried for v in rows):
        return rows
    left = {op.inputs[0] for op in graph.ops if op.kind in PRODUCTS}
    return tuple(v for v in graph.inputs if v in left) or fed


def _weights(graph: Graph) -> list[bool]:
    """Per value, whether it is computed from parameters, and otherwise only from constants,
    positions and random numbers."""
    fed = {*_batch(graph), *(v for v in graph.state if graph.values[v].role is Role.EXAMPLES)}
    out, plain = [False] * len(graph.values), [True] * len(graph.values)
    for value in graph.inputs:
        out[value] = value not in fed
        plain[value] = False
    for op in graph.ops:
        inputs = [v for v in op.inputs if v != SCALAR and graph.values[v].shape]
        light = any(out[v] for v in inputs) and all(out[v] or plain[v] for v in inputs)
        for v in op.outputs:
            out[v], plain[v] = light, all(plain[v] for v in inputs)
    return out


def _cuts(plan: Extraction, values: Sequence[int], axis: int, inner: Mapping[int, int]) -> str:
    """What an axis splits in some arguments: examples, other dimensions, or nothing."""
    name, cut = plan.priced.mesh.names[axis], ""
    for value in values:
        for port in ("use", "store"):
            dims = plan.value_sharding(value, port).dims
            if name in (*dims, ())[inner.get(value, 0)]:
                return DATA
            if any(name in dim for dim in dims):
                cut = SEQ
    return cut


def _is_of_members(plan: Extraction, axis: int) -> bool:
    """Whether an axis splits the first dimension of every parameter where it is used, all of one
    size: the parameters are those of several models that are trained together. (In a batch that is
    dealt to experts, the dimension of experts follows that of examples.)"""
    name, known = plan.priced.mesh.names[axis], plan.graph.values
    parameters = [v for v in plan.graph.state if known[v].role is Role.PARAMETER]
    members = {known[v].shape[:1] for v in parameters}
    dealt = (plan.value_sharding(v, "use").dims[1:] for v in fed_inputs(plan.graph))
    if any(name in dim for dims in dealt for dim in dims):
        return False
    return len(members) == 1 and all(
        name in (*plan.value_sharding(v, "use").dims, ())[0] for v in parameters
    )


def _share(plan: Extraction, values: Sequence[int], axis: int) -> float:
    """Share of the bytes of some arguments that an axis splits where they are stored."""
    name, total, split = plan.priced.mesh.names[axis], 0.0, 0.0
    for value in values:
        nbytes = plan.graph.values[value].nbytes
        total += nbytes
        split += nbytes * (name in plan.value_sharding(value).axes)
    return split / total if total else 0.0


def _pieces(
    plan: Extraction, values: Sequence[int], inner: Mapping[int, int]
) -> tuple[int, int, int]:
    """Numbers of shards, over the arrays of the batch that are as long as the largest one: the
    least of an array that is not ``SMALL``; how many of these are along examples; the least of a
    small array."""
    arrays = [v for v in values if plan.graph.values[v].shape]
    if not arrays:
        return 1, 1, 1
    mesh, known = plan.priced.mesh, plan.graph.values
    largest = known[max(arrays, key=lambda v: known[v].nbytes)]

    def pieces(value: int) -> tuple[int, int]:
        both = [plan.value_sharding(value, port) for port in ("store", "use")]
        most = max(both, key=lambda sharding: sharding.shards(mesh))
        along = (*most.dims, ())[inner.get(value, 0)]
        return most.shards(mesh), math.prod(mesh.size(a) for a in along)

    batch = [v for v in arrays if known[v].shape[0] == largest.shape[0]]
    small = [v for v in batch if known[v].nbytes < SMALL * largest.nbytes]
    most = min(pieces(v) for v in batch if v not in small)
    return *most, min((pieces(v)[0] for v in small), default=most[0])
