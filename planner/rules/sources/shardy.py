"""Factor rules read from Shardy's registry.

Equations are lowered together into one module, Shardy annotates every operation
with its sharding rule, and the rules of the operations an equation became are
composed into one rule between its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy

from planner.rules.compose import RuleStep, Unsupported, compose
from planner.rules.factor import FactorRule, RuleError, canonical_rule, identity_rule
from planner.rules.key import EqnKey, Shape

_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
_RULE = "sdy.sharding_rule"
_PLATFORMS = ("tpu", "cpu")
"""Lowering platforms, in the order in which they are tried. The first keeps most
operations whole; others call libraries or emit loops, for which there are no rules.
Lowering needs no such device."""

_FREE = frozenset({"stablehlo.constant", "stablehlo.iota", "stablehlo.create_token"})
"""Operations without operands, whose results may have any sharding."""

_BODIED = frozenset({"reduce", "reduce_window", "select_and_scatter", "composite"})
"""Primitives besides scatters that lower to one operation although they contain a jaxpr."""

_SKIPPED = ("callback", "infeed", "outfeed", "custom_call", "ffi_call", "debug_print")


def read_rules(eqns: Sequence[EqnKey]) -> list[FactorRule | None]:
    """The rule of each equation, or None if Shardy's registry does not give one."""
    rules: list[FactorRule | None] = [None] * len(eqns)
    wanted = [n for n, eqn in enumerate(eqns) if _readable(eqn)]
    _read_into(rules, eqns, wanted)
    return rules


def _readable(eqn: EqnKey) -> bool:
    """Whether an equation can be lowered outside its program."""
    avals = (*eqn.in_avals, *eqn.out_avals)
    if not eqn.out_avals or any(word in eqn.name for word in _SKIPPED):
        return False
    if not all(hasattr(aval, "shape") and hasattr(aval, "dtype") for aval in avals):
        return False
    if any(dim == 0 if isinstance(dim, int) else True for aval in avals for dim in aval.shape):
        return False
    if any(aval.dtype == jax.dtypes.float0 for aval in avals):
        return False
    if eqn.name in _BODIED or eqn.name.startswith("scatter"):
        return True
    return not any(
        isinstance(item, (jex_core.Jaxpr, jex_core.ClosedJaxpr))
        for value in eqn.params.values()
        for item in (value if isinstance(value, (tuple, list)) else (value,))
    )


def _read_into(
    rules: list[FactorRule | None], eqns: Sequence[EqnKey], wanted: Sequence[int]
) -> None:
    """Fill in the rules of the wanted equations, halving the batch if lowering fails."""
    if not wanted:
        return
    for platform in _PLATFORMS if len(wanted) == 1 else _PLATFORMS[:1]:
        try:
            batch_rules = _read_batch([eqns[n] for n in wanted], platform)
        except Exception:  # lowering code of any primitive may raise anything
            continue
        for n, rule in zip(wanted, batch_rules, strict=True):
            rules[n] = rule
        return
    if len(wanted) > 1:
        half = len(wanted) // 2
        _read_into(rules, eqns, wanted[:half])
        _read_into(rules, eqns, wanted[half:])


def _read_batch(eqns: Sequence[EqnKey], platform: str) -> list[FactorRule | None]:
    """Lower the equations in one function and read their rules."""
    arguments = [arg for eqn in eqns for arg in eqn.arguments()]
    traced: list[bool] = []

    def function(*args: Any) -> list[Any]:
        traced.clear()
        outputs: list[Any] = []
        left = iter(args)
        for eqn in eqns:
            inputs = list(islice(left, len(eqn.in_avals)))
            try:
                bind: Any = eqn.primitive.bind
                results = bind(*inputs, **eqn.params)
                results = list(results) if eqn.primitive.multiple_results else [results]
                traced.append([o.shape for o in results] == list(eqn.out_shapes))
            except Exception:  # tracing code of any primitive may raise anything
                traced.append(False)
            outputs += results if traced[-1] else []
        return outputs

    lowered = jax.jit(function, keep_unused=True).trace(*arguments)
    module = lowered.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse(_PIPELINE).run(module.operation)
        reader = _Reader(module)
        main = reader.functions["main"]
        block = main.regions[0].blocks[0]
        values, returned = list(block.arguments), list(_terminator(block).operands)
        count = sum(len(e.out_avals) for e, good in zip(eqns, traced, strict=True) if good)
        if len(values) != len(arguments) or len(returned) != count:
            raise Unsupported("the lowered function takes or returns other values")
        rules: list[FactorRule | None] = []
        ins, outs = iter(values), iter(returned)
        for eqn, good in zip(eqns, traced, strict=True):
            operands = list(islice(ins, len(eqn.in_avals)))
            yielded = list(islice(outs, len(eqn.out_avals) if good else 0))
            rules.append(reader.equation(eqn, operands, yielded) if good else None)
        return rules


def _terminator(block: Any) -> Any:
    """The last operation of a block."""
    return block.operations[len(block.operations) - 1]


