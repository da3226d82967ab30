"""The second rung: the collectives that Shardy inserts into a step, without any device.

Stock jaxlib contains Shardy's passes (openxla.org/shardy): propagation, then explicit reshards
between every pair of operations that disagree, then each reshard as collectives. Run on a lowered
step, they leave every collective that the plan causes, before the backend combines, splits or
overlaps them. This module reads their kind, mesh axes and bytes per device, with loops multiplied
out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

from executor.run.compile import CompiledStep
from planner import compat
from planner.graph.trace import Traced
from planner.plan.plan import Plan

PASSES = (
    "func.func(chlo-legalize-to-stablehlo)",  # Shardy has no rule for chlo, such as chlo.square
    "sdy-propagation-pipeline",
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "func.func(sdy-reshard-to-collectives)",
    "canonicalize",
    "cse",
)

KINDS = {
    "sdy.all_gather": ("all_gather", "gathering_axes"),
    "sdy.all_reduce": ("all_reduce", "reduction_axes"),
    "sdy.reduce_scatter": ("reduce_scatter", "reduce_scatter_axes"),
    "sdy.all_to_all": ("all_to_all", "params"),
    "sdy.collective_permute": ("permute", ""),
}
"""Per operation: our name of the kind, and the attribute that holds its axes."""


@dataclass(frozen=True, slots=True)
class Found:
    """One collective of a module.

    Attributes:
        kind: as in ``costmodels.Collective``.
        axes: mesh axes it runs over; empty for a permutation.
        count: how often it runs in a step, loops multiplied out.
        payload_bytes: per device: the gathered result (all_gather), the unreduced input
            (reduce_scatter), the tensor (all_reduce), the local shard (all_to_all, permute).
        source: its source line, as the compiler reports it.
    """

    kind: str
    axes: tuple[str, ...]
    count: float
    payload_bytes: float
    source: str


def lower_abstractly(
    traced: Traced, plan: Plan, *, donate_argnums: int | Sequence[int] = ()
) -> Any:
    """Lower a plan's step for its mesh without any device, as ``jax.jit(...).lower`` would.

    Raises:
        PlanMismatchError: the plan is for another step.
    """
    step = CompiledStep(traced, plan, donate_argnums=donate_argnums, abstract_mesh=True)
    inputs = traced.graph.inputs
    structs = [compat.as_struct(v.aval) for v in compat.body(traced.jaxpr).invars[: len(inputs)]]
    args = jax.tree_util.tree_unflatten(traced.in_tree, structs)
    return step.jitted.trace(*args).lower(lowering_platforms=("cpu",))


def shardy_collectives(lowered: Any) -> tuple[Found, ...]:
    """The collectives of a lowered step after Shardy's own partitioning decisions.

    Args:
        lowered: from ``jax.jit(...).lower(...)``, on real devices or an abstract mesh. Its module
            is not changed.

    Loops whose trip count can't be read count once.
    """
    module = lowered.compiler_ir("stablehlo")
    stablehlo.register_stablehlo_passes()
    with module.context:
        copy = module.operation.clone()
        passes = passmanager.PassManager.parse(f"builtin.module({','.join(PASSES)})")
        passes.enable_verifier(False)  # it runs after every pass and takes two thirds of the time
        passes.run(copy)
        reader = _Reader(copy)
        return tuple(reader.walk(reader.functions["main"], 1.0))


class _Reader:
    """Walks a module from ``main`` through calls, loops and branches."""

    def __init__(self, module: Any) -> None:
        self.functions: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        for op in module.regions[0].blocks[0].operations:
            if op.operation.name == "func.func":
                name = ir.StringAttr(op.attributes["sym_name"]).value
                self.functions[name] = op.operation
            elif op.operation.name == "sdy.mesh":
                for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(op.attributes["mesh"]).axes):
                    self.sizes[axis.name] = int(axis.size)

    def walk(self, op: Any, times: float) -> Iterator[Found]:
        """The collectives under an operation that runs ``times`` times."""
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    yield from self.visit(inner.operation, times)

    def visit(self, op: Any, times: float) -> Iterator[Found]:
        if op.name in KINDS:
            yield self.found(op, times)
        elif op.name == "func.call":
            callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
            yield from self.walk(self.functions[callee], times)
        elif op.name == "stablehlo.while":
            yield from self.walk(op, times * (while_trip_count(op) or 1))
        else:
            yield from self.walk(op, times)

    def found(self, op: Any, times: float) -> Found:
        """One collective; its payload follows from the sharding of its result."""
        kind, place = KINDS[op.name]
        refs = _axis_refs(str(op.attributes[place])) if place else ()
        out_refs = _axis_refs(str(op.attributes["out_sharding"]).split("replicated=")[0])
        nbytes = _tensor_bytes(op.results[0].type) / self.size(out_refs)
        if kind == "reduce_scatter":
            nbytes *= self.size(refs)
        return Found(kind, tuple(name for name, _ in refs), times, nbytes, _source(op))

    def size(self, refs: tuple[tuple[str, int], ...]) -> int:
        """Devices along some axes or parts of axes."""
        return math.prod(part or self.sizes[name] for name, part in refs)


def while_trip_count(op: Any) -> int | None:
    """How often a ``stablehlo.while`` runs: for a counter from zero up to a constant, as JAX
    lowers ``scan`` and ``fori_loop`` with known bounds; None for other loops."""
    block = op.regions[0].blocks[0]
    test = list(block.operations)[-1].operands[0].owner
    if getattr(test, "name", "") != "stablehlo.compare" or "LT" not in str(
        test.attributes["comparison_direction"]
    ):
        return None
    counter, limit = test.operands
    if not isinstance(counter, ir.BlockArgument):
        return None
    start = op.operands[ir.BlockArgument(counter).arg_number]
    first, last = _constant(start), _constant(limit, op)
    return None if first is None or last is None else last - first


def _constant(value: Any, loop: Any = None) -> int | None:
    """The number that a scalar value always has, if it is a constant."""
    if isinstance(value, ir.BlockArgument):
        argument: Any = ir.BlockArgument(value)
        inside = loop is not None and argument.owner == loop.regions[0].blocks[0]
        return _constant(loop.operands[argument.arg_number]) if inside else None
    maker = value.owner
    if maker.name not in ("stablehlo.constant", "sdy.constant"):
        return None
    match = re.search(r"dense<(-?\d+)>", str(maker.attributes["value"]))
    return int(match.group(1)) if match else None


def _axis_refs(text: str) -> tuple[tuple[str, int], ...]:
    """(axis name, size of the sub-axis or 0 for the whole axis) of every axis in an attribute."""
    matches = re.findall(r'"([^"]+)"(?::\(\d+\)(\d+))?', text)
    return tuple((name, int(part or 0)) for name, part in matches)


def _tensor_bytes(kind: Any) -> float:
    """Bytes of a whole tensor of an MLIR type; a bool takes one byte."""
    tensor = ir.RankedTensorType(kind)
    element = str(tensor.element_type)
    bits = re.search(r"\d+", element)
    width = max(1.0, int(bits.group()) / 8) if bits else 4.0
    if element.startswith("complex"):
        width *= 2
    return math.prod(tensor.shape) * width


def _source(op: Any) -> str:
    """``file.py:line`` of the innermost Python frame of an operation."""
    match = re.search(r'"([^"]+\.py)":(\d+)', str(op.location))
    return f"{match.group(1).rsplit('/', 1)[-1]}:{match.group(2)}" if match else ""
