"""Hand-written factor rules of contractions, convolutions, gathers and scatters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.rules.factor import FactorRule
from planner.rules.key import Shape
from planner.rules.labels import Label, build

Shapes = Sequence[Shape]
Params = Mapping[str, Any]


def dot_general(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    """The result has batch, then lhs, then rhs dimensions; contracted dimensions are summed."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    lhs: list[Label] = [("lhs", axis) for axis in range(len(ins[0]))]
    rhs: list[Label] = [("rhs", axis) for axis in range(len(ins[1]))]
    for n, (a, b) in enumerate(zip(lhs_batch, rhs_batch, strict=True)):
        lhs[a] = rhs[b] = ("batch", n)
    for n, (a, b) in enumerate(zip(lhs_contract, rhs_contract, strict=True)):
        lhs[a] = rhs[b] = ("contract", n)
    result: list[Label] = [("batch", n) for n in range(len(lhs_batch))]
    result += [label for label in lhs if label == ("lhs", lhs.index(label))]
    result += [label for label in rhs if label == ("rhs", rhs.index(label))]
    summed = [("contract", n) for n in range(len(lhs_contract))]
    return build([lhs, rhs], [result], ins, outs, reduction=summed)


def ragged_dot_general(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    """Groups of rows, each with a separate matrix (the groups stay whole), or groups of
    contracted rows, each with a separate result, as in the gradient of the former."""
    numbers = params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
    ragged, groups = list(numbers.lhs_ragged_dimensions), list(numbers.rhs_group_dimensions)
    if len(ragged) != 1 or len(ins[2]) != 1 or ragged[0] in left_batch:
        return None
    summed = ragged[0] in left_sum
    if bool(groups) == summed:
        return None
    left: list[Label] = [("left", axis) for axis in range(len(ins[0]))]
    right: list[Label] = [("right", axis) for axis in range(len(ins[1]))]
    for pairs in (zip(left_sum, right_sum, strict=True), zip(left_batch, right_batch, strict=True)):
        for a, b in pairs:
            right[b] = left[a]
    for axis in groups:
        right[axis] = None
    whole = left[ragged[0]]
    left = [None if label == whole else label for label in left]
    right = [None if label == whole else label for label in right]
    contracted = [left[axis] for axis in left_sum]
    result = [left[axis] for axis in left_batch]
    result += [left[a] for a in range(len(left)) if a not in (*left_sum, *left_batch)]
    result += [right[b] for b in range(len(right)) if b not in (*right_sum, *right_batch, *groups)]
    return build(
        [left, right, [None]],
        [[None, *result] if summed else result],
        ins,
        outs,
        reduction=[label for label in contracted if label is not None],
    )


def conv_general_dilated(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    """Shards batch, output features, and input features (summed), but no spatial dimensions."""
    numbers = params["dimension_numbers"]
    grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    lhs: list[Label] = [None] * len(ins[0])
    rhs: list[Label] = [None] * len(ins[1])
    result: list[Label] = [None] * len(outs[0])
    if params["batch_group_count"] == 1:
        lhs[numbers.lhs_spec[0]] = result[numbers.out_spec[0]] = "batch"
    if not grouped:
        rhs[numbers.rhs_spec[0]] = result[numbers.out_spec[1]] = "out"
        lhs[numbers.lhs_spec[1]] = rhs[numbers.rhs_spec[1]] = "in"
    return build([lhs, rhs], [result], ins, outs, reduction=["in"])


def _indexed(numbers: Any, indexed: Sequence[int], collapsed: Sequence[int]) -> int | None:
    """The one operand dimension that is indexed, as in taking rows; None in other cases."""
    batching = (
        *getattr(numbers, "operand_batching_dims", ()),
        *getattr(numbers, "start_indices_batching_dims", ()),
        *getattr(numbers, "scatter_indices_batching_dims", ()),
    )
    if batching or len(indexed) != 1 or list(indexed) != list(collapsed):
        return None
    return int(indexed[0])


def gather(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    """The rule for taking whole slices along one dimension; None for other gathers."""
    numbers = params["dimension_numbers"]
    axis = _indexed(numbers, numbers.start_index_map, numbers.collapsed_slice_dims)
    sizes = [1 if n == axis else size for n, size in enumerate(ins[0])]
    if axis is None or list(params["slice_sizes"]) != sizes or ins[1][-1] != 1:
        return None
    operand: list[Label] = [("slice", n) for n in range(len(ins[0]))]
    operand[axis] = "taken"
    indices: list[Label] = [("index", n) for n in range(len(ins[1]) - 1)]
    slices = iter([label for label in operand if label != "taken"])
    rest = iter(indices)
    offsets = set(numbers.offset_dims)
    result = [next(slices) if n in offsets else next(rest) for n in range(len(outs[0]))]
    return build([operand, [*indices, None]], [result], ins, outs, reduction=["taken"])


def scatter(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    """The rule for setting whole slices along one dimension, with unsharded indices, or None."""
    return _scatter(params, ins, outs, partial=False)


def scatter_add(params: Params, ins: Shapes, outs: Shapes) -> FactorRule | None:
    """Like ``scatter``, but the updates may be split and their effects summed."""
    return _scatter(params, ins, outs, partial=True)


def _scatter(params: Params, ins: Shapes, outs: Shapes, partial: bool) -> FactorRule | None:
    """The rule of a scatter, with or without partial results from the updates."""
    numbers = params["dimension_numbers"]
    axis = _indexed(numbers, numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims)
    if axis is None or ins[1][-1] != 1:
        return None
    operand: list[Label] = [("slice", n) for n in range(len(ins[0]))]
    indices: list[Label] = [("index", n) for n in range(len(ins[1]) - 1)]
    slices = iter([label for n, label in enumerate(operand) if n != axis])
    rest = iter(indices)
    window = set(numbers.update_window_dims)
    update = [next(slices) if n in window else next(rest) for n in range(len(ins[2]))]
    rows = [size for n, size in enumerate(ins[0]) if n != axis]
    if [size for n, size in enumerate(ins[2]) if n in window] != rows:
        return None
    if not partial:
        indices = [None for _ in indices]
        update = [label if n in window else None for n, label in enumerate(update)]
    return build(
        [operand, [*indices, None], update],
        [operand],
        ins,
        outs,
        reduction=[label for label in indices if label is not None],
    )
