"""The schema of plan files: a reader for every field, and rules across fields. No jax.

A reader takes a JSON value and returns the field's value, or raises ``Misfit``. For a new field of
a plan's dataclass, add an entry to the table of that dataclass below; a field with a default may be
missing in the text. A rule takes a whole plan. Nothing here trusts the text: it may come from
another machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

from costmodels import MOST_DEVICES, ClusterError, Collective, parse_cluster
from planner.errors import RequestError
from planner.modes import MODES
from planner.plan.compiled.confirmed import CompiledRow, Confirmation
from planner.plan.compiled.lowering import Lowering
from planner.plan.contents.compute import ComputeRow
from planner.plan.contents.rows import (
    Activation,
    CollectiveRow,
    Constraint,
    DecisionRow,
    Leaf,
    MeshRow,
    MeshVerdict,
    PinRow,
    Prediction,
    SearchReport,
)
from planner.plan.plan import Plan
from planner.plan.readers import (
    Misfit,
    flag,
    many,
    number,
    one_of,
    perhaps,
    record,
    short,
    text,
    whole,
)
from planner.request.compiler_options import NAME, VALUE
from planner.spec import AXIS_NAME, PER_MICROBATCH, WHOLE, MeshSpec, Sharding

MEMORIES = ("device", "pinned_host", "unpinned_host")
SLOTS = ("from", "in", "made", "after", "out")

# ---- the fields ---------------------------------------------------------------------------

LINE = text()
AXIS = text(AXIS_NAME, "the name of a mesh axis: letters, digits and _")
DTYPE = text(r"[A-Za-z][\w<>.:,-]{0,99}", "the name of a dtype")
KIND = r"[^\s()\"'\\]+"
OPERATION = text(rf"{KIND}\(.*", "an operation, as in add(float32[8]) -> float32[8]")
SIZE = whole()
SHAPE = many(SIZE)
_ENTRIES = many(lambda value: (many(AXIS) if type(value) is list else perhaps(AXIS))(value))


def sharding(value: Any) -> Sharding:
    """Mesh axes per dimension, as in a PartitionSpec."""
    return Sharding.of(_ENTRIES(value))


def mesh(value: Any) -> MeshSpec:
    """Sizes by axis."""
    if type(value) is not dict or not value:
        raise Misfit(value, "an object with a size for every axis")
    try:
        names, sizes = [AXIS(name) for name in value], [whole(1)(n) for n in value.values()]
    except Misfit as error:
        error.path.append(", an axis,")
        raise
    return MeshSpec(tuple(names), tuple(sizes))


def leaf(value: Any) -> Leaf:
    """An argument or a result; its shardings have the rank of its shape."""
    row = _LEAF(value)
    rank = len(row.shape)
    used = None if row.used_as is None else Sharding.of(row.used_as.dims, rank)
    return dataclasses.replace(row, spec=Sharding.of(row.spec.dims, rank), used_as=used)


def activation(value: Any) -> Activation:
    """A value between operations; its sharding has the rank of its shape."""
    row = _ACTIVATION(value)
    return dataclasses.replace(row, spec=Sharding.of(row.spec.dims, len(row.shape)))


_LEAF = record(
    Leaf,
    path=LINE,
    shape=SHAPE,
    dtype=DTYPE,
    spec=sharding,
    nbytes_per_device=SIZE,
    used_as=perhaps(sharding),
    tied=flag,
    frozen=flag,
    rows=flag,
    memory=one_of(*MEMORIES),
    fetched=many(many(SIZE, 2)),
)
_ACTIVATION = record(
    Activation,
    name=LINE,
    shape=SHAPE,
    dtype=DTYPE,
    spec=sharding,
    nbytes_per_device=SIZE,
    source=LINE,
)
_CONSTRAINT = record(Constraint, op=SIZE, slot=one_of(*SLOTS), position=SIZE, spec=sharding)
_COLLECTIVE = record(
    CollectiveRow,
    kind=one_of(*get_args(Collective)),
    axes=many(AXIS),
    count=number(0),
    payload_bytes=number(0),
    time_s=number(0),
    value=LINE,
    source=LINE,
    cause=LINE,
)


def verdict(value: Any) -> MeshVerdict:
    """The outcome for a mesh; files written before November 2026 describe it in words."""
    words = LINE(value)
    if words.startswith("does not fit"):
        return MeshVerdict.UNFIT
    if words.startswith("pruned"):
        return MeshVerdict.PRUNED
    if words.endswith("x the chosen one's time"):
        return MeshVerdict.SLOWER
    return MeshVerdict(one_of(*MeshVerdict)(words))


_MESH_ROW = record(
    MeshRow,
    mesh=LINE,
    cost_s=number(),
    lower_bound_s=number(missing=-math.inf),
    peak_bytes=number(),
    verdict=verdict,
)
_PREDICTION = record(
    Prediction,
    compute_s=number(0),
    communication_s=number(0),
    overlapped_s=number(0),
    step_s=number(0),
    peak_bytes=number(0),
    limit_bytes=number(0, missing=math.inf),
    peak_holders=many(LINE),
    host_s=number(0),
    host_bytes=number(0),
    feed_s=number(0),
    device_bytes=number(0),
)
_SEARCH = record(
    SearchReport,
    name=LINE,
    cost_s=number(),
    lower_bound_s=number(missing=-math.inf),
    gap=number(missing=math.inf),
    reason=LINE,
)
_COMPUTE = record(ComputeRow, source=LINE, time_s=number(0))
_PIN = record(PinRow, pin=LINE, asked=LINE, how=LINE, arrays=SIZE, first=LINE)
_DECISION = record(DecisionRow, decision=LINE, option=LINE, op=SIZE, position=SIZE, value=LINE)
OPTION = text(NAME, "the name of an XLA option that names no file")
SETTING = text(VALUE, "a number or a word")


def compiler_option(value: Any) -> tuple[str, str]:
    """Name and value."""
    name, setting = many(LINE, 2)(value)
    return OPTION(name), SETTING(setting)


_LOWERING = record(
    Lowering, dimensions=many(whole(1)), staged=flag, joined=flag, scattered=flag, turned=flag
)
_COMPILED = record(
    CompiledRow,
    mesh=LINE,
    lowering=LINE,
    predicted_s=number(0),
    step_s=number(0),
    compute_s=number(0),
    wire_s=number(0),
    sent_bytes=number(0),
    peak_bytes=number(0),
    verdict=LINE,
)
_CONFIRMATION = record(Confirmation, compiler=LINE, rows=many(_COMPILED), note=LINE)
_PLAN = record(
    Plan,
    mode=one_of(*MODES),
    cluster=text(".{1,1000}", "the text of a cluster"),
    mesh=mesh,
    inputs=many(leaf),
    outputs=many(leaf),
    constraints=many(_CONSTRAINT),
    collectives=many(_COLLECTIVE),
    activations=many(activation),
    fallbacks=many(LINE),
    notes=many(LINE),
    meshes=many(_MESH_ROW),
    prediction=_PREDICTION,
    search=_SEARCH,
    op_table=many(OPERATION),
    op_index=many(SIZE),
    op_inputs=many(many(whole(-1))),
    pins=many(_PIN),
    strategy=LINE,
    idle=LINE,
    lowering=_LOWERING,
    confirmed=perhaps(_CONFIRMATION),
    compiler_options=many(compiler_option),
    decisions=many(_DECISION),
    apart=many(SIZE),
    microbatches=whole(1),
    replicas=whole(1),
    pad_batch=whole(0),
    examples=whole(0),
    statistics=one_of(WHOLE, PER_MICROBATCH),
    coupled=many(LINE),
    remat=LINE,
    recomputed=many(LINE),
    chunks=whole(1),
    chunked=many(LINE),
    stages=whole(1),
    staged=many(LINE),
    schedule=LINE,
    cuts=many(SIZE),
    order=many(LINE),
    compute=many(_COMPUTE),
)


# ---- rules across fields -------------------------------------------------------------------

Fault = tuple[str, str]
"""A place in the plan, and what is wrong there."""


def _shardings(plan: Plan) -> Iterator[Fault]:
    """Axes exist and occur once; they divide arguments, results and activations."""
    for field in ("inputs", "outputs", "activations"):
        for index, row in enumerate(getattr(plan, field)):
            for name in ("spec", "used_as"):
                spec = getattr(row, name, None)
                if spec is not None and (wrong := _misplaced(spec, row.shape, plan.mesh)):
                    yield f"{field}[{index}].{name}", wrong
    for index, c in enumerate(plan.constraints):
        if wrong := _misplaced(c.spec, None, plan.mesh):
            yield f"constraints[{index}].spec", wrong
    for index, collective in enumerate(plan.collectives):
        if wrong := _misplaced(Sharding((collective.axes,)), None, plan.mesh):
            yield f"collectives[{index}].axes", wrong


def _misplaced(spec: Sharding, shape: tuple[int, ...] | None, mesh: MeshSpec) -> str:
    """Why a sharding is not valid on the mesh, or an empty text."""
    if not spec.axes:
        return ""
    try:
        for axis in spec.axes:
            mesh.size(axis)
        spec.check((0,) * len(spec.dims) if shape is None else shape, mesh)
    except RequestError as error:
        return str(error)
    return ""


def _operations(plan: Plan) -> Iterator[Fault]:
    """Tables of operations have the same length; indices into them are in range."""
    count, kinds = len(plan.op_index), len(plan.op_table)
    if len(plan.op_inputs) != count:
        yield "op_inputs", f"{len(plan.op_inputs)} items for {count} operations in op_index"
        return
    if max(plan.op_index, default=-1) >= kinds:
        yield "op_index", f"names row {max(plan.op_index)}, op_table has {kinds}"
    taken: set[tuple[int, str, int]] = set()
    for index, row in enumerate(plan.decisions):
        if row.op >= count:
            yield f"decisions[{index}]", f"operation {row.op} of {count}"
    if max(plan.apart, default=-1) >= count:
        yield "apart", f"operation {max(plan.apart)} of {count}"
    for index, c in enumerate(plan.constraints):
        key, where = (c.op, c.slot, c.position), f"constraints[{index}]"
        if c.op >= count:
            yield where, f"operation {c.op} of {count}"
        elif c.slot in ("from", "in") and c.position >= len(plan.op_inputs[c.op]):
            yield where, f"operand {c.position} of {len(plan.op_inputs[c.op])}"
        elif key in taken:
            yield where, "the same place twice"
        taken.add(key)


def _choice(plan: Plan) -> Iterator[Fault]:
    """Exactly one of the meshes was chosen."""
    chosen = sum(row.verdict is MeshVerdict.CHOSEN for row in plan.meshes)
    if plan.meshes and chosen != 1:
        yield "meshes", f"{chosen} rows are 'chosen', expected one"


def _devices(plan: Plan) -> Iterator[Fault]:
    """The mesh has no more devices than the cluster, if the cluster's text gives their number."""
    most = MOST_DEVICES
    if ".toml" not in plan.cluster.lower():  # a file that a plan names is never opened
        with contextlib.suppress(ClusterError):  # else described in the planning program
            most = parse_cluster(plan.cluster).num_devices
    if plan.mesh.num_devices > most:
        yield "mesh", f"{short(plan.mesh.num_devices)} devices, {plan.cluster} has {most}"


RULES: tuple[Callable[[Plan], Iterator[Fault]], ...] = (_shardings, _operations, _choice, _devices)


def read_plan(raw: dict[str, Any]) -> Plan:
    """The plan in parsed JSON (without its format); raises ValueError with a one-line message."""
    try:
        plan = _PLAN(raw)
    except (Misfit, RequestError) as error:
        raise ValueError(str(error)) from error
    for rule in RULES:
        for where, wrong in rule(plan):
            raise ValueError(f"{where}: {wrong}")
    return plan
