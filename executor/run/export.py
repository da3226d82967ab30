"""Exports a plan as a Python module that needs nothing but jax.

Shardings inside the step can't be written as ``with_sharding_constraint`` in the model: most of
them are in the backward pass. The module therefore contains this package's own walk over the traced
step, its source copied, and a table of constraints by the number of the operation.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Sequence
from types import ModuleType

from executor.run import interpret
from planner import compat
from planner.annotate import MARKS
from planner.errors import RequestError
from planner.export.text import heading, mapping_text, mesh_text, quoted, spec_text, specs_text
from planner.graph import trace
from planner.graph.equal import REPEATABLE
from planner.graph.jaxpr import walk
from planner.plan.contents.rows import Constraint, Leaf
from planner.plan.plan import Plan
from planner.rules.kernels import regions
from planner.rules.kernels.known import NAMES as KERNELS
from planner.space.decisions.host_memory import DEVICE

WIDTH = 98

_COMPAT = (
    *("make_jaxpr", "body", "consts", "is_literal", "aval_shape", "rebuild", "as_struct"),
    *("Origin", "provenance", "evaluate_equation", "scan_counts", "is_ref", "to_memory"),
    *("in_host_memory", "placed_struct", "marks_places", "computed_on", "row_major"),
    "_of_no_mesh",
    "expanded",
)
_PARTS: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (trace, ("abstract",)),
    (walk, ("Body", "Loop", "is_opaque", "called", "loop_of", "branches_of", "Walk")),
    (regions, ("is_region",)),
    (
        interpret,
        (
            *("in_bounds", "Kept", "returned", "Evaluated", "is_slice", "Spread"),
            *("_Steps", "ConstrainedStep"),
        ),
    ),
)
"""The copied objects, by module."""

_SETS = ("REMAT", "CALLS", "LOOPS", "REGIONS", "STRUCTURED")

_IMPORTS = """\
from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType, SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental.compute_on import compute_on
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
"""

_USE = """\
    import {name}

    mesh = {name}.make_mesh()
    step = {name}.shard_step(train_step, state, batch, mesh=mesh{donate})
    state, batch = jax.device_put((state, batch), {name}.in_shardings(mesh, state, batch))
    state, metrics = step(state, batch)

"""

_INSIDE = """\
IN_SPECS and OUT_SPECS have arguments and results by path, as jax.tree_util.keystr writes it.
INSIDE holds {count} shardings of operands and results inside the step, by the number of the
operation in the order of tracing. Without them a compiler may choose other collectives than the
plan's. They hold for this step, these shapes and a jax that traces it alike; for any other one
shard_step raises ValueError, and the plan has to be made and exported again.
"""

_KERNELS = """\
What can't be said here: {count} kernels that the plan splits. They run on shards under meshwright;
here XLA gathers their operands, and every device does all of their work.
"""

_MARKED = """\
What can't be said here: marks by planner.shard, {count} in the traced step. A project without
meshwright writes jax.lax.with_sharding_constraint in their places.
"""

_DOOR = '''\
def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """The plan's mesh over the first devices present (or of `devices`), row-major."""
    sizes = tuple(MESH_AXES.values())
    count = int(np.prod(sizes))
    present = list(jax.devices() if devices is None else devices)
    if len(present) < count:
        raise ValueError(f"the mesh {MESH_AXES} needs {count} devices, got {len(present)}")
    return Mesh(np.asarray(present[:count]).reshape(sizes), tuple(MESH_AXES))


def in_shardings(mesh: Any, *args: Any) -> tuple[Any, ...]:
    """NamedShardings in a pytree like the arguments."""
    return _named(mesh, IN_SPECS, args, HOST_IN)


def out_shardings(mesh: Any, function: Callable[..., Any], *args: Any) -> Any:
    """NamedShardings in a pytree like the result of `function(*args)`."""
    return _named(mesh, OUT_SPECS, jax.eval_shape(function, *args), HOST_OUT)


def _named(mesh: Any, specs: Mapping[str, P], tree: Any, host: Any = ()) -> Any:
    def one(path: Any, x: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path)
        if name not in specs:
            raise ValueError(f"the plan has no sharding for {name}; export it again")
        return NamedSharding(mesh, specs[name], memory_kind="pinned_host" if name in host else None)

    return jax.tree_util.tree_map_with_path(one, tree)


