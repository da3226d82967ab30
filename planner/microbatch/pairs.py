"""Pairs the trace of a step for the whole batch with its trace for one microbatch.

Shapes come from the small trace, numbers from the whole one: the 1/B of a mean stays that of the
whole batch, so nothing is rescaled. A dimension counts examples exactly where the two differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import jax.numpy as jnp
import numpy as np

from planner import compat
from planner.graph.jaxpr.places import origin_of, user_line
from planner.graph.jaxpr.walk import CALLS, STRUCTURED, called, stays_whole
from planner.microbatch.errors import NotExactError
from planner.rules.kernels.pallas.grid import NAME as KERNEL
from planner.rules.kernels.pallas.local import same_body

SIZED = (
    "as of operations whose course follows from the number of examples (a product over them, an "
    "associative scan, a random choice); compute them for each example, or leave microbatches= out"
)


@dataclass(frozen=True)
class Number:
    """A literal operand: its value in the whole trace and in the small one."""

    whole: Any
    small: Any

    @property
    def changed(self) -> bool:
        """Whether it is an integer that depends on the batch size."""
        integer = jnp.issubdtype(jnp.result_type(self.whole), jnp.integer)
        return bool(integer and np.any(np.asarray(self.whole) != np.asarray(self.small)))


Operand = int | Number
"""The number of a value, or a literal."""


@dataclass(frozen=True, eq=False)
class Node:
    """An equation in both traces. ``ins`` and ``outs`` are the numbers of its values; ``around``
    lists the calls of the whole trace that contain it, outermost first."""

    whole: Any
    small: Any
    ins: tuple[Operand, ...]
    outs: tuple[int, ...]
    around: tuple[Any, ...] = ()

    @property
    def origin(self) -> compat.Origin:
        """The origin of the equation in the user's program."""
        return origin_of(self.whole, self.around)

    @property
    def names(self) -> str:
        """The name stack from the top of the program."""
        stacks = (str(eqn.source_info.name_stack) for eqn in self.origin.names)
        return "/".join(filter(None, stacks))

    @property
    def name(self) -> str:
        """The primitive."""
        return str(self.whole.primitive.name)

    @property
    def line(self) -> str:
        """``file.py:line`` of the user's code."""
        return user_line(self.origin.line)

    @property
    def changed(self) -> str:
        """In words, the integers besides shapes that depend on the batch size."""
        changes = [
            f"{i.whole} is {i.small} in a microbatch"
            for i in self.ins
            if isinstance(i, Number) and i.changed
        ]
        power = self.whole.params.get("y"), self.small.params.get("y")
        if self.name == "integer_pow" and power[0] != power[1]:
            changes.append(f"the power {power[0]} is {power[1]} in a microbatch")
        if self.name == KERNEL and not same_body(self.whole.params, self.small.params):
            changes.append("the body of the kernel is another one in a microbatch")
        return ", ".join(changes)

    @property
    def values(self) -> tuple[int, ...]:
        """The operands that are values."""
        return tuple(i for i in self.ins if not isinstance(i, Number))


@dataclass(eq=False)
class Pair:
    """A jaxpr in both traces, with calls inlined. Values are numbered.

    Attributes:
        avals: per value, its abstract value in both traces.
        inputs, outputs: inputs and outputs of the jaxpr.
        consts: contents of the jaxpr's constants, by value.
        nodes: its equations, in order.
    """

    avals: list[tuple[Any, Any]] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def scaled(self, value: int) -> list[int]:
        """The dimensions of a value that count examples."""
        whole, small = (compat.aval_shape(a) for a in self.avals[value])
        return [d for d, (m, n) in enumerate(zip(whole, small, strict=True)) if m != n]

    def counts(self, value: int) -> tuple[int, int]:
        """Numbers of examples of a value with one example dimension: (whole, microbatch)."""
        (d,) = self.scaled(value)
        whole, small = (compat.aval_shape(a)[d] for a in self.avals[value])
        return whole, small

    def live(self) -> list[bool]:
        """Per equation, whether a result needs it or it has an effect."""
        needed = {o for o in self.outputs if not isinstance(o, Number)}
        out = [False] * len(self.nodes)
        for k in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[k]
            if needed.intersection(node.outs) or node.whole.effects:
                out[k] = True
                needed.update(node.values)
        return out


