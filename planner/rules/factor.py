"""Factor rules, the einsum-like legality rules of equations.

A rule names the iteration-space *factors* of an equation and says, for each
dimension of each operand and result, which factors it is made of, major to
minor. Sharding a factor means sharding every dimension that carries it alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.rules.key import Shape

Dim = tuple[int, ...]
"""The factors of one dimension, major to minor.

A minor factor can be sharded only where the factors major to it are fully sharded.
"""

Mapped = tuple[Dim, ...]
"""The dimensions of one operand or result."""

Site = tuple[str, int, int, int]
"""Where a factor occurs: operand or result, its index, the dimension, the stride in it."""


class RuleError(ValueError):
    """A factor rule breaks one of its invariants."""


def factor_name(index: int) -> str:
    """The letter of a factor: ``i`` to ``z``, then ``z_1``, ``z_2`` and so on."""
    last = ord("z") - ord("i")
    return chr(ord("i") + index) if index <= last else f"z_{index - last}"


@dataclass(frozen=True)
class FactorRule:
    """How the dimensions of an equation's operands and results correspond.

    Attributes:
        operands: Per operand and dimension, the factor ids, major to minor. A
            dimension of size one or zero has none and cannot be sharded.
        results: The same for each result.
        sizes: The size of each factor.
        reduction: Factors that are summed (or otherwise reduced) away. Sharding
            one leaves partial results that an all-reduce must combine.
        replicated: Factors that must not be sharded.
        origin: ``shardy`` (read from one operation), ``composed`` (from several),
            ``elementwise``, ``fallback`` (hand-written), ``declared`` or ``registered`` (by the
            user), ``grid`` (of a Pallas kernel), ``region`` (of a ``shard_map``) or ``opaque``.
    """

    operands: tuple[Mapped, ...]
    results: tuple[Mapped, ...]
    sizes: tuple[int, ...]
    reduction: frozenset[int]
    replicated: frozenset[int]
    origin: str

    def __str__(self) -> str:
        """The rule as text in a form close to Shardy's; ``1`` is a dimension without factors."""

        def values(items: tuple[Mapped, ...]) -> str:
            return ", ".join(
                "[" + ", ".join("".join(map(factor_name, dim)) or "1" for dim in dims) + "]"
                for dims in items
            )

        def names(ids: frozenset[int]) -> str:
            return "{" + ", ".join(map(factor_name, sorted(ids))) + "}"

        text = f"({values(self.operands)})->({values(self.results)})"
        if self.sizes:
            sizes = ", ".join(f"{factor_name(f)}={size}" for f, size in enumerate(self.sizes))
            text += " {" + sizes + "}"
        if self.reduction:
            text += f" reduction={names(self.reduction)}"
        if self.replicated:
            text += f" replicated={names(self.replicated)}"
        return text

    @property
    def shardable(self) -> frozenset[int]:
        """The factors that may be sharded."""
        return frozenset(range(len(self.sizes))) - self.replicated

    def dims(self) -> Iterator[tuple[str, int, int, Dim]]:
        """Every dimension as (``operand`` or ``result``, index, dimension, factors)."""
        for side, values in (("operand", self.operands), ("result", self.results)):
            for index, mapped in enumerate(values):
                for axis, dim in enumerate(mapped):
                    yield side, index, axis, dim

    def sites(self) -> dict[int, frozenset[Site]]:
        """Where each shardable factor occurs, with its stride within the dimension."""
        by_factor: dict[int, set[Site]] = {factor: set() for factor in self.shardable}
        for side, index, axis, dim in self.dims():
            stride = 1
            for factor in reversed(dim):
                if factor in by_factor:
                    by_factor[factor].add((side, index, axis, stride))
                stride *= self.sizes[factor]
        return {factor: frozenset(where) for factor, where in by_factor.items()}

    def verify(
        self,
        in_shapes: Sequence[Shape] | None = None,
        out_shapes: Sequence[Shape] | None = None,
    ) -> None:
        """Check the invariants, against the shapes too where they are given.

        Raises:
            RuleError: An invariant does not hold.
        """
        everything = frozenset(range(len(self.sizes)))
        if not self.reduction | self.replicated <= everything:
            raise RuleError(f"a marked factor does not exist: {self}")
        if self.reduction & self.replicated:
            raise RuleError(f"a factor is both reduction and replicated: {self}")
        if any(size < 2 for size in self.sizes):
            raise RuleError(f"a factor is smaller than two: {self}")
        used = [factor for _, _, _, dim in self.dims() for factor in dim]
        if list(dict.fromkeys(used)) != sorted(everything):
            raise RuleError(f"factors are not numbered in order of appearance: {self}")
        in_results = {f for mapped in self.results for dim in mapped for f in dim}
        if self.reduction & in_results:
            raise RuleError(f"a reduction factor appears in a result: {self}")
        if self.shardable - in_results - self.reduction:
            raise RuleError(f"a factor of operands only is not a reduction: {self}")
        for _, _, _, dim in self.dims():
            free = [factor in self.shardable for factor in dim]
            if sorted(free, reverse=True) != free:
                raise RuleError(f"a factor is minor to a replicated one: {self}")
        for mapped in self.operands + self.results:
            inside = [f for dim in mapped for f in dim if f in self.shardable]
            if len(set(inside)) != len(inside):
                raise RuleError(f"a factor is used twice by one value: {self}")
        for values, shapes in ((self.operands, in_shapes), (self.results, out_shapes)):
            if shapes is not None:
                self._verify_shapes(values, shapes)

    def _verify_shapes(self, values: tuple[Mapped, ...], shapes: Sequence[Shape]) -> None:
        """Check that the factors of each dimension multiply to its size."""
        if len(values) != len(shapes):
            raise RuleError(f"{len(shapes)} shapes for {len(values)} values: {self}")
        for mapped, shape in zip(values, shapes, strict=True):
            if len(mapped) != len(shape):
                raise RuleError(f"rank differs from shape {shape}: {self}")
            for dim, size in zip(mapped, shape, strict=True):
                if math.prod(self.sizes[f] for f in dim) != max(size, 1):
                    raise RuleError(f"factor sizes do not make up shape {shape}: {self}")


