"""Finds the degree d of every value of a step: it grows as the d-th power of the example count.

If every example of a batch occurred twice, a sum over them would double (d = 1), a mean would stay
the same (d = 0), and the cotangent of one example of a mean would halve (d = -1). The degree of a
per-microbatch value therefore determines the value of the whole batch: a sum of sums, or a mean of
means.

The degree of a result follows from those of its operands. Sums over examples, and numbers that
differ between the two traces, such as the 1/B of a mean, change it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planner import compat
from planner.graph.jaxpr.walk import (
    BARRIER,
    STRUCTURED,
    branches_of,
    called,
    loop_of,
    stays_whole,
)
from planner.microbatch.algebra import are_zeros, draws
from planner.microbatch.pairs import Node, Number, Operand, Pair, pair

Degree = float
"""A power; ``ANY`` for zeros, which stay zeros; or ``UNKNOWN``."""
ANY, UNKNOWN = math.inf, math.nan

ALIKE = frozenset(
    "add sub add_any max min select_n clamp concatenate pad dynamic_update_slice rem "
    "reduce_max reduce_min reduce_sum cumsum cummax cummin sort neg abs reshape transpose squeeze "
    "expand_dims broadcast_in_dim copy copy_p slice dynamic_slice gather rev split "
    "convert_element_type reduce_precision real imag sharding_constraint reduce_window_sum "
    "reduce_window_max reduce_window_min reduce_window "
    "scatter scatter-add scatter_add top_k complex conj psum".split()
)
"""Operations whose results have the common degree of their floating-point operands."""
PRODUCTS = frozenset("mul dot_general conv_general_dilated ragged_dot ragged_dot_general".split())
POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1.0 / 3.0, "square": 2.0}
SUMS = frozenset(
    "reduce_sum dot_general conv_general_dilated ragged_dot ragged_dot_general scatter-add "
    "scatter_add".split()
)
"""Operations that sum over the dimensions that they remove."""
TINY = 1e-3
"""Largest literal that counts as added to avoid a division by zero; for integers, 1."""
EXACT = 1e-3
"""Tolerance for the power of a number that differs between the traces, a multiple of 1/2."""
PICKS = frozenset("gather slice dynamic_slice split squeeze top_k sort".split())
"""Operations that select some of the examples, without summing."""
PLACES = frozenset("pad dynamic_update_slice concatenate".split())
"""Operations, besides scatters, that place values among others."""
COMPARES = frozenset("eq ne lt le gt ge".split())


def same(degrees: Iterable[Degree]) -> Degree:
    """The common degree, zeros aside; UNKNOWN if degrees differ."""
    distinct = {d for d in degrees if not math.isinf(d)}
    if any(math.isnan(d) for d in distinct) or len(distinct) > 1:
        return UNKNOWN
    return distinct.pop() if distinct else ANY


class Degrees:
    """Computes degrees; ``count`` is the number of microbatches."""

    def __init__(self, count: int) -> None:
        self.count = count

    def of(self, step: Pair, ins: Sequence[Degree], zeros: set[int]) -> dict[int, Degree]:
        """The degree of each value of a pair, from those of its inputs."""
        known = dict(zip(step.inputs, ins, strict=True))
        for v, x in step.consts.items():
            known[v] = ANY if v in zeros or are_zeros(x) else 0.0
        numbers: dict[int, Number] = {}
        places = set(step.consts)  # values that depend on positions and constants alone
        for node, live in zip(step.nodes, step.live(), strict=True):
            placed = places.issuperset(node.values) and not draws(node.name)
            if placed:
                places.update(node.outs)
            if not live:
                known.update(dict.fromkeys(node.outs, UNKNOWN))
            elif number := _folded(node, numbers):
                numbers[node.outs[0]] = number
                known[node.outs[0]] = self.number(number)
            elif self.uneven(step, node, placed):
                known.update(dict.fromkeys(node.outs, UNKNOWN))
            else:
                degrees = self.node(step, node, [self.read(i, known) for i in node.ins])
                known.update(zip(node.outs, degrees, strict=True))
        return known

    @staticmethod
    def uneven(step: Pair, node: Node, placed: bool) -> bool:
        """Whether an operation treats examples differently: it selects a fixed number of them,
        overwrites some rows, or compares the positions of examples or of pairs of examples."""
        before = max((len(step.scaled(v)) for v in node.values), default=0)
        after = max((len(step.scaled(o)) for o in node.outs), default=0)
        adds = node.name.startswith(("scatter-add", "scatter_add"))
        if node.name in COMPARES and placed:
            return after > 0
        if node.name in PICKS:
            return after < before
        if adds:  # the transpose of selecting a fixed number
            return bool(after and not step.scaled(node.values[-1]))
        if node.name in PLACES or node.name.startswith("scatter"):
            grows = [bool(step.scaled(v)) for v in node.values]
            return (any(grows) and not all(grows[:1] if node.name == "pad" else grows)) or (
                bool(after) and not any(grows)
            )
        return False

    def read(self, operand: Operand, known: dict[int, Degree]) -> Degree:
        """The degree of an operand."""
        return self.number(operand) if isinstance(operand, Number) else known[operand]

    def number(self, number: Number) -> Degree:
        """The degree of a literal, from its values in the two traces."""
        if not jnp.issubdtype(jnp.result_type(number.whole), jnp.number):
            return 0.0
        whole, small = (np.asarray(x) for x in (number.whole, number.small))
        if not np.any(whole) and not np.any(small):
            return ANY
        if equal(whole, small):
            return 0.0
        if whole.size != 1:
            return UNKNOWN
        large, less = float(whole.item()), float(small.item() or math.nan)
        if not 0.0 < large / less < math.inf:
            return UNKNOWN
        power = math.log(large / less) / math.log(self.count)
        if abs(2 * power - round(2 * power)) <= EXACT:
            return round(2 * power) / 2
        for sign, a, b in ((1.0, large, less), (-1.0, 1 / large, 1 / less)):
            rest = (a - self.count * b) / (self.count - 1)
            if abs(abs(rest) - 1.0) <= EXACT:  # off by one: 15 of 16 examples, 3 of 4
                return sign
        return UNKNOWN

    def node(self, step: Pair, node: Node, ins: list[Degree]) -> list[Degree]:
        """The degrees of the results of an equation."""
        name, count = node.name, len(node.outs)
        if name == BARRIER and len(ins) == count:
            return ins
        if name == "scan":
            return self.scan(node, ins)
        if name == "cond":
            return self.cond(node, ins)
        if stays_whole(node.whole):
            whole, small = called(node.whole), called(node.small)
            if whole is not None and small is not None:
                return self.body(whole.jaxpr, small.jaxpr, ins)
        if name in PRODUCTS:
            degree = self.product(step, node, ins)
        elif name == "div":
            degree = ANY if math.isinf(ins[0]) else ins[0] - ins[1]
        elif name in POWERS or name == "integer_pow":
            power = POWERS.get(name) or float(node.small.params["y"])
            degree = ins[0] if math.isinf(ins[0]) else power * ins[0]
        elif name == "sign":
            degree = 0.0
        elif name in ("select_and_scatter_add", "select_and_gather_add"):
            degree = ins[0]  # of the values that go to the positions of the maxima
        elif name == "select_n" and math.isnan(ins[0]):
            degree = UNKNOWN
        elif name in ("scatter-add", "scatter_add"):
            degree = same([ins[0], ins[2] + self.lost(step, node)])
        elif name in ALIKE:
            degree = same(self.floating(node, ins)) + self.lost(step, node)
        elif name in COMPARES:  # of values of one degree, such as with an expert's capacity
            degree = UNKNOWN if math.isnan(same(ins)) else 0.0
        else:  # any other function preserves degree 0, unless it joins examples
            joins = self.joins(step, node)
            degree = 0.0 if same(ins) in (0.0, ANY) and not joins else UNKNOWN
        return [self.typed(v, degree) for v in node.whole.outvars]

    @staticmethod
    def joins(step: Pair, node: Node) -> bool:
        """Whether a result has fewer example dimensions than an operand."""
        before = max((len(step.scaled(v)) for v in node.values), default=0)
        return any(len(step.scaled(o)) < before for o in node.outs)

    @staticmethod
    def typed(var: Any, degree: Degree) -> Degree:
        """The degree of a variable; 0 for booleans, which do not grow."""
        number = jnp.issubdtype(dtype_of(var), jnp.number)
        return degree if number or math.isnan(degree) else 0.0

    @staticmethod
    def floating(node: Node, ins: list[Degree]) -> list[Degree]:
        """The degrees of operands of the results' kind, without indices and conditions."""
        kinds = [jnp.issubdtype(dtype_of(v), jnp.inexact) for v in node.whole.outvars]
        if node.name in ("gather", "dynamic_slice"):
            return ins[:1]
        kind = jnp.inexact if any(kinds) and node.name != "convert_element_type" else jnp.generic
        return [
            degree
            for degree, operand, var in zip(ins, node.ins, node.whole.invars, strict=True)
            if jnp.issubdtype(dtype_of(var), kind) and not _guards(node.name, operand)
        ] or ins

    @staticmethod
    def lost(step: Pair, node: Node) -> float:
        """Number of example dimensions that an operation sums over."""
        if node.name == "cumsum":  # positions among all examples
            return float(any(node.whole.params["axis"] in step.scaled(v) for v in node.values))
        if node.name not in SUMS:
            return 0.0
        if node.name == "reduce_sum":
            return float(len(set(step.scaled(node.values[0])) & set(node.whole.params["axes"])))
        if node.name == "dot_general":
            (left, _), _ = node.whole.params["dimension_numbers"]
            shapes = [compat.aval_shape(e.invars[0].aval) for e in (node.whole, node.small)]
            return float(sum(shapes[0][d] != shapes[1][d] for d in left))
        grows = [step.scaled(v) for v in node.values]
        return float(any(grows) and not any(step.scaled(o) for o in node.outs))

    def product(self, step: Pair, node: Node, ins: list[Degree]) -> Degree:
        """The degree of a product: the sum of those of its operands, plus ``lost``."""
        floats = ins[:2]
        return ANY if any(map(math.isinf, floats)) else sum(floats) + self.lost(step, node)

    def body(self, whole: Any, small: Any, ins: Sequence[Degree]) -> list[Degree]:
        """The degrees of the results of a body."""
        inner = pair(whole, small)
        known = self.of(inner, ins, set())
        return [self.read(o, known) for o in inner.outputs]

    def scan(self, node: Node, ins: list[Degree]) -> list[Degree]:
        """The degrees of a loop's results. A carry has the degree that its initial value shares
        with its value after each iteration."""
        loop, twin = loop_of(node.whole), loop_of(node.small)
        (whole,), (small,) = loop.bodies, twin.bodies
        begin, end = loop.consts, loop.consts + loop.carries
        now = list(ins)
        for _ in range(2 * loop.carries + 2):
            outs = self.body(whole.jaxpr, small.jaxpr, now)
            new = [same(both) for both in zip(now[begin:end], outs[: loop.carries], strict=True)]
            if all(
                a == b or (math.isnan(a) and math.isnan(b))
                for a, b in zip(new, now[begin:end], strict=True)
            ):
                return [*new, *outs[loop.carries :]]
            now[begin:end] = new
        return [UNKNOWN] * len(node.outs)

    def cond(self, node: Node, ins: list[Degree]) -> list[Degree]:
        """The degrees of a conditional's results: those that all branches share."""
        pairs = zip(branches_of(node.whole), branches_of(node.small), strict=True)
        by_branch = [self.body(a.jaxpr, b.jaxpr, ins[1:]) for a, b in pairs]
        return [same(each) for each in zip(*by_branch, strict=True)]