def shard_step(
    function: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    donate_argnums: int | Sequence[int] = (),
) -> Any:
    """`function` under the plan, as one jax.jit function.

    Args:
        function: the step that the plan was made for.
        *args: its arguments; arrays or jax.ShapeDtypeStructs, only shapes are looked at.
        mesh: from `make_mesh`, or an equal one.
        donate_argnums: as for jax.jit.

    Raises:
        ValueError: the step is not the one that the plan was made for.
    """
    mesh = make_mesh() if mesh is None else mesh
    args = abstract(args)
    jaxpr, out_shape = make_jaxpr(function, args)
    leaves, in_tree = jax.tree_util.tree_flatten(args)
    out_tree = jax.tree_util.tree_structure(out_shape)
    shapes = [(x.shape, str(x.dtype)) for x in leaves]
    kinds = KINDS.split()
    held = {
        (int(op), slot, int(position)): NamedSharding(mesh, spec)
        for spec, places in INSIDE
        for op, slot, position in (place.split(".") for place in places.split())
    }
    ins = in_shardings(mesh, *args)
    outs = _named(mesh, OUT_SPECS, out_shape, HOST_OUT)
    flat_ins, flat_outs = (jax.tree_util.tree_leaves(x) for x in (ins, outs))
    spans = [HOST_IN.get(path) for path in IN_SPECS]
    here = [NamedSharding(mesh, x.spec) for x in flat_ins]
    left = [
        NamedSharding(mesh, x.spec) if path in HOST_OUT else None
        for path, x in zip(OUT_SPECS, flat_outs)
    ]

    def step(*given: Any) -> Any:
        flat, tree = jax.tree_util.tree_flatten(given)
        if tree != in_tree or [(x.shape, str(x.dtype)) for x in flat] != shapes:
            raise ValueError("arguments of other shapes than the step was made for")
        walk = ConstrainedStep(kinds, held)
        kept = [x if s is None else Kept(x, h, s) for x, h, s in zip(flat, here, spans)]
        results = returned(walk.run(jaxpr, kept), left)
        if walk.next != len(kinds):
            raise InternalError(f"the step has {walk.next} operations, expected {len(kinds)}")
        return jax.tree_util.tree_unflatten(out_tree, results)

    return jax.jit(step, in_shardings=ins, out_shardings=outs, donate_argnums=donate_argnums)
'''

_ERROR = '''\
class InternalError(ValueError):
    """The step is not the one that the plan was made for."""

    def __init__(self, text: str) -> None:
        super().__init__(f"the step is not the one that the plan was made for: {text}")
