"""A jaxpr as a flat list of calls over numbered values, for programs made from it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from planner import compat
from planner.graph.jaxpr.places import Place, PlacedWalk, origin_of
from planner.graph.jaxpr.walk import Body, called, loop_of, stays_whole

Run = Callable[[Sequence[Any]], list[Any]]
"""Computes the results of a call from its operands."""


@dataclass(frozen=True, eq=False)
class Call:
    """One operation.

    Attributes:
        eqn: the equation that it comes from.
        ins: its operands: numbers of values, or literals.
        outs: the numbers of its results.
        run: computes them.
        backward: whether it belongs to a backward pass that JAX made by transposition.
        made: whether ``run`` differs from ``eqn``.
        place: the place of ``eqn`` in the jaxpr; None: at the top.
    """

    eqn: Any
    ins: tuple[Any, ...]
    outs: tuple[int, ...]
    run: Run
    backward: bool
    made: bool = False
    place: Place | None = None

    @property
    def origin(self) -> compat.Origin:
        """Where it comes from."""
        return origin_of(self.eqn, ()) if self.place is None else self.place.origin

    @property
    def kind(self) -> str:
        """The primitive."""
        return str(self.eqn.primitive.name)

    def running(self, run: Run) -> Call:
        """The call with another function that computes it."""
        return dataclasses.replace(self, run=run, made=True)

    def reading(self, names: Mapping[int, Any]) -> Call:
        """The call with some operands replaced by others, or by literals."""
        if not any(isinstance(v, int) and v in names for v in self.ins):
            return self
        ins = tuple(names.get(v, v) if isinstance(v, int) else v for v in self.ins)
        return dataclasses.replace(self, ins=ins)


@dataclass(frozen=True, eq=False)
class FlatJaxpr:
    """A program.

    Attributes:
        calls: in order.
        inputs: the numbers of its arguments.
        outputs: the numbers of its results, or literals.
        consts: arrays by number.
        values: how many numbers are in use.
    """

    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Any, ...]
    consts: Mapping[int, Any]
    values: int

    @functools.cached_property
    def memo(self) -> dict[Any, Any]:
        """A cache of results of analyses of the program."""
        return {}

    @functools.cached_property
    def readers(self) -> Sequence[Sequence[int]]:
        """Per value, the calls that read it, in order."""
        out: list[list[int]] = [[] for _ in range(self.values)]
        for at, call in enumerate(self.calls):
            for value in {v for v in call.ins if isinstance(v, int)}:
                out[value].append(at)
        return out

    def env(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Its arguments and constants by number."""
        return {**dict(zip(self.inputs, leaves, strict=True)), **self.consts}

    @staticmethod
    def read(atom: Any, env: Mapping[int, Any]) -> Any:
        """A value or a literal."""
        return env[atom] if isinstance(atom, int) else atom.val

    @classmethod
    def run(cls, calls: Sequence[Call], env: dict[int, Any]) -> None:
        """Run some of its calls; their results go into ``env``."""
        for call in calls:
            results = call.run([cls.read(v, env) for v in call.ins])
            env.update(zip(call.outs, results, strict=True))

    def live(self) -> FlatJaxpr:
        """The program without calls that have no effect and whose results are unused."""
        wanted = {v for v in self.outputs if isinstance(v, int)}
        live_calls = []
        for call in reversed(self.calls):
            if wanted.intersection(call.outs) or call.eqn.effects:
                live_calls.append(call)
                wanted.update(v for v in call.ins if isinstance(v, int))
        if len(live_calls) == len(self.calls):
            return self
        return dataclasses.replace(self, calls=tuple(reversed(live_calls)))

    def codes(self) -> list[int]:
        """One number per call, equal where the primitives and the types are."""
        known: dict[object, int] = {}
        out = []
        for call in self.calls:
            avals = [v.aval for v in (*call.eqn.invars, *call.eqn.outvars)]
            types = tuple((compat.aval_shape(a), compat.dtype_name(a)) for a in avals)
            key = (call.kind, types, call.backward)
            out.append(known.setdefault(key, len(known)))
        return out


def flatten(jaxpr: Any) -> FlatJaxpr:
    """Number the values of a jaxpr and inline the bodies of its calls; bodies that the program
    itself rematerializes, and kernels, stay single calls."""
    walk = Flattener()
    inputs = tuple(walk.number() for _ in compat.body(jaxpr).invars)
    outputs = tuple(walk.run(jaxpr, inputs))
    return FlatJaxpr(tuple(walk.calls), inputs, outputs, walk.consts, walk.count)


