"""The shared walk through a jaxpr.

Everything that goes through a step's equations (the tracer, the executor, the search for lookups,
their evaluation on rows, dependences, recomputation) is a ``Walk``: it defines what a value is and
what an operation does with values. Only this module knows the structure of equations:

- *calls* (``CALLS``) are inlined: their body is walked in their place;
- *loops* (scan, while) and *branches* (cond) have separate bodies. Border operations lead in and
  out of them. ``Loop`` and ``Body`` say which operands a body takes, which borders there are, and
  in which order: the order of an operation in the walk is its index in the graph, for the tracer
  and for the executor;
- *opaque* regions are single operations: they use references (``jax.new_ref``) of the surrounding
  program, which a rebuilt body could not use;
- everything else is an operation.

Borders, in order. A loop: ``loop_const``, ``loop_carry`` and ``loop_xs`` for its operands; the
equations of each body, closed by one ``loop_test`` (the body decides whether the loop continues) or
by a ``loop_back`` per carry; ``loop_out`` and ``loop_ys`` for its results. A conditional: per
branch, ``branch_in`` for its operands, then its equations; ``branch_out`` for the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from planner import compat

V = TypeVar("V")

REMAT = frozenset("remat remat2 checkpoint".split())
"""Calls whose body is computed again in the backward pass."""

FUSED = "flash_attention"
"""Prefix of the name of a jitted function that is one kernel (``step.kernels.fused``)."""

BARRIER = "optimization_barrier"
"""Counts as one operation per operand, in order: its operands may have unrelated shardings, so they
must not share a group."""

CUSTOM = frozenset(
    "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_lin custom_vmap_call "
    "custom_linear_solve remat_opt".split()
)
"""Calls with custom rules for derivatives or batching."""

CALLS = (
    frozenset("jit pjit closed_call core_call eval_jaxpr call_hi_primitive".split())
    | REMAT
    | CUSTOM
)
LOOPS = frozenset({"scan", "while"})
REGIONS = LOOPS | REMAT | {"cond"}
"""Equations whose bodies the executor rebuilds."""

STRUCTURED = CALLS | REGIONS


def stays_whole(eqn: Any) -> bool:
    """Whether a call stays one equation where others are inlined: it is rematerialized as a unit,
    or it stands for one kernel."""
    return eqn.primitive.name in REMAT or is_fused(eqn)


def is_fused(eqn: Any) -> bool:
    """Whether a call stands for one kernel, by its name."""
    return str(eqn.params.get("name", "")).startswith(FUSED)


class Body(NamedTuple):
    """A jaxpr inside an equation.

    Attributes:
        param: the equation's parameter that holds it.
        jaxpr: closed or open.
        operands: which operands of the equation are its arguments, by position.
        entering: of a branch, the borders before it, one per argument.
        closing: of a loop, the borders after it, one for each of its first results.
    """

    param: str
    jaxpr: Any
    operands: Sequence[int]
    entering: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()

    def args(self, operands: Sequence[V]) -> list[V]:
        """Its arguments among the equation's operands."""
        return [operands[k] for k in self.operands]


class Loop(NamedTuple):
    """A scan or a while loop.

    Its operands are constants, then carries, then scanned arrays; its results are the carries, then
    stacked arrays.

    Attributes:
        kind: the primitive.
        trips: the number of iterations; None if it is not known.
        consts: the number of constants.
        carries: the number of carries.
        avals: of the operands, as the bodies see them.
        bodies: in the order of the walk.
        entering: the borders of the operands.
        leaving: the borders of the results.
    """

    kind: str
    trips: int | None
    consts: int
    carries: int
    avals: tuple[Any, ...]
    bodies: tuple[Body, ...]
    entering: tuple[str, ...]
    leaving: tuple[str, ...]

    def split(self, operands: Sequence[V]) -> tuple[list[V], list[V], list[V]]:
        """(constants, carries, scanned arrays)."""
        begin, end = self.consts, self.consts + self.carries
        return list(operands[:begin]), list(operands[begin:end]), list(operands[end:])


def is_opaque(eqn: Any) -> bool:
    """Whether a region counts as one operation."""
    return eqn.primitive.name in REGIONS and any(compat.is_ref(v.aval) for v in eqn.invars)


def called(eqn: Any) -> Body | None:
    """The body of a call; None if its arguments are not the operands of the call.

    After differentiation, only the solver of a ``custom_linear_solve`` runs; its operands are a
    part of the equation's.
    """
    params, count = eqn.params, len(eqn.invars)
    if eqn.primitive.name == "custom_linear_solve":
        lengths = params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        operands = (*range(start, start + lengths.solve), *range(sum(lengths), count))
        return Body("jaxprs", params["jaxprs"].solve, operands)
    if (high := compat.expanded(eqn)) is not None:
        fits = len(compat.body(high).invars) == count
        return Body("_prim", high, range(count)) if fits else None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "fwd_jaxpr"):
        if name in params:
            fits = len(compat.body(params[name]).invars) == count
            return Body(name, params[name], range(count)) if fits else None
    return None


