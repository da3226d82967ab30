"""The factor rule that a user's function declares.

``jax.experimental.custom_partitioning`` lets a function (often one that wraps a kernel) declare how
its dimensions correspond: ``def_partition(sharding_rule="i k, k j -> i j")``. The planner can't
inspect such a function, but it reads the declaration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import BATCHING, custom_partitioning

from planner.rules.factor import FactorRule, RuleError
from planner.rules.key import EqnKey, Shape
from planner.rules.labels import Label, build

NAME = "custom_partitioning"
"""The primitive."""


def declared_rule(eqn: EqnKey) -> FactorRule | None:
    """The declared rule of a ``custom_partitioning`` equation; None if it has none.

    Reduction factors stay whole: the declaration does not say whether the function's partitioned
    form adds up partial results or leaves them to be added up outside.
    """
    if eqn.name != NAME:
        return None
    try:
        declared = _declaration(eqn)
        if declared is None:
            return None
        whole_factors = {*declared.need_replication_factors, *declared.permutation_factors}
        sizes: dict[Label, int] = dict(declared.factor_sizes)

        def labels(mappings: Sequence[Any], shapes: Sequence[Shape]) -> list[list[Any]]:
            labelled = []
            for mapping, shape in zip(mappings, shapes, strict=True):
                dims = _expanded(mapping, len(shape))
                labelled.append([_label(d, whole_factors) for d in dims])
            return labelled

        ins, outs = eqn.in_shapes, eqn.out_shapes
        operands = labels(declared.operand_mappings, ins)
        results = labels(declared.result_mappings, outs)
        rule = build(operands, results, ins, outs, sizes=sizes)
        rule.verify(ins, outs)
        return dataclasses.replace(rule, origin="declared")
    except Exception:  # the user's own function may raise, or declare what does not fit
        return None


def _declaration(eqn: EqnKey) -> Any:
    """The rule as an ``SdyShardingRule``; calls the declaration if it is a function."""
    declared = eqn.params.get("sharding_rule")
    if not callable(declared):
        return declared
    types = _types(eqn)
    count = len(eqn.in_avals)
    mesh = jax.sharding.AbstractMesh((), ())
    answer = declared(*eqn.params["static_args"], mesh, types[:count], types[count:])
    factors: dict[str, Any] = {}
    if isinstance(answer, tuple | list) and len(answer) == 2:
        answer, factors = answer
    if isinstance(answer, str):
        reader = custom_partitioning(lambda: None)
        reader.def_partition(partition=None, sharding_rule=answer, **factors)
        return reader.sharding_rule
    return answer


def _types(eqn: EqnKey) -> list[Any]:
    """MLIR types of the operands and results, as the declaring function would see them."""
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*eqn.in_avals, *eqn.out_avals)]
    lowered = jax.jit(lambda *args: args, keep_unused=True).trace(*structs)
    module = lowered.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    return [argument.type for argument in main.regions[0].blocks[0].arguments]


def _expanded(mapping: Sequence[Any], rank: int) -> list[Any]:
    """The dimensions of a mapping; a leading ``...`` stands for all that are missing."""
    dims = list(mapping)
    if not dims or not isinstance(dims[0], str) or not dims[0].startswith(BATCHING):
        if len(dims) != rank:
            raise RuleError(f"{len(dims)} dimensions declared for a value of rank {rank}")
        return dims
    group = dims[0][len(BATCHING) :] or "0"
    missing = rank - len(dims) + 1
    if missing < 0:
        raise RuleError(f"{len(dims) - 1} dimensions declared for a value of rank {rank}")
    return [(BATCHING, group, k) for k in range(missing)] + dims[1:]


def _label(dim: Any, whole_factors: set[str]) -> Label | list[Label]:
    """The label of a declared dimension; None where it must stay whole."""
    if isinstance(dim, str):
        return None if dim in whole_factors else dim
    if isinstance(dim, tuple) and dim and dim[0] == BATCHING:
        return dim
    return None if whole_factors.intersection(dim) else list(dim)
