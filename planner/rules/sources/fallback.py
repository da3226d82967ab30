"""Hand-written factor rules for common primitives, for use if Shardy gives none.

They need no lowering. They are never less strict than Shardy's rules, though
sometimes stricter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from planner.rules.factor import (
    FactorRule,
    RuleError,
    elementwise_rule,
    identity_rule,
    is_elementwise,
)
from planner.rules.key import Shape
from planner.rules.labels import Label, build, reshape_labels
from planner.rules.sources import contract

ELEMENTWISE: frozenset[str] = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos
    cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
    mul mulhi name ne neg nextafter not one_minus_square or polygamma population_count pow pvary
    random_gamma random_gamma_grad real reduce_precision regularized_incomplete_beta rem round rsqrt
    planner_shift select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh threefry2x32 xor zeta
    """.split()
)
"""Primitives that act on each element independently."""

IDENTITY: frozenset[str] = frozenset({"optimization_barrier", "device_put"})
"""Primitives that return each operand as the result at the same position."""

Shapes = Sequence[Shape]
Params = Mapping[str, Any]
_Family = Callable[[Params, Shapes, Shapes], FactorRule | None]


def pointwise_rule(name: str, in_shapes: Shapes, out_shapes: Shapes) -> FactorRule | None:
    """The rule of an elementwise primitive, None for other primitives or shapes."""
    if name not in ELEMENTWISE and name not in IDENTITY:
        return None
    return _pointwise(name, tuple(in_shapes), tuple(out_shapes))


@lru_cache(maxsize=65536)
def _pointwise(
    name: str, in_shapes: tuple[Shape, ...], out_shapes: tuple[Shape, ...]
) -> FactorRule | None:
    if name in ELEMENTWISE and is_elementwise(in_shapes, out_shapes):
        return _elementwise(in_shapes, out_shapes[0], len(out_shapes))
    if name in IDENTITY and list(in_shapes) == list(out_shapes):
        return identity_rule(in_shapes)
    return None


_elementwise = lru_cache(maxsize=65536)(elementwise_rule)
"""One rule object for all elementwise operations of the same shapes."""


def fallback_rule(
    primitive_name: str, params: Params, in_shapes: Shapes, out_shapes: Shapes
) -> FactorRule | None:
    """The hand-written rule of a primitive, None if there is none for it or its parameters."""
    rule = pointwise_rule(primitive_name, in_shapes, out_shapes)
    family = _FAMILIES.get(primitive_name)
    if rule is not None or family is None:
        return rule
    empty = any(0 in shape for shape in (*in_shapes, *out_shapes))
    try:
        rule = _of_what_is_left(primitive_name, in_shapes, out_shapes) if empty else None
        rule = rule or family(params, in_shapes, out_shapes)
        if rule is not None:
            rule.verify(in_shapes, out_shapes)
    except (RuleError, KeyError, AttributeError, TypeError, ValueError, IndexError):
        return None  # parameters or shapes of a form unknown here
    return rule


def _of_what_is_left(name: str, ins: Shapes, outs: Shapes) -> FactorRule | None:
    """The rule of an operation on some empty arrays, if the rest of it copies one array or makes a
    constant; None for other operations."""
    read = [k for k, s in enumerate(ins) if s and 0 not in s]
    written = [k for k, s in enumerate(outs) if s and 0 not in s]
    if len(written) != 1 or len(read) > 1:
        return None
    shape = outs[written[0]]
    if read and (name not in ("concatenate", "split", "pad") or ins[read[0]] != shape):
        return None

    def labels(shapes: Shapes) -> list[list[Label]]:
        rank = len(shape)
        return [
            [d if len(s) == rank and n == shape[d] else None for d, n in enumerate(s)]
            for s in shapes
        ]

    rule = build(labels(ins), labels(outs), ins, outs)
    return dataclasses.replace(rule, origin="elementwise")


def _kept(rank: int, lost: Sequence[int]) -> list[Label]:
    """Labels for all dimensions except ``lost``, which must not be sharded."""
    dropped = {axis % rank for axis in lost}
    return [None if axis in dropped else axis for axis in range(rank)]