def _shape(value: Any) -> Shape:
    """The shape of a value; tokens and the like count as scalars."""
    kind = value.type
    return tuple(kind.shape) if isinstance(kind, ir.RankedTensorType) else ()


class _Reader:
    """Reads the rules of the operations of an annotated module."""

    def __init__(self, module: Any) -> None:
        self.functions: dict[str, Any] = {
            ir.StringAttr(op.attributes["sym_name"]).value: op.operation
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        self._called: dict[str, FactorRule] = {}

    def equation(self, eqn: EqnKey, args: list[Any], outs: list[Any]) -> FactorRule | None:
        """The rule between an equation's arguments and results, None if there is none."""
        try:
            rule = compose(args, outs, self._step, _shape)
            rule = _logical(rule, eqn)
            rule.verify(eqn.in_shapes, eqn.out_shapes)
        except (Unsupported, RuleError):
            return None
        return rule

    def _step(self, value: Any) -> RuleStep | None:
        """The operation that makes a value, with its rule; None for a block argument."""
        if isinstance(value, ir.BlockArgument):
            return None
        op = value.owner.operation
        operands, results = list(op.operands), list(op.results)
        return RuleStep(operands, results, self._rule(op, operands, results))

    def _rule(self, op: Any, operands: list[Any], results: list[Any]) -> FactorRule:
        """The rule of one operation."""
        in_shapes = [_shape(value) for value in operands]
        out_shapes = [_shape(value) for value in results]
        if _RULE in op.attributes:
            return _registered(op.attributes[_RULE], in_shapes, out_shapes)
        if op.name in _FREE:
            return _free(out_shapes)
        if op.name == "func.call":
            return self._function(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
        if op.name == "stablehlo.composite":
            return self._function(ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value)
        if op.name == "chlo.top_k":
            return _top_k(in_shapes, out_shapes)
        if op.name == "stablehlo.optimization_barrier":
            return identity_rule(in_shapes)
        if op.name.startswith("chlo.") and len({*in_shapes, *out_shapes}) == 1:
            return _pointwise(in_shapes, out_shapes)
        raise Unsupported(op.name)

    def _function(self, name: str) -> FactorRule:
        """The rule of a called function."""
        if name not in self._called:
            block = self.functions[name].regions[0].blocks[0]
            args, outs = list(block.arguments), list(_terminator(block).operands)
            self._called[name] = compose(args, outs, self._step, _shape)
        return self._called[name]


def _registered(
    attribute: Any, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]
) -> FactorRule:
    """The rule in a sharding rule attribute."""
    rule = sdy.OpShardingRuleAttr(attribute)

    def mapped(tensors: Any) -> list[list[list[int]]]:
        return [
            [list(sdy.DimMappingAttr(dim).factor_indices) for dim in tensor.dim_mappings]
            for tensor in map(sdy.TensorMappingAttr, tensors)
        ]

    return canonical_rule(
        mapped(rule.operand_mappings),
        mapped(rule.result_mappings),
        list(rule.factor_sizes),
        in_shapes,
        out_shapes,
        reduction=list(rule.reduction_factors),
        replicated=[
            *rule.need_replication_factors,
            *rule.permutation_factors,
            *rule.blocked_propagation_factors,
        ],
        origin="shardy",
    )


def _free(out_shapes: Sequence[Shape]) -> FactorRule:
    """The rule of an operation without operands."""
    rank = len(out_shapes[0])
    return canonical_rule(
        [], [[[f] for f in range(rank)]], out_shapes[0], [], out_shapes, origin="shardy"
    )


def _top_k(in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]) -> FactorRule:
    """The rule of a top-k along the last dimension, which the registry lacks."""
    full = [[f] for f in range(len(in_shapes[0]))]
    last = [len(full) - 1]
    return canonical_rule(
        [full], [full, full], in_shapes[0], in_shapes, out_shapes, replicated=last, origin="shardy"
    )


def _pointwise(in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]) -> FactorRule:
    """The rule of a mathematical function that the registry does not list."""
    full = [[f] for f in range(len(in_shapes[0]))]
    return canonical_rule(
        [full] * len(in_shapes),
        [full] * len(out_shapes),
        in_shapes[0],
        in_shapes,
        out_shapes,
        origin="shardy",
    )


def _logical(rule: FactorRule, eqn: EqnKey) -> FactorRule:
    """The rule without trailing dimensions that represent one element, as in random keys."""
    operands = [m[: len(s)] for m, s in zip(rule.operands, eqn.in_shapes, strict=True)]
    results = [m[: len(s)] for m, s in zip(rule.results, eqn.out_shapes, strict=True)]
    if tuple(operands) == rule.operands and tuple(results) == rule.results:
        return rule
    return canonical_rule(
        operands,
        results,
        rule.sizes,
        eqn.in_shapes,
        eqn.out_shapes,
        reduction=rule.reduction,
        replicated=rule.replicated,
        origin=rule.origin,
    )