def pair(whole: Any, small: Any) -> Pair:
    """Pair the equations of two jaxprs of one function.

    Raises:
        NotExactError: they differ in more than shapes and numbers.
    """
    out = Pair()
    inner, other = compat.body(whole), compat.body(small)
    out.inputs = [_new(out, a, b) for a, b in zip(inner.invars, other.invars, strict=True)]
    out.outputs = _inline(out, whole, small, out.inputs)
    return out


def _new(out: Pair, whole: Any, small: Any) -> int:
    shapes = compat.aval_shape(whole.aval), compat.aval_shape(small.aval)
    if len(shapes[0]) != len(shapes[1]):
        raise NotExactError(f"a value has shape {shapes[0]}, and {shapes[1]} in a microbatch")
    out.avals.append((whole.aval, small.aval))
    return len(out.avals) - 1


def _inline(
    out: Pair, whole: Any, small: Any, args: Sequence[Operand], around: tuple[Any, ...] = ()
) -> list[Operand]:
    inner, other = compat.body(whole), compat.body(small)
    env: dict[Any, Operand] = {}
    contents = zip(compat.consts(whole), compat.consts(small), strict=True)
    for a, b, (x, y) in zip(inner.constvars, other.constvars, contents, strict=True):
        if np.shape(x) != np.shape(y):
            raise NotExactError(
                f"a constant of the step has shape {np.shape(x)}, and {np.shape(y)} in a microbatch"
            )
        value = env[a] = _new(out, a, b)
        out.consts[value] = x
    env.update(zip(inner.invars, args, strict=True))

    def read(a: Any, b: Any) -> Operand:
        return Number(a.val, b.val) if compat.is_literal(a) else env[a]

    for a, b in zip_longest(inner.eqns, other.eqns):
        if a is None or b is None or _kind(a) != _kind(b):
            names = [str(x.primitive) if x is not None else "nothing" for x in (a, b)]
            raise NotExactError(
                "this step can't be cut into microbatches: "
                f"{user_line(origin_of(a or b, around).line)}: {names[0]} for the whole batch "
                f"is {names[1]} for a microbatch, {SIZED}"
            )
        ins = [read(x, y) for x, y in zip(a.invars, b.invars, strict=True)]
        name = a.primitive.name
        if name in CALLS and not stays_whole(a) and (callee := called(a)) is not None:
            twin = called(b)
            assert twin is not None
            inside = (*around, a)
            results = _inline(out, callee.jaxpr, twin.jaxpr, callee.args(ins), inside)
            env.update(zip(a.outvars, results, strict=True))
            continue
        try:
            outs = tuple(_new(out, x, y) for x, y in zip(a.outvars, b.outvars, strict=True))
        except NotExactError as error:
            line = user_line(origin_of(a, around).line)
            raise NotExactError(
                f"this step can't be cut into microbatches: {line}: {name}: {error}, {SIZED}"
            ) from None
        out.nodes.append(Node(a, b, tuple(ins), outs, around))
        env.update(zip(a.outvars, outs, strict=True))
    return [read(a, b) for a, b in zip(inner.outvars, other.outvars, strict=True)]


def _kind(eqn: Any) -> tuple[str, int, int]:
    return eqn.primitive.name, len(eqn.invars), len(eqn.outvars)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations at any depth; calls, loops and branches are replaced by their bodies."""
    for eqn in compat.body(jaxpr).eqns:
        bodies = list(bodies_in(eqn.params))
        if eqn.primitive.name in STRUCTURED and bodies:
            for inner in bodies:
                yield from equations(inner)
        else:
            yield eqn


def equations_in(eqn: Any) -> Iterator[Any]:
    """All equations in the bodies of an equation, at any depth."""
    for inner in bodies_in(eqn.params):
        yield from equations(inner)


def bodies_in(params: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns"):
                yield x