def _block_minor(dims: Sequence[Sequence[int]], blocked: set[int]) -> None:
    """Block every factor that is minor to a blocked one, until there are no more."""
    count = -1
    while count != len(blocked):
        count = len(blocked)
        for dim in dims:
            for major, minor in pairwise(dim):
                if major in blocked:
                    blocked.add(minor)


def canonical_rule(
    operands: Sequence[Sequence[Sequence[int]]],
    results: Sequence[Sequence[Sequence[int]]],
    sizes: Sequence[int],
    in_shapes: Sequence[Shape],
    out_shapes: Sequence[Shape],
    *,
    reduction: Collection[int] = (),
    replicated: Collection[int] = (),
    origin: str,
) -> FactorRule:
    """Bring a loosely written rule to canonical form, restricting it where it is unsound.

    Factors of size one are removed. If the factors of a dimension do not make up its
    size, the dimension gets a new replicated factor, and its old factors become
    replicated. These factors become replicated as well: factors used twice by one
    value, factors of operands only that are no reduction, and factors that are minor
    to a replicated one in some dimension (a dimension is sharded in contiguous
    blocks, so its major factors come first). Factors are renumbered in order of
    appearance.
    """
    sizes = list(sizes)
    blocked = set(replicated)

    def fit(mapped: Sequence[Sequence[int]], shape: Shape) -> list[list[int]]:
        if len(mapped) != len(shape):
            raise RuleError(f"{len(mapped)} dimensions mapped for shape {shape}")
        fitted = []
        seen: set[int] = set()
        for dim, size in zip(mapped, shape, strict=True):
            factors = [f for f in dim if sizes[f] > 1]
            if math.prod(sizes[f] for f in factors) != max(size, 1):
                blocked.update(factors)
                factors = []
                if size > 1:
                    factors = [len(sizes)]
                    blocked.add(len(sizes))
                    sizes.append(size)
            blocked.update(seen.intersection(factors))
            blocked.update(f for f in factors if factors.count(f) > 1)
            seen.update(factors)
            fitted.append(factors)
        return fitted

    fit_operands = [fit(m, s) for m, s in zip(operands, in_shapes, strict=True)]
    fit_results = [fit(m, s) for m, s in zip(results, out_shapes, strict=True)]
    in_operands = [f for mapped in fit_operands for dim in mapped for f in dim]
    in_results = [f for mapped in fit_results for dim in mapped for f in dim]
    reduced = set(reduction) - set(in_results)
    blocked.update(set(in_operands) - set(in_results) - reduced)
    _block_minor([dim for mapped in fit_operands + fit_results for dim in mapped], blocked)
    order = {f: n for n, f in enumerate(dict.fromkeys(in_operands + in_results))}

    def renumber(values: list[list[list[int]]]) -> tuple[Mapped, ...]:
        return tuple(tuple(tuple(order[f] for f in dim) for dim in mapped) for mapped in values)

    return FactorRule(
        operands=renumber(fit_operands),
        results=renumber(fit_results),
        sizes=tuple(sizes[f] for f in order),
        reduction=frozenset(order[f] for f in reduced - blocked if f in order),
        replicated=frozenset(order[f] for f in blocked if f in order),
        origin=origin,
    )


