"""The user's kernels on shards: ``shard_map`` of the same kernel with a shorter grid.

XLA can't partition a kernel and would gather its operands. Where the plan splits a kernel, each
device runs it on its own shard. The same applies to transforms, selections and decompositions
(``ALONE``), whose batches compilers gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from executor.run.local.checked import check_rule
from executor.run.local.specs import Spec, partition_spec
from planner import compat
from planner.graph.trace import Traced
from planner.plan.contents.rows import Constraint
from planner.rules.kernels.known import on_shards
from planner.rules.kernels.regions import REGION
from planner.rules.kernels.registered import registered
from planner.rules.key import EqnKey
from planner.rules.sources.fallback import ALONE


@dataclass(frozen=True)
class OnShards:
    """How a kernel is split: the shardings of its operands and results, and its unused results."""

    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]
    unused: frozenset[int]

    def run(self, eqn: Any, ins: Sequence[Any], mesh: Any) -> list[Any]:
        """Run the kernel and return its results; all mesh axes are manual."""
        outs = [compat.aval_shape(v.aval) for v in eqn.outvars]
        rule = registered(eqn)
        if rule is not None:
            check_rule(rule, eqn)
        local_outs = [_local(shape, s, mesh) for shape, s in zip(outs, self.outs, strict=True)]

        def local(*shards: Any) -> list[Any]:
            shapes = [x.shape for x in shards]
            if rule is not None and rule.local is not None:
                return jax.tree.leaves(rule.local(*shards))
            params = on_shards(eqn, shapes, local_outs, self.unused)
            return compat.evaluate_equation(eqn.replace(params=params), shards)

        specs = tuple(partition_spec(s) for s in self.ins)
        out_specs = [partition_spec(s) for s in self.outs]
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return list(run(*map(jax.numpy.asarray, ins)))


def _local(shape: Sequence[int], spec: Spec, mesh: Any) -> tuple[int, ...]:
    """The shape of a shard."""
    out = list(shape)
    for d, entry in enumerate(spec):
        for axis in entry:
            out[d] //= mesh.shape[axis]
    return tuple(out)


def _solved(eqn: EqnKey, split: Spec) -> OnShards | None:
    """How to split a triangular solve whose right-hand side is split; the matrix is split along its
    batch dimensions only."""
    if not any(split):
        return None
    batch = len(split) - 2
    return OnShards(((*split[:batch], (), ()), split), (split,), frozenset())


def _alone(eqn: EqnKey, split: Spec) -> OnShards | None:
    """How to split an operation of ``ALONE`` whose first operand is split; None if that operand is
    not split, or if another operand or a result lacks a split dimension."""
    wanted = {d for d, entry in enumerate(split) if entry}
    first = eqn.in_shapes[0]
    shapes = (*eqn.in_shapes, *eqn.out_shapes)
    if not wanted or any(s[d : d + 1] != first[d : d + 1] for s in shapes for d in wanted):
        return None
    specs = [tuple(split[d] for d in range(len(shape))) for shape in shapes]
    count = len(eqn.in_shapes)
    return OnShards(tuple(specs[:count]), tuple(specs[count:]), frozenset())


def kernels_on_shards(
    traced: Traced,
    known: Mapping[tuple[int, str, int], Constraint],
    spell: Callable[[Constraint, int], Spec],
) -> dict[int, OnShards]:
    """The kernels that a plan splits, by operation.

    Args:
        traced: the step.
        known: the plan's constraints by operation, slot and position.
        spell: from a constraint and a number of dimensions to a sharding in the axes of the jax
            mesh.
    """
    kernels = {}
    for op in traced.graph.ops:
        eqn = traced.eqns[op.index]
        if op.kind in ALONE and eqn is not None:
            solves = op.kind == "triangular_solve"
            split = known.get((op.index, "in", int(solves)))
            how = _solved if solves else _alone
            alone = split and how(eqn, spell(split, len(eqn.in_shapes[int(solves)])))
            if alone:
                kernels[op.index] = alone
            continue
        if not op.kernel or op.kind == REGION or eqn is None:
            continue

        def specs(
            slot: str, shapes: Sequence[Sequence[int]], at: int = op.index
        ) -> tuple[Spec, ...]:
            said = [known.get((at, slot, k)) for k in range(len(shapes))]
            return tuple(
                ((),) * len(shape) if c is None else spell(c, len(shape))
                for c, shape in zip(said, shapes, strict=True)
            )

        ins, outs = specs("in", eqn.in_shapes), specs("made", eqn.out_shapes)
        if any(entry for spec in (*ins, *outs) for entry in spec):
            kernels[op.index] = OnShards(ins, outs, eqn.unused)
    return kernels
