"""Composition of the rules of several operations into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.rules.factor import FactorRule, Mapped, canonical_rule
from planner.rules.key import Shape


class Unsupported(Exception):
    """There is no rule for an operation."""


@dataclass(frozen=True)
class RuleStep:
    """An operation on the way from arguments to results, with its rule.

    Values are any hashable objects that compare equal when they are the same value.
    """

    operands: Sequence[Any]
    results: Sequence[Any]
    rule: FactorRule


class _Factors:
    """Factors of several operations, some of which are identified with each other."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.reduction: set[int] = set()
        self.replicated: set[int] = set()
        self._parent: list[int] = []

    def add(self, sizes: Sequence[int]) -> int:
        """Add factors of these sizes and return the id of the first."""
        start = len(self.sizes)
        self.sizes += sizes
        self._parent += range(start, len(self.sizes))
        return start

    def find(self, factor: int) -> int:
        """The representative of a factor."""
        while self._parent[factor] != factor:
            self._parent[factor] = self._parent[self._parent[factor]]
            factor = self._parent[factor]
        return factor

    def meet(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Identify the factors of one dimension as seen by two operations.

        If the two divide the dimension differently, none of it can be sharded.
        """
        if [self.sizes[f] for f in one] == [self.sizes[f] for f in other]:
            for a, b in zip(one, other, strict=True):
                self._parent[self.find(b)] = self.find(a)
        else:
            self.replicated.update(one, other)


def compose(
    args: Sequence[Any],
    outs: Sequence[Any],
    step_of: Callable[[Any], RuleStep | None],
    shape_of: Callable[[Any], Shape],
) -> FactorRule:
    """The rule between arguments and results that several operations connect.

    Args:
        args: The values to stop at.
        outs: The values to walk back from.
        step_of: The operation that makes a value, None if no operation does.
        shape_of: The shape of a value.

    Raises:
        Unsupported: The walk ends at a value that is not an argument, or reaches
            an operation without a rule.
    """
    factors = _Factors()
    dims: dict[Any, list[list[int]]] = {}
    origins: list[str] = []

    def visit(values: Sequence[Any], mapped_values: tuple[Mapped, ...], start: int) -> None:
        for value, mapped in zip(values, mapped_values, strict=True):
            shifted = [[start + f for f in dim] for dim in mapped]
            for one, other in zip(dims.setdefault(value, shifted), shifted, strict=True):
                factors.meet(one, other)

    arguments = set(args)
    done: set[Any] = set()
    pending = list(outs)
    while pending:
        value = pending.pop()
        if value in arguments or value in done:
            continue
        step = step_of(value)
        if step is None:
            raise Unsupported("a value from elsewhere")
        start = factors.add(step.rule.sizes)
        factors.reduction.update(start + f for f in step.rule.reduction)
        factors.replicated.update(start + f for f in step.rule.replicated)
        visit(step.operands, step.rule.operands, start)
        visit(step.results, step.rule.results, start)
        done.update(step.results)
        pending += step.operands
        if step.operands:
            origins.append(step.rule.origin)

    def final(values: Sequence[Any]) -> list[list[list[int]]]:
        mapped_values = []
        for value in values:
            if value not in dims:
                shape = shape_of(value)
                start = factors.add(shape)
                dims[value] = [[start + axis] for axis in range(len(shape))]
            mapped_values.append([[factors.find(f) for f in dim] for dim in dims[value]])
        return mapped_values

    operands, results = final(args), final(outs)
    # if a factor is summed on the way and is still in a result, as when a mean is subtracted, the
    # operation mixes values along it
    summed = {factors.find(f) for f in factors.reduction}
    factors.replicated.update(f for value in results for dim in value for f in dim if f in summed)
    return canonical_rule(
        operands,
        results,
        factors.sizes,
        [shape_of(value) for value in args],
        [shape_of(value) for value in outs],
        reduction={factors.find(f) for f in factors.reduction},
        replicated={factors.find(f) for f in factors.replicated},
        origin=origins[0] if len(origins) == 1 else "composed",
    )
