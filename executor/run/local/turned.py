"""Products beside transposes: the transpose is moved to the smallest of the product's arrays.

XLA:GPU multiplies matrices. Where a product has several free dimensions, a transpose of its result
(or of an operand) is a separate kernel that reads and writes the whole array, and arrays that a
loop stacks are transposed again as a whole between the loops. The scores of grouped-query attention
are such a result, and their gradients such an operand: hundreds of times larger than the queries,
whose dimensions can be reordered instead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from planner import compat
from planner.graph.trace import Traced
from planner.plan.behind import RESULTS, read_by_transposes

Order = tuple[int, ...]
Place = tuple[int, str, int]
"""Operation, slot, position."""
Numbers = tuple[tuple[Order, Order], tuple[Order, Order]]
"""Contracting and batch dimensions of a product's operands."""

WORTH = 2
"""How many times more elements the array that is no longer transposed must have than each array
that may be transposed instead."""


@dataclass(frozen=True)
class Turned:
    """How a product is computed without the transpose of a large array.

    Attributes:
        numbers: the dimension numbers of the product that is computed.
        firsts: per operand, the permutation that is applied to it first; empty: none.
        swapped: whether the second operand comes first.
        last: the permutation that is applied to the result; empty: none.
        transpose: the operation that transposes the result, which is then already done; -1: none.
        operand: the operand that is read as it is before a transpose; -1: none.
        order: the permutation of that transpose.
    """

    numbers: Numbers
    firsts: tuple[Order, Order] = ((), ())
    swapped: bool = False
    last: Order = ()
    transpose: int = -1
    operand: int = -1
    order: Order = ()

    def places(self, op: int) -> Iterator[tuple[Place, Order]]:
        """Places whose shardings are permuted for product ``op``, and how: for each dimension of
        the array that is computed, the dimension of the array in the plan."""
        if self.transpose >= 0:
            yield from (((op, slot, 0), self.order) for slot in RESULTS)
            yield from (((self.transpose, slot, 0), self.order) for slot in ("from", "in"))
        elif self.operand >= 0:
            back = tuple(self.order.index(d) for d in range(len(self.order)))
            yield from (((op, slot, self.operand), back) for slot in ("from", "in"))


def turned_products(
    traced: Traced, held: Collection[Place], apart: Collection[int]
) -> dict[int, Turned]:
    """The products of a step beside transposes of an array that is larger than the others.

    Args:
        traced: the step.
        held: places with a sharding; a transpose of an operand must have none.
        apart: operations that stay unchanged.
    """
    graph, eqns, bodies = traced.graph, traced.eqns, traced.bodies
    products: dict[int, Turned] = {}
    for op, transpose in read_by_transposes(graph).items():
        product, turning = eqns[op], eqns[transpose]
        if not _plain(product) or turning is None or {op, transpose} & set(apart):
            continue
        how = of_result(product, tuple(turning.params["permutation"]), transpose)
        if how is not None and bodies[op] == bodies[transpose]:
            products[op] = how
    done = {how.transpose for how in products.values()}
    busy = {op for op, _, _ in held} | done | set(apart)
    for node in graph.ops:
        product = eqns[node.index]
        if node.kind != "dot_general" or node.index in {*products, *apart} or not _plain(product):
            continue
        for k, value in enumerate(node.inputs):
            producer = graph.values[value].op if value >= 0 else -1
            turning = eqns[producer] if producer >= 0 else None
            whole = producer < 0 or graph.ops[producer].kind != "transpose" or producer in busy
            order: Order = ()
            if not whole and turning is not None and bodies[producer] == bodies[node.index]:
                order = tuple(turning.params["permutation"])
            how = of_operand(product, k, order)
            if how is not None:
                products[node.index] = how
                break
    return products