def in_bodies(value: Any, change: Callable[[Any], Any]) -> Any:
    """A parameter of an equation with ``change`` applied to its jaxprs (one, several, or none); the
    same object if nothing changes."""
    if hasattr(compat.body(value), "eqns"):
        return change(value)
    if isinstance(value, tuple) and value and all(hasattr(compat.body(v), "eqns") for v in value):
        changed = tuple(map(change, value))
        return value if all(a is b for a, b in zip(changed, value, strict=True)) else changed
    return value


def loop_of(eqn: Any) -> Loop:
    """The structure of a ``scan`` or a ``while``."""
    p, count = eqn.params, len(eqn.invars)
    if eqn.primitive.name == "scan":
        consts, carries = compat.scan_counts(eqn)
        avals = tuple(v.aval for v in compat.body(p["jaxpr"]).invars)
        closing = ("loop_back",) * carries
        bodies: tuple[Body, ...] = (Body("jaxpr", p["jaxpr"], range(count), (), closing),)
        trips = int(p["length"])
    else:
        in_test, in_body = int(p["cond_nconsts"]), int(p["body_nconsts"])
        consts, carries = in_test + in_body, len(eqn.outvars)
        carried = range(consts, count)
        outside = (*eqn.invars[:consts], *eqn.outvars)
        avals = tuple(v.aval for v in outside)
        closing = ("loop_back",) * carries
        bodies = (
            Body("cond_jaxpr", p["cond_jaxpr"], (*range(in_test), *carried), (), ("loop_test",)),
            Body("body_jaxpr", p["body_jaxpr"], (*range(in_test, consts), *carried), (), closing),
        )
        trips = None
    over, stacked = count - consts - carries, len(eqn.outvars) - carries
    entering = ("loop_const",) * consts + ("loop_carry",) * carries + ("loop_xs",) * over
    leaving = ("loop_out",) * carries + ("loop_ys",) * stacked
    return Loop(eqn.primitive.name, trips, consts, carries, avals, bodies, entering, leaving)


def branches_of(eqn: Any) -> tuple[Body, ...]:
    """The branches of a ``cond``, whose first operand chooses one."""
    operands = range(1, len(eqn.invars))
    entering = ("branch_in",) * len(operands)
    return tuple(Body("branches", b, operands, entering) for b in eqn.params["branches"])


class Walk(Generic[V]):
    """Goes through a jaxpr, equation by equation; a subclass defines what happens.

    By default, the body of a call is walked, and a loop or a conditional is an operation.
    """

    def const(self, var: Any, value: Any) -> V:
        """The value for a constant of a jaxpr; by default, the constant."""
        return value  # type: ignore[no-any-return]

    def literal(self, atom: Any) -> V:
        """The value for a literal operand; by default, the literal's number."""
        return atom.val  # type: ignore[no-any-return]

    def operation(self, eqn: Any, ins: list[V]) -> Sequence[V]:
        """The results of an operation."""
        raise NotImplementedError

    def call(self, eqn: Any, ins: list[V], body: Body) -> Sequence[V]:
        """The results of a call."""
        return self.run(body.jaxpr, body.args(ins))

    def loop(self, eqn: Any, ins: list[V], loop: Loop) -> Sequence[V]:
        """The results of a loop."""
        return self.operation(eqn, ins)

    def cond(self, eqn: Any, ins: list[V], branches: tuple[Body, ...]) -> Sequence[V]:
        """The results of a conditional."""
        return self.operation(eqn, ins)

    def equation(self, eqn: Any, ins: list[V]) -> Sequence[V]:
        """The results of any equation."""
        name = eqn.primitive.name
        if name not in STRUCTURED or is_opaque(eqn):
            return self.operation(eqn, ins)
        if name in LOOPS:
            return self.loop(eqn, ins, loop_of(eqn))
        if name not in CALLS:
            return self.cond(eqn, ins, branches_of(eqn))
        body = called(eqn)
        return self.operation(eqn, ins) if body is None else self.call(eqn, ins, body)

    def run(self, jaxpr: Any, args: Sequence[V]) -> list[V]:
        """Walk through ``jaxpr`` with ``args`` for its inputs; returns its results."""
        inner = compat.body(jaxpr)
        env: dict[Any, V] = {}
        for var, value in zip(inner.constvars, compat.consts(jaxpr), strict=True):
            env[var] = self.const(var, value)
        env.update(zip(inner.invars, args, strict=True))
        is_literal, literal, equation = compat.is_literal, self.literal, self.equation
        for eqn in inner.eqns:
            ins = [literal(v) if is_literal(v) else env[v] for v in eqn.invars]
            env.update(zip(eqn.outvars, equation(eqn, ins), strict=True))
        return [literal(v) if is_literal(v) else env[v] for v in inner.outvars]
