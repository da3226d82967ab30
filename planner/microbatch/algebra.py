"""The four classes of values, and how operations without a dimension of examples combine them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planner.annotate import MARK
from planner.microbatch.pairs import Node, Number, Operand, Pair
from planner.microbatch.refusals import coupled
from planner.rules.factor import FactorRule


class Class(IntEnum):
    """See ``planner.microbatch.classes``."""

    FREE = 0
    MAP = 1
    SUM = 2
    POST = 3


FREE, MAP, SUM, POST = Class

LINEAR = frozenset(
    "neg reshape transpose squeeze expand_dims broadcast_in_dim copy copy_p reduce_sum slice rev "
    f"split cumsum reduce_window_sum sharding_constraint {MARK} real imag".split()
)
"""Operations of one operand whose result for a sum is the sum of the results for its terms."""


def is_zero(operand: Operand, zeros: set[int]) -> bool:
    """Whether an operand is a literal zero, or among ``zeros``."""
    return are_zeros(operand.whole) if isinstance(operand, Number) else operand in zeros


def are_zeros(content: Any) -> bool:
    """Whether a literal or a constant contains only zeros; False for random keys."""
    key = jnp.issubdtype(jnp.result_type(content), jax.dtypes.prng_key)
    return not key and not np.any(np.asarray(content))


def algebra(node: Node, ins: Sequence[Class], zero: Sequence[bool], inside: bool) -> Class:
    """The class of the results of an operation without a dimension of examples.

    ``inside``: whether the operation is in a loop or a rematerialized block. There, a sum may be
    rounded before it is complete, like the results of products in that dtype. Elsewhere, the
    rounding can wait.
    """
    if set(ins) <= {FREE}:
        return FREE
    if POST in ins:
        return POST
    sums, name = ins.count(SUM), node.name
    if node.changed:
        return POST  # an integer that depends on the batch size is that of the whole batch
    rounds = name == "convert_element_type" and (_widens(node) or (inside and _floats(node)))
    if name in LINEAR or rounds:
        return SUM if len(ins) == 1 else POST
    if name in ("add", "sub", "add_any", "concatenate", "pad"):
        return SUM if all(c is SUM or z for c, z in zip(ins, zero, strict=True)) else POST
    if (name in ("mul", "dot_general") and sums == 1) or (
        name == "div" and ins[0] is SUM is not ins[1]
    ):
        return SUM
    return POST


def _widens(node: Node) -> bool:
    """Whether a conversion is exact: to a type of the same kind that is at least as wide."""
    before, after = node.whole.invars[0].aval.dtype, node.whole.outvars[0].aval.dtype
    return bool(np.promote_types(before, after) == after) and after.kind == before.kind


def _floats(node: Node) -> bool:
    """Whether a conversion is from one floating type to another."""
    ends = (node.whole.invars[0].aval.dtype, node.whole.outvars[0].aval.dtype)
    return all(jnp.issubdtype(d, jnp.floating) for d in ends)


GAMMA = "random_gamma"
"""A primitive that splits its one key by the number of elements, so that part of an array gets
different numbers."""


def draws(name: str) -> bool:
    """Whether an operation makes random numbers or random keys."""
    return name.startswith(("random_", "rng_", "threefry"))


def carried_class(node: Node, before: Class, after: Class, zero: bool) -> Class:
    """The class of a carry, from its classes before and after an iteration."""
    if before is after or (after is FREE and before is MAP):
        return before
    if before is SUM and after is FREE:
        raise coupled(node, "replaces a sum over examples by what is none")
    if before is FREE and after is SUM and not zero:
        raise coupled(node, "adds examples to a carry that does not start with zeros")
    if before is not FREE:
        raise coupled(node, "carries a sum over examples into examples")
    return after


def example_factor(pair: Pair, node: Node, rule: FactorRule) -> int | None:
    """The single factor of an operation that counts examples; None if there is none."""
    scaled: list[tuple[int, ...]] = []
    still: list[tuple[int, ...]] = []
    sides = [
        *((i, dims) for i, dims in zip(node.ins, rule.operands, strict=True)),
        *((o, dims) for o, dims in zip(node.outs, rule.results, strict=True)),
    ]
    for value, dims in sides:
        if isinstance(value, Number):
            continue
        grows = pair.scaled(value)
        for d, factors in enumerate(dims):
            (scaled if d in grows else still).append(factors)
    if not all(scaled):
        return None
    candidates = {dim[0] for dim in scaled if len(dim) == 1}
    candidates |= {dim[0] for dim in scaled if not candidates.intersection(dim)}
    if len(candidates) != 1:
        return None
    (factor,) = candidates
    # a minor factor may count them only where those major to it have one element
    fits = all(dim[0] == factor for dim in scaled) and not any(factor in dim for dim in still)
    return factor if fits else None
