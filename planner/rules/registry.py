"""The factor rule of any first-order equation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence

from planner.rules.factor import FactorRule, opaque_rule
from planner.rules.kernels.known import is_kernel, kernel_rule
from planner.rules.kernels.regions import REGION, is_region
from planner.rules.kernels.registered import when_registered
from planner.rules.key import EqnKey
from planner.rules.sources.declared import declared_rule
from planner.rules.sources.fallback import ELEMENTWISE, LINALG, fallback_rule, pointwise_rule
from planner.rules.sources.shardy import read_rules

__all__ = ["ELEMENTWISE", "RuleBook", "rules_for"]


class RuleBook:
    """Finds rules and caches them.

    Elementwise equations are recognized by name and shapes. Kernels have registered rules, or the
    rules of their grids (Pallas). Shardy gives the rules of most others, in one batch. Without a
    rule from Shardy, a hand-written one applies, or the one that the user's function declares.
    Without any rule, the equation can't be sharded.
    """

    def __init__(self, *, use_shardy: bool = True) -> None:
        self._use_shardy = use_shardy
        self._known: dict[Hashable, FactorRule] = {}

    def rules_for(self, items: Sequence[EqnKey]) -> list[FactorRule]:
        """The rule of each equation, in order."""
        rules_or_keys: list[FactorRule | Hashable] = []
        missing: dict[Hashable, EqnKey] = {}
        for item in items:
            rule = pointwise_rule(item.name, item.in_shapes, item.out_shapes)
            if rule is not None:
                rules_or_keys.append(rule)
                continue
            signature = item.signature()
            rules_or_keys.append(signature)
            if signature not in self._known:
                missing.setdefault(signature, item)
        self._look_up(missing)
        return [r if isinstance(r, FactorRule) else self._known[r] for r in rules_or_keys]

    def _look_up(self, missing: dict[Hashable, EqnKey]) -> None:
        """Find and cache the rules of new equations."""
        signatures = [
            signature
            for signature, item in missing.items()
            if self._use_shardy
            and item.name not in LINALG
            and not (item.name == REGION or is_kernel(item))
        ]
        read = dict(zip(signatures, read_rules([missing[s] for s in signatures]), strict=True))
        for signature, item in missing.items():
            ins, outs = item.in_shapes, item.out_shapes
            rule = kernel_rule(item) if is_kernel(item) else None
            rule = rule or read.get(signature)
            rule = rule or fallback_rule(item.name, item.params, ins, outs) or declared_rule(item)
            whole = opaque_rule(ins, outs)
            if is_region(item):
                whole = dataclasses.replace(whole, origin="region")
            self._known[signature] = _guarded(item, rule or whole)

    def forget(self) -> None:
        """Clear the cache."""
        self._known.clear()


def _guarded(item: EqnKey, rule: FactorRule) -> FactorRule:
    """Replicate what XLA partitions wrongly (each seen with plain sharding constraints on CPU).

    * The indexed dimensions of a scatter at one index: the partitioner merges the slice that
      shards the operand with the scatter's own slice and loses the clamp between them.
    * The reduced dimensions of ``reduce_xor``, and of ``reduce_or`` and ``reduce_and`` of integers:
      XLA has no all-reduce that combines the parts.
    * Dimensions that a pad changes (the gradient of a strided slice is one), and those that a
      slice steps through: wrong shards or a failed verification of the module.
    * Spatial dimensions that a convolution sums over (the gradient of a kernel): the partitioner
      adds up the wrong shards where an axis of the mesh splits neither operand (jax 0.10 to 0.12).
    """
    if rule.reduction and not _combines(item):
        replicated = rule.replicated | rule.reduction
        return dataclasses.replace(rule, replicated=replicated, reduction=frozenset())
    dims: Sequence[int] = ()
    values = (*rule.operands[:1], *rule.results[:1])
    if item.name == "conv_general_dilated":
        dims, values = item.params["dimension_numbers"].rhs_spec[2:], rule.operands[1:2]
    elif item.name.startswith("scatter") and math.prod(item.in_shapes[1][:-1]) == 1:
        numbers = item.params.get("dimension_numbers")
        dims = list(getattr(numbers, "scatter_dims_to_operand_dims", ()))
    elif item.name == "pad" and 0 not in item.in_shapes[0]:
        dims = [d for d, change in enumerate(item.params["padding_config"]) if any(change)]
    elif item.name == "slice" and item.params.get("strides"):
        dims = [d for d, step in enumerate(item.params["strides"]) if step != 1]
    whole = {f for value in values for d in dims for f in value[d]}
    if not whole:
        return rule
    return dataclasses.replace(
        rule, replicated=rule.replicated | whole, reduction=rule.reduction - whole
    )


def _combines(item: EqnKey) -> bool:
    """Whether an all-reduce can combine the parts of a reduction."""
    if item.name in ("reduce_or", "reduce_and"):
        return str(item.in_avals[0].dtype) == "bool"
    return item.name != "reduce_xor"


_BOOK = RuleBook()
when_registered(_BOOK.forget)


def rules_for(items: Sequence[EqnKey]) -> list[FactorRule]:
    """The rule of each first-order equation, cached for the life of the process."""
    return _BOOK.rules_for(items)