'''

_LOWERED = """\
The plan's lowering ({lowering}) is left out: shardings stand as one constraint each, and the
compiler may choose other collectives than under meshwright.
"""

_TURNED = """\
Transposes beside products stand where the program has them. Under meshwright they are moved to the
smallest of the product's arrays: attention over groups of heads may be faster and smaller there.
"""

_APART = """\
The plan keeps {count} gradients apart from their updates, which is left out, too: XLA:TPU may take
twice as long for these products.
"""

_OPTIONS = """\
The plan's compiler options are left out; pass them to jax.jit as compiler_options:
{options}
"""


def python_text(plan: Plan, name: str = "sharded") -> str:
    """The module's text.

    Args:
        plan: any plan whose decisions are shardings and host memory.
        name: the module's name, for its usage note; "sharded" replaces a name that is not an
            identifier.

    Raises:
        RequestError: the plan decides more than that.
    """
    if plan.decisions:
        more = ", ".join(dict.fromkeys(row.decision for row in plan.decisions))
        raise RequestError(f"this plan also decides {more}, which no exported module carries out")
    if plan.microbatches > 1:
        raise RequestError(
            f"this plan cuts the batch into {plan.microbatches} microbatches, which no exported "
            "module carries out; plan with microbatches=1"
        )
    if plan.remat != "none":
        raise RequestError(
            f"this plan computes parts of the forward pass again (remat {plan.remat}), which no "
            'exported module carries out; plan with remat="none"'
        )
    if plan.chunks > 1:
        raise RequestError(
            f"this plan computes the rows of large products in {plan.chunks} chunks, which no "
            "exported module carries out; plan with chunks=1"
        )
    if plan.stages > 1:
        raise RequestError(
            f"this plan has {plan.stages} pipeline stages, which no exported module carries out; "
            "plan with stages=1"
        )
    name = name if name.isidentifier() else "sharded"
    kinds = [plan.op_table[k].split("(", 1)[0] for k in plan.op_index]
    return "\n".join(
        [
            f'"""{_docstring(plan, name, kinds)}"""\n',
            _IMPORTS,
            f"MESH_AXES = {mesh_text(plan.mesh)}\n",
            specs_text("IN_SPECS", plan.inputs),
            specs_text("OUT_SPECS", plan.outputs),
            _host(plan),
            _inside(plan.constraints),
            _wrapped("KINDS", kinds),
            "",
            _DOOR,
            "",
            "# The walk over the traced step that puts INSIDE in.\n",
            f"MARKS = frozenset({sorted(MARKS)!r})",
            f"STAGES = {interpret.STAGES!r}",
            f"RESULTS = {interpret.RESULTS!r}",
            f"REPEATABLE = frozenset({sorted(REPEATABLE)!r})",
            f"BARRIER = {walk.BARRIER!r}",
            f"REGION = {regions.REGION!r}",
            *(f"{name} = frozenset(\n    {sorted(getattr(walk, name))!r}\n)" for name in _SETS),
            'V = TypeVar("V")',
            "Shardings = Mapping[tuple[int, str, int], NamedSharding]\n\n",
            _ERROR,
            "",
            "\n\n".join(_copied()),
        ]
    )


def _docstring(plan: Plan, name: str, kinds: Sequence[str]) -> str:
    tied = any(leaf.tied and leaf.path.startswith("[0]") for leaf in plan.inputs)
    parts = [
        heading(plan, "Mesh and shardings") + "\n",
        _USE.format(name=name, donate=", donate_argnums=0" if tied else ""),
        _INSIDE.format(count=len(plan.constraints)),
    ]
    if not plan.lowering.as_written:
        parts.append(_LOWERED.format(lowering=plan.lowering))
    if plan.lowering.turned:
        parts.append(_TURNED)
    if plan.apart:
        parts.append(_APART.format(count=len(plan.apart)))
    if plan.compiler_options:
        options = "\n".join(f"    {name}={value}" for name, value in plan.compiler_options)
        parts.append(_OPTIONS.format(options=options))
    split = {c.op for c in plan.constraints if any(c.spec.dims) and kinds[c.op] in KERNELS}
    if split:
        parts.append(_KERNELS.format(count=len(split)))
    marks = sum(kind == "planner_shard" for kind in kinds)
    if marks:
        parts.append(_MARKED.format(count=marks))
    return "\n".join(parts)


def _host(plan: Plan) -> str:
    """Literals: arguments in host memory with the operations that read each copy, and results."""
    spans = {x.path: _whole_pairs(x.fetched) for x in plan.inputs if x.memory != DEVICE}
    rows = "".join(f"    {quoted(path)},\n" for path in _away(plan.outputs))
    body = f"(\n{rows})" if rows else "()"
    kind = "dict[str, tuple[tuple[int, int], ...]]"
    return f"{mapping_text(f'HOST_IN: {kind}', spans)}HOST_OUT: tuple[str, ...] = {body}\n"


def _whole_pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return repr(tuple((int(first), int(last)) for first, last in pairs))


def _away(leaves: Iterable[Leaf]) -> list[str]:
    return [leaf.path for leaf in leaves if leaf.memory != DEVICE]


def _inside(constraints: Iterable[Constraint]) -> str:
    """A literal: (spec, places "operation.slot.position"), places in the order of the plan."""
    places: dict[str, list[str]] = {}
    for c in constraints:
        places.setdefault(spec_text(c.spec), []).append(f"{int(c.op)}.{c.slot}.{int(c.position)}")
    rows = "".join(
        f"    (\n        {spec},\n{textwrap.indent(_quoted(at, ' ' * 8), ' ' * 8)},\n    ),\n"
        for spec, at in places.items()
    )
    return f"INSIDE: tuple[tuple[P, str], ...] = (\n{rows})\n"


def _wrapped(name: str, words: list[str]) -> str:
    return f"{name} = (\n{textwrap.indent(_quoted(words, '    '), '    ')}\n)\n"


def _quoted(words: list[str], indent: str) -> str:
    """Words as adjacent string literals, one per line."""
    lines = textwrap.wrap(" ".join(words), WIDTH - len(indent) - 3, break_on_hyphens=False) or [""]
    return "\n".join(
        quoted(f"{line} " if k < len(lines) - 1 else line) for k, line in enumerate(lines)
    )


def _copied() -> list[str]:
    """Source of the functions that make up the walk."""
    source = [
        inspect.getsource(getattr(module, name))
        for module, names in ((compat, _COMPAT), *_PARTS)
        for name in names
    ]
    names = "".join(f"    {name}={name},\n" for name in _COMPAT)
    source.insert(len(_COMPAT), f"compat = SimpleNamespace(\n{names})\n")
    return source