@dataclass(eq=False)
class Flattener(PlacedWalk[Any]):
    """Records calls; a value is represented by its number, or by a literal."""

    calls: list[Call] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    count: int = 0

    def number(self) -> int:
        """The next number."""
        self.count += 1
        return self.count - 1

    def const(self, var: Any, value: Any) -> Any:
        """A constant, under a number."""
        number = self.number()
        self.consts[number] = value
        return number

    def literal(self, atom: Any) -> Any:
        """A literal stays a literal."""
        return atom

    def call(self, eqn: Any, ins: list[Any], body: Body) -> Sequence[Any]:
        """Inline the body of a call, unless the call stays whole."""
        whole = stays_whole(eqn)
        return self.operation(eqn, ins) if whole else super().call(eqn, ins, body)

    def operation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        """Record a call."""
        outs = tuple(self.number() for _ in eqn.outvars)
        place = self.place
        run = _binding(eqn, place)
        self.calls.append(Call(eqn, tuple(ins), outs, run, place.backward, place=place))
        return outs


def _binding(eqn: Any, place: Place) -> Run:
    return lambda values: compat.evaluate_equation(eqn, values, place.origin)


def run_behind(call: Call, reader: Call) -> Run:
    """A function that computes a call under the names of another one."""
    origin = compat.Origin(call.origin.line, reader.origin.names)
    return lambda values: compat.evaluate_equation(call.eqn, values, origin)


def execute(flat: FlatJaxpr, leaves: Sequence[Any]) -> list[Any]:
    """The results of a program for its arguments (or tracers)."""
    env = flat.env(leaves)
    flat.run(flat.calls, env)
    return [flat.read(v, env) for v in flat.outputs]


def looped(eqn: Any, inner: Run) -> Run:
    """A scan with another body of the same operands and results."""
    loop = loop_of(eqn)

    def run(values: Sequence[Any]) -> list[Any]:
        consts, first, rows = loop.split(values)

        def once(carry: Any, xs: Any) -> Any:
            results = inner([*consts, *carry, *xs])
            return results[: loop.carries], results[loop.carries :]

        carry, ys = scan(eqn, once, first, rows)
        return [*carry, *ys]

    return run


def again(eqn: Any, inner: Run) -> Run:
    """A block that the program rematerializes, with another body of the same operands and
    results."""
    body = called(eqn)
    assert body is not None

    def run(values: Sequence[Any]) -> list[Any]:
        left = [k for k, x in enumerate(values) if x is not None]

        def once(*given: Any) -> list[Any]:
            full: list[Any] = [None] * len(values)
            for k, x in zip(left, given, strict=True):
                full[k] = x
            return inner(full)

        structs = [compat.as_struct(jax.typeof(values[k])) for k in left]
        closed, _ = compat.make_jaxpr(once, structs)
        rebuilt = compat.rebuild(body.jaxpr, closed)
        params = {**eqn.params, body.param: rebuilt}
        with compat.provenance(eqn):
            return list(eqn.primitive.bind(*(values[k] for k in left), **params))

    return run


def scan(eqn: Any, once: Any, first: list[Any], rows: Any) -> Any:
    """``jax.lax.scan`` with the parameters of an equation."""
    params = eqn.params
    with compat.provenance(eqn):
        return jax.lax.scan(
            once,
            first,
            rows,
            length=params["length"],
            reverse=bool(params["reverse"]),
            unroll=params.get("unroll", 1),
        )


def nbytes(aval: Any) -> int:
    """Bytes of a value."""
    return compat.itemsize(aval) * math.prod(compat.aval_shape(aval))


def runs_once(eqn: Any) -> bool:
    """Whether an equation must not be computed twice, or elsewhere: it has effects, uses a
    reference, or draws random numbers that differ under another sharding, or in a part."""
    if eqn.effects or any(compat.is_ref(v.aval) for v in eqn.invars):
        return True
    if eqn.primitive.name.startswith("rng_"):
        return True
    if eqn.primitive.name == "random_gamma":  # one key is split by the number of elements
        key, out_shape = (compat.aval_shape(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
        if key != out_shape:
            return True
    drawn = eqn.primitive.name == "random_bits"
    return drawn and not compat.draws_alike(compat.dtype_name(eqn.invars[0].aval))