def is_elementwise(in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]) -> bool:
    """Whether the results have one shape, and each operand that shape or one that broadcasts.

    An operand broadcasts if it is a scalar, or differs only in dimensions of size one.
    """
    if not out_shapes or any(shape != out_shapes[0] for shape in out_shapes):
        return False
    return all(
        not shape
        or (
            len(shape) == len(out_shapes[0])
            and all(n in (1, size) for n, size in zip(shape, out_shapes[0], strict=True))
        )
        for shape in in_shapes
    )


def elementwise_rule(shapes_in: Sequence[Shape], shape_out: Shape, results: int = 1) -> FactorRule:
    """The rule of an elementwise operation with this many results of one shape.

    Raises:
        RuleError: An operand has another shape, and does not broadcast to the result's.
    """
    out_shapes = [shape_out] * results
    if not is_elementwise(shapes_in, out_shapes):
        raise RuleError(f"not elementwise: {list(shapes_in)} to {shape_out}")
    return canonical_rule(
        [[[f] if size > 1 else [] for f, size in enumerate(shape)] for shape in shapes_in],
        [[[f] for f in range(len(shape_out))]] * results,
        shape_out,
        shapes_in,
        out_shapes,
        origin="elementwise",
    )


def identity_rule(shapes: Sequence[Shape]) -> FactorRule:
    """The rule of an operation that returns each operand as the result at its position."""
    sizes = [size for shape in shapes for size in shape]
    numbers = iter(range(len(sizes)))
    mapped = [[[next(numbers)] for _ in shape] for shape in shapes]
    return canonical_rule(mapped, mapped, sizes, shapes, shapes, origin="elementwise")


def opaque_rule(in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]) -> FactorRule:
    """The rule that forbids all sharding: each dimension is a separate replicated factor."""
    sizes = [size for shape in (*in_shapes, *out_shapes) for size in shape]
    numbers = iter(range(len(sizes)))
    mapped = [[[next(numbers)] for _ in shape] for shape in (*in_shapes, *out_shapes)]
    count = len(in_shapes)
    return canonical_rule(
        mapped[:count],
        mapped[count:],
        sizes,
        in_shapes,
        out_shapes,
        replicated=range(len(sizes)),
        origin="opaque",
    )