def _broadcast_in_dim(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    operand = [
        axis if size == outs[0][axis] else None
        for axis, size in zip(params["broadcast_dimensions"], ins[0], strict=True)
    ]
    return build([operand], [range(len(outs[0]))], ins, outs)


def _transpose(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    return build([range(len(ins[0]))], [list(params["permutation"])], ins, outs)


def _reshape(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    if params.get("dimensions") is not None:
        return None
    labels = reshape_labels(ins[0], outs[0])
    if labels is None:
        return None
    before, after, sizes = labels
    return build([before], [after], ins, outs, sizes=sizes)


def _squeeze(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    gone = {axis % len(ins[0]) for axis in params["dimensions"]}
    result = [axis for axis in range(len(ins[0])) if axis not in gone]
    return build([range(len(ins[0]))], [result], ins, outs)


def _expand_dims(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    new = {axis % len(outs[0]) for axis in params["dimensions"]}
    operand = [axis for axis in range(len(outs[0])) if axis not in new]
    return build([operand], [range(len(outs[0]))], ins, outs)


def _reduce(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    axes = set(params["axes"])
    result = [axis for axis in range(len(ins[0])) if axis not in axes]
    return build([range(len(ins[0]))], [result], ins, outs, reduction=axes)


def _arg_reduce(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    operand = _kept(len(ins[0]), params["axes"])
    return build([operand], [[label for label in operand if label is not None]], ins, outs)


def _along(*names: str) -> _Family:
    """A family of operations along one or more axes, which stay whole; the others map across."""

    def family(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
        axes = next(params[name] for name in names if name in params)
        axes = (axes,) if isinstance(axes, int) else axes
        labels = _kept(len(outs[0]), axes)
        return build([labels] * len(ins), [labels] * len(outs), ins, outs)

    return family


def _top_k(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    axis = params.get("axis", params.get("reduction_dimension", -1))
    labels = _kept(len(ins[0]), [axis])
    return build([labels], [labels] * len(outs), ins, outs)


def _slice(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    labels = [axis if ins[0][axis] == size else None for axis, size in enumerate(outs[0])]
    return build([labels], [labels], ins, outs)


def _dynamic_slice(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    labels = [axis if ins[0][axis] == size else None for axis, size in enumerate(outs[0])]
    return build([labels, *_scalars(ins[1:])], [labels], ins, outs)


def _dynamic_update_slice(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    labels = [axis if outs[0][axis] == size else None for axis, size in enumerate(ins[1])]
    return build([labels, labels, *_scalars(ins[2:])], [labels], ins, outs)


def _scalars(shapes: Shapes) -> list[list[Label]]:
    """The labels of operands that must be scalars."""
    if any(shapes):
        raise RuleError("an index is not a scalar")
    return [[] for _ in shapes]


def _pad(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    config = params["padding_config"]
    labels = [axis if tuple(pad) == (0, 0, 0) else None for axis, pad in enumerate(config)]
    return build([labels, []], [labels], ins, outs)


def _iota(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    return build([], [range(len(outs[0]))], ins, outs)


def _fft(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    labels = _kept(len(ins[0]), [-1 - n for n in range(len(params["fft_lengths"]))])
    return build([labels], [labels], ins, outs)


def _batched(core: int) -> _Family:
    """A family that treats each matrix or vector (the last dimensions) independently."""

    def family(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
        batch = len(ins[0]) - core

        def labels(shape: Shape) -> list[Label]:
            if shape[:batch] != ins[0][:batch]:
                raise RuleError("the batch dimensions differ")
            return [axis if axis < batch else None for axis in range(len(shape))]

        return build([labels(s) for s in ins], [labels(s) for s in outs], ins, outs)

    return family


def _triangular_solve(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    """Columns of the right-hand side are solved independently; rows if not ``left_side``."""
    matrix, right = ins
    batch, left = len(matrix) - 2, params["left_side"]
    if matrix[:batch] != right[:batch]:
        raise RuleError("the batch dimensions differ")
    free: list[Label] = [None, len(right) - 1] if left else [len(right) - 2, None]
    solved: list[Label] = [*range(batch), *free]
    return build([[*range(batch), None, None], solved], [solved], ins, outs)


LINALG: frozenset[str] = frozenset(
    """
    cholesky cholesky_update eig eigh hessenberg householder_product lu ormqr geqrf geqp3 qr
    schur svd symmetric_product triangular_solve tridiagonal
    """.split()
)
"""Primitives that treat each matrix of a batch independently; library calls on most devices."""

ALONE: frozenset[str] = LINALG | {"fft", "top_k", "lu_pivots_to_permutation"}
"""Primitives that treat each row or matrix of a batch independently, but for which some compiler
gathers the operands even if the batch is split (XLA:CPU for transforms and selections, XLA:TPU for
decompositions). Dimensions of operands and results that a plan splits have the same index; a
triangular matrix lacks that of the columns that are solved for."""

_FAMILIES: dict[str, _Family] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "expand_dims": _expand_dims,
    **{f"reduce_{kind}": _reduce for kind in ("sum", "max", "min", "prod", "and", "or", "xor")},
    "argmax": _arg_reduce,
    "argmin": _arg_reduce,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "iota": _iota,
    "fft": _fft,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    **{f"cum{kind}": _along("axis") for kind in ("sum", "prod", "max", "min", "logsumexp")},
    "sort": _along("dimension"),
    "concatenate": _along("dimension"),
    "rev": _along("dimensions"),
    "split": _along("axis"),
    "dot_general": contract.dot_general,
    "ragged_dot_general": contract.ragged_dot_general,
    "conv_general_dilated": contract.conv_general_dilated,
    "gather": contract.gather,
    **{f"scatter{kind}": contract.scatter for kind in ("", "-mul", "-min", "-max")},
    **dict.fromkeys(("scatter-add", "scatter_add"), contract.scatter_add),
    **{name: _batched(2) for name in LINALG},
    "triangular_solve": _triangular_solve,
    "lu_pivots_to_permutation": _batched(1),
}

HAND_WRITTEN: frozenset[str] = frozenset(_FAMILIES)
"""Primitives that have a hand-written rule."""
