"""Builds factor rules from a label for each dimension."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import pairwise

from planner.rules.factor import FactorRule, canonical_rule
from planner.rules.key import Shape

Label = Hashable
"""A factor's name; None for a dimension that is not to be sharded; a list for several factors."""


def build(
    operands: Sequence[Sequence[Label | list[Label]]],
    results: Sequence[Sequence[Label | list[Label]]],
    in_shapes: Sequence[Shape],
    out_shapes: Sequence[Shape],
    *,
    reduction: Collection[Label] = (),
    sizes: Mapping[Label, int] | None = None,
) -> FactorRule:
    """The rule in which dimensions of the same label are sharded alike.

    Args:
        operands: Per operand, the label of each dimension.
        results: The same for each result.
        in_shapes: The shape of each operand.
        out_shapes: The shape of each result.
        reduction: The labels that are reduced away.
        sizes: The sizes of the labels that do not have a dimension to themselves.
    """
    known = dict(sizes or {})
    for values, shapes in ((operands, in_shapes), (results, out_shapes)):
        for labels, shape in zip(values, shapes, strict=True):
            for label, size in zip(labels, shape, strict=True):
                if not isinstance(label, list) and label is not None:
                    known.setdefault(label, size)
    ids = {label: n for n, label in enumerate(known)}
    numbers = list(known.values())
    replicated: list[int] = []

    def factors(label: Label | list[Label], size: int) -> list[int]:
        if isinstance(label, list):
            return [ids[part] for part in label]
        if label is not None:
            return [ids[label]]
        replicated.append(len(numbers))
        numbers.append(size)
        return [replicated[-1]]

    def mapped(
        values: Sequence[Sequence[Label | list[Label]]], shapes: Sequence[Shape]
    ) -> list[list[list[int]]]:
        return [
            [factors(label, size) for label, size in zip(labels, shape, strict=True)]
            for labels, shape in zip(values, shapes, strict=True)
        ]

    mapped_operands = mapped(operands, in_shapes)
    mapped_results = mapped(results, out_shapes)
    return canonical_rule(
        mapped_operands,
        mapped_results,
        numbers,
        in_shapes,
        out_shapes,
        reduction=[ids[label] for label in reduction if label in ids],
        replicated=replicated,
        origin="fallback",
    )


def reshape_labels(
    before: Shape, after: Shape
) -> tuple[list[Label | list[Label]], list[Label | list[Label]], dict[Label, int]] | None:
    """The common factors of two shapes of the same elements, and the sizes of these factors.

    Dimensions of both shapes are cut at each other's boundaries. If a run of
    dimensions can't be cut this way, none of them can be sharded.
    """
    if math.prod(before) != math.prod(after) or 0 in before:
        return None
    strides, other = _strides(before), _strides(after)
    cuts = sorted({*strides, *other})
    common = sorted({*strides} & {*other})
    sizes: dict[Label, int] = {}
    for low, high in pairwise(common):
        inside = [cut for cut in cuts if low <= cut <= high]
        if all(major % minor == 0 for minor, major in pairwise(inside)):
            sizes.update({(minor, major): major // minor for minor, major in pairwise(inside)})

    def labels(shape: Shape) -> list[Label | list[Label]]:
        dims: list[Label | list[Label]] = []
        stride = math.prod(shape)
        for size in shape:
            top, stride = stride, stride // size
            pieces: list[Label] = list(pairwise(c for c in cuts if stride <= c <= top))
            dims.append(pieces[::-1] if all(piece in sizes for piece in pieces) else None)
        return dims

    return labels(before), labels(after), sizes


def _strides(shape: Shape) -> list[int]:
    """The stride of each dimension, with the number of elements last."""
    strides = [1]
    for size in reversed(shape):
        strides.append(strides[-1] * size)
    return strides