def of_result(product: Any, order: Order, transpose: int = -1) -> Turned | None:
    """A product that computes the transposed result directly; None if that does not pay, or is
    impossible."""
    shapes = [a.shape for a in product.in_avals]
    if math.prod(product.out_avals[0].shape) < WORTH * max(map(math.prod, shapes)):
        return None
    sums, batch = numbers_now = product.params["dimension_numbers"]
    free = _free(numbers_now, shapes)
    count, left = len(batch[0]), len(free[0])
    if set(order[:count]) != set(range(count)):
        return None
    sides = [[d for d in order[count:] if (d < count + left) == first] for first in (True, False)]
    swapped = list(order[count:]) == sides[1] + sides[0]
    if not swapped and list(order[count:]) != sides[0] + sides[1]:
        return None
    wanted = [
        [free[0][d - count] for d in sides[0]],
        [free[1][d - count - left] for d in sides[1]],
    ]
    firsts: list[Order] = []
    numbers: list[tuple[Order, Order]] = []
    for k in (0, 1):
        shared = tuple(batch[k][d] for d in order[:count])
        turn = (*shared, *wanted[k], *sums[k]) if wanted[k] != sorted(wanted[k]) else ()
        firsts.append(turn)
        places = [tuple(turn.index(d) if turn else d for d in x) for x in (sums[k], shared)]
        numbers.append((places[0], places[1]))
    if swapped:
        numbers.reverse()
    whole: Numbers = ((numbers[0][0], numbers[1][0]), (numbers[0][1], numbers[1][1]))
    return Turned(whole, (firsts[0], firsts[1]), swapped, (), transpose, -1, order)


def of_operand(product: Any, operand: int, order: Order = ()) -> Turned | None:
    """A product that reads a large operand as it lies in memory: as it is before a transpose
    ``order``, and on the side where XLA:CPU has the dimensions that batched products sum (the last
    dimensions of the first operand, the first of the second). None if that does not pay."""
    shapes = [a.shape for a in product.in_avals]
    others = math.prod(shapes[1 - operand]), math.prod(product.out_avals[0].shape)
    if math.prod(shapes[operand]) < WORTH * max(others):
        return None
    numbers, place = product.params["dimension_numbers"], order or range(len(shapes[operand]))
    free = _free(numbers, shapes)
    pairs = []  # summed dimensions, then batch dimensions, in the operand's order
    for dims in numbers:
        dim_pairs = sorted(zip((place[d] for d in dims[operand]), dims[1 - operand], strict=True))
        pairs.append((tuple(d for d, _ in dim_pairs), tuple(d for _, d in dim_pairs)))
    free_dims = sorted(place[d] for d in free[operand])
    summed = pairs[0][0]
    ends = bool(free_dims and summed) and free_dims[-1] < summed[0]
    begins = bool(free_dims and summed) and summed[-1] < free_dims[0]
    swapped = bool(numbers[1][0]) and (begins if operand == 0 else ends)
    if not (order or swapped):
        return None
    names = [("batch", k) for k in range(len(pairs[1][0]))]
    sides = [[(k, d) for d in free[k]] for k in (0, 1)]
    sides[operand] = [(operand, d) for d in free_dims]
    product_dims = [*names, *sides[int(swapped)], *sides[int(not swapped)]]
    wanted = [
        *(("batch", pairs[1][0].index(place[d])) for d in numbers[1][operand]),
        *((0, place[d] if operand == 0 else d) for d in free[0]),
        *((1, place[d] if operand == 1 else d) for d in free[1]),
    ]
    last = tuple(product_dims.index(x) for x in wanted)
    back = operand == int(swapped)  # the large operand comes first
    whole = [(a, b) if back else (b, a) for a, b in pairs]
    return Turned(
        (whole[0], whole[1]),
        swapped=swapped,
        last=() if last == tuple(range(len(last))) else last,
        operand=operand if order else -1,
        order=order,
    )


def _plain(product: Any) -> bool:
    """Whether a product does not fix the sharding of its result."""
    return product is not None and product.params.get("out_sharding") is None


def _free(numbers: Numbers, shapes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Per operand, its free dimensions: neither contracted nor batch."""
    sums, batch = numbers
    return [
        [d for d in range(len(shape)) if d not in (*sums[k], *batch[k])]
        for k, shape in enumerate(shapes)
    ]


def multiplied(eqn: Any, ins: Sequence[Any], how: Turned) -> Any:
    """The product of ``ins``, where the operand at ``how.operand`` is not transposed."""
    firsts = zip(ins, how.firsts, strict=True)
    ins = [jax.lax.transpose(x, order) if order else x for x, order in firsts]
    ins = ins[::-1] if how.swapped else ins
    turned = eqn.replace(params={**eqn.params, "dimension_numbers": how.numbers})
    (product,) = compat.evaluate_equation(turned, ins)
    return jax.lax.transpose(product, how.last) if how.last else product


def permuted(
    specs: Mapping[Place, tuple[Any, ...]], products: Mapping[int, Turned]
) -> dict[Place, tuple[Any, ...]]:
    """Shardings by place, one entry per dimension, permuted for the arrays that are computed."""
    out = dict(specs)
    for op, how in products.items():
        for place, order in how.places(op):
            if place in out:
                out[place] = tuple(out[place][d] for d in order)
    return out