def dtype_of(var: Any) -> Any:
    """The dtype of a variable; bool if it is not an array."""
    return getattr(var.aval, "dtype", np.dtype(bool))


def equal(a: Any, b: Any) -> bool:
    """Whether two numbers or arrays are equal; random keys count as equal."""
    if jnp.issubdtype(jnp.result_type(a), jax.dtypes.prng_key):
        return True
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=bool(jnp.issubdtype(a.dtype, jnp.inexact)))


def _folded(node: Node, numbers: dict[int, Number]) -> Number | None:
    """The result of an equation of numbers, in both traces; None for any other equation."""
    ins = [i if isinstance(i, Number) else numbers.get(i) for i in node.ins]
    plain = node.name not in STRUCTURED and len(node.outs) == 1 and not node.whole.effects
    if not ins or None in ins or not plain or compat.aval_shape(node.whole.outvars[0].aval):
        return None
    with jax.ensure_compile_time_eval():
        (whole,) = compat.evaluate_equation(node.whole, [i.whole for i in ins if i is not None])
        (small,) = compat.evaluate_equation(node.small, [i.small for i in ins if i is not None])
    return Number(whole, small)


def _guards(name: str, operand: Operand) -> bool:
    """Whether a literal only keeps a value off zero or within bounds; its degree is ignored."""
    if not isinstance(operand, Number) or np.size(operand.whole) != 1:
        return False
    least = 1 if jnp.issubdtype(jnp.result_type(operand.whole), jnp.integer) else TINY
    small = abs(np.asarray(operand.whole).item()) <= least
    return name in ("max", "min", "clamp", "select_n") or (name in ("add", "sub") and small)
