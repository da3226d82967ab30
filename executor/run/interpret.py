"""Re-evaluates a traced step with the plan's sharding constraints inserted.

Walks the jaxpr as ``planner.graph.trace`` does, by ``planner.graph.jaxpr.walk``: the n-th operation
here is operation n of the graph. Loops, branches and rematerialized bodies are rebuilt with the
constraints inside and bound again with their own parameters; calls are inlined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from planner import compat
from planner.annotate import MARKS
from planner.errors import InternalError
from planner.graph.equal import REPEATABLE
from planner.graph.jaxpr.walk import BARRIER, REMAT, Body, Loop, Walk
from planner.rules.kernels.regions import is_region

Shardings = Mapping[tuple[int, str, int], jax.sharding.NamedSharding]

Decided = Mapping[tuple[int, int], Callable[[Any], Any]]
"""By operation and result, what is applied to the result (``executor.run.decisions``)."""

STAGES = {"in": ("from", "in"), "out": ("after", "out")}
"""The consecutive slots where a value enters an operation, and where it leaves it."""

RESULTS = ("made", *STAGES["out"])
"""The slots of a result."""


def in_bounds(eqn: Any, ins: list[Any]) -> list[Any]:
    """Operands of an equation, with the starts of slices clamped to their bounds.

    A slice that would reach past the end starts earlier. XLA's simplifier forgets that where the
    result is sharded along a sliced dimension: it adds up the starts of the two slices. With starts
    in bounds the sum is right.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "dynamic_slice":
        starts, dims = ins[1:], range(len(ins) - 1)
    elif name == "gather" and params["mode"] == jax.lax.GatherScatterMode.CLIP:
        dims = params["dimension_numbers"].start_index_map
        if not dims or ins[1].size != len(dims):
            return ins  # more than one slice: stays a gather
        starts = list(ins[1].reshape(-1))
    else:
        return ins
    room = [ins[0].shape[d] - params["slice_sizes"][d] for d in dims]
    held = [
        jax.lax.clamp(x.dtype.type(0), x, x.dtype.type(min(most, np.iinfo(x.dtype).max)))
        for x, most in zip(map(jax.numpy.asarray, starts), room, strict=True)
    ]
    if name == "dynamic_slice":
        return [ins[0], *held]
    return [ins[0], jax.numpy.stack(held).reshape(ins[1].shape)]


class Kept:
    """An argument in host memory, and its copies on the device, with their ``sharding``; ``spans``:
    the first and the last operation that read each copy."""

    def __init__(
        self, value: Any, sharding: jax.sharding.NamedSharding, spans: Sequence[tuple[int, int]]
    ) -> None:
        self.value, self.sharding, self.spans = value, sharding, spans
        self.copies: dict[int, Any] = {}

    def at(self, op: int) -> Any:
        """The copy that operation ``op``, or a later one, reads."""
        number = sum(last < op for _, last in self.spans)
        if number not in self.copies:
            self.copies[number] = compat.to_memory(self.value, self.sharding, host=False)
        return self.copies[number]


def returned(
    results: Sequence[Any], host: Sequence[jax.sharding.NamedSharding | None]
) -> list[Any]:
    """Results of a step; those with a sharding in ``host`` are put in host memory with it."""
    out = []
    for x, sharding in zip(results, host, strict=True):
        if isinstance(x, Kept):
            out.append(x.value if sharding is not None else x.at(0))
        else:
            out.append(x if sharding is None else compat.to_memory(x, sharding, host=True))
    return out


class Evaluated(NamedTuple):
    """An operation, with its operands and results."""

    op: int
    params: Any
    ins: list[Any]
    outs: list[Any]


def is_slice(
    before: jax.sharding.NamedSharding | None, after: jax.sharding.NamedSharding | None
) -> bool:
    """Whether a value that is sharded as ``before`` needs no communication to be sharded as
    ``after``; None is what the compiler chooses."""
    if before is None or after is None:
        return True
    have, want = (
        [e if isinstance(e, tuple) else () if e is None else (e,) for e in s.spec]
        for s in (before, after)
    )
    want += [()] * (len(have) - len(want))
    return all(w[: len(h)] == h for h, w in zip(have, want, strict=False))


class Spread(NamedTuple):
    """A broadcast: its result, its equation and its operand.

    A loop takes the operand and broadcasts it inside, in the kernels that read it: XLA:GPU keeps in
    memory whatever enters a loop, and JAX moves the broadcasts of masks and fill values out of a
    scan's body when it differentiates the scan.
    """

    result: Any
    eqn: Any
    source: Any

    @property
    def array(self) -> Any:
        """The operand; a literal as an array."""
        if isinstance(self.source, jax.Array):
            return self.source
        return jax.numpy.asarray(self.source, self.result.dtype)


class _Steps(Walk[None]):
    """Counts the operations of a walk, as ``ConstrainedStep`` steps through them."""

    def __init__(self) -> None:
        self.count = 0

    def literal(self, atom: Any) -> None:
        return None

    def const(self, var: Any, value: Any) -> None:
        return None

    def operation(self, eqn: Any, ins: list[None]) -> Sequence[None]:
        self.count += len(ins) if eqn.primitive.name == BARRIER else 1
        if is_region(eqn):
            self.count += sum(not compat.is_literal(v) for v in eqn.invars) + len(eqn.outvars)
        return [None] * len(eqn.outvars)

    def loop(self, eqn: Any, ins: list[None], loop: Loop) -> Sequence[None]:
        for body in loop.bodies:
            self.run(body.jaxpr, body.args(ins))
            self.count += len(body.closing)
        self.count += len(loop.entering) + len(loop.leaving)
        return [None] * len(eqn.outvars)

    def cond(self, eqn: Any, ins: list[None], branches: tuple[Body, ...]) -> Sequence[None]:
        self.branches(branches)
        self.count += len(eqn.outvars)
        return [None] * len(eqn.outvars)

    def branches(self, branches: Sequence[Body]) -> None:
        """Count the operations in the branches of a conditional."""
        for body in branches:
            self.count += len(body.entering)
            self.run(body.jaxpr, [None] * len(body.entering))


class ConstrainedStep(Walk[Any]):
    """Evaluates one traced step on tracers, arrays or ``Kept`` arguments; create one per
    evaluation.

    ``kinds``: the kinds of the step's operations in the order of the walk; ``shardings``: the
    constraints by (operation, slot, position); ``decided``: other functions that are applied to
    results; ``sources``: the lines of the operations, which name collectives in profiles.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        shardings: Shardings,
        decided: Decided | None = None,
        sources: Sequence[str] = (),
    ) -> None:
        self.kinds, self.sources = kinds, sources
        self.shardings = shardings
        self.decided = decided or {}
        self.known: dict[tuple[int, jax.sharding.NamedSharding], tuple[Any, Any]] = {}
        self.held: dict[int, tuple[Any, jax.sharding.NamedSharding]] = {}
        self.evaluated: dict[tuple[str, tuple[int, ...]], list[Evaluated]] = {}
        self.spread: dict[int, Spread] = {}  # by result
        self.next = 0

    def step(self, kind: str) -> int:
        """The index of the next operation, which must be of ``kind``."""
        index = self.next
        expected = self.kinds[index] if index < len(self.kinds) else "none"
        if expected != kind and not {expected, kind} <= MARKS:
            raise InternalError(f"operation {index} is {kind}, expected {expected}")
        self.next += 1
        return index

    def at(self, op: int, slot: str, position: int, value: Any) -> Any:
        """``value`` under the plan's constraints for that place, if any."""
        if compat.is_ref(jax.typeof(value)):
            return value
        for name in STAGES.get(slot, (slot,)):
            sharding = self.shardings.get((op, name, position))
            if sharding is not None:
                line = self.sources[op] if op < len(self.sources) else ""
                with jax.named_scope(f"{line} {self.kinds[op]} {slot}".strip()):
                    value = self.constrained(value, sharding)
        return value

    def constrained(self, value: Any, sharding: jax.sharding.NamedSharding) -> Any:
        """``value`` under ``sharding``; a repeated call returns the same value, resharded once."""
        known = self.known.get((id(value), sharding))
        if known is None:
            resharded = jax.lax.with_sharding_constraint(value, sharding)
            known = self.known[id(value), sharding] = (value, resharded)
            self.held[id(resharded)] = (resharded, sharding)
        return known[1]

    def held_as(self, values: Sequence[Any]) -> list[jax.sharding.NamedSharding | None]:
        """The sharding that each of ``values`` was last constrained to."""
        return [self.held.get(id(x), (x, None))[1] for x in values]

    def entered(
        self, args: Sequence[Any], held: Sequence[jax.sharding.NamedSharding | None]
    ) -> list[Any]:
        """The arguments of a rematerialized body, sharded as outside: the barrier around the body
        hides that, and Shardy would use a later reader's sharding instead."""
        return [
            x if s is None else jax.lax.with_sharding_constraint(x, s)
            for x, s in zip(args, held, strict=True)
        ]

    def fetched(self, values: Sequence[Any]) -> list[Any]:
        """``values``; for those in host memory, the copies that the next operation reads."""
        return [x.at(self.next) if isinstance(x, Kept) else x for x in values]

    def call(self, eqn: Any, ins: list[Any], body: Body) -> Sequence[Any]:
        """Evaluate a call; ``Kept`` values stay so inside."""
        with compat.computed_on(eqn):
            if eqn.primitive.name in REMAT:
                return self.remat(eqn, self.fetched(ins), body)
            return super().call(eqn, ins, body)

    def operation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        """Evaluate an operation under its constraints."""
        ins, name = self.fetched(ins), eqn.primitive.name
        if name == BARRIER:
            return self.barrier(eqn, ins)
        if is_region(eqn):
            return self.region(eqn, ins)
        op = self.step(name)
        if name in MARKS:
            return [self.at(op, "out", 0, self.at(op, "in", 0, ins[0]))]
        first = self.first_of(eqn, op, ins)
        if first is not None:
            return first
        given = list(ins)
        ins = in_bounds(eqn, [self.at(op, "in", k, x) for k, x in enumerate(ins)])
        if name == "fft":  # XLA:CPU may give it a collective's layout, and then refuses that
            ins = [compat.row_major(x) for x in ins]
        results = [
            self.at(op, "made", k, x) for k, x in enumerate(compat.evaluate_equation(eqn, ins))
        ]
        for k in range(len(results) if self.decided else 0):
            if (op, k) in self.decided:
                results[k] = self.decided[op, k](results[k])
        outs = [self.at(op, "out", k, x) for k, x in enumerate(results)]
        if name == "broadcast_in_dim" and np.size(ins[0]) < outs[0].size:
            self.spread[id(outs[0])] = Spread(outs[0], eqn, ins[0])
        if name in REPEATABLE:
            key = name, tuple(map(id, given))
            self.evaluated.setdefault(key, []).append(Evaluated(op, eqn.params, given, outs))
        return outs

    def region(self, eqn: Any, ins: list[Any]) -> list[Any]:
        """Evaluate a ``shard_map`` between the marks of its operands and results."""
        entered = [
            x if compat.is_literal(v) else self.edge(x)
            for v, x in zip(eqn.invars, ins, strict=True)
        ]
        self.step(eqn.primitive.name)
        return [self.edge(x) for x in self.on_shards(eqn, entered)]

    def edge(self, value: Any) -> Any:
        """``value`` under the constraints of the next mark."""
        op = self.step("region_edge")
        return self.at(op, "out", 0, self.at(op, "in", 0, value))

    def on_shards(self, eqn: Any, ins: list[Any]) -> list[Any]:
        """The results of a ``shard_map``."""
        return compat.evaluate_equation(eqn, ins)

    def first_of(self, eqn: Any, op: int, ins: list[Any]) -> list[Any] | None:
        """The results of an earlier operation that computes the same as ``op``, if the plan has no
        other constraints for ``op``: a value is computed, and resharded, once."""
        for known in self.evaluated.get((eqn.primitive.name, tuple(map(id, ins))), ()):
            places = [(slot, k) for slot in STAGES["in"] for k in range(len(ins))]
            places += [(slot, k) for slot in RESULTS for k in range(len(known.outs))]
            said = [(self.shardings.get((op, *at)), at) for at in places]
            alike = all(s is None or s == self.shardings.get((known.op, *at)) for s, at in said)
            decided = any((op, k) in self.decided for k in range(len(known.outs)))
            if alike and not decided and known.params == eqn.params:
                return known.outs
        return None

    def barrier(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        """Evaluate a barrier, which counts as one operation per operand."""
        ops = [self.step(BARRIER) for _ in ins]
        ins = [self.at(op, "in", 0, x) for op, x in zip(ops, ins, strict=True)]
        outs = compat.evaluate_equation(eqn, ins)
        return [self.at(op, "out", 0, x) for op, x in zip(ops, outs, strict=True)]

    def remat(self, eqn: Any, ins: list[Any], body: Body) -> Sequence[Any]:
        """Evaluate a rematerialized body with constraints inside; its results have the same
        shardings outside as inside."""
        held = self.held_as(ins)
        left: list[jax.sharding.NamedSharding | None] = []

        def inside(args: Sequence[Any]) -> list[Any]:
            outs = self.run(body.jaxpr, self.entered(args, held))
            left[:] = self.held_as(outs)
            return outs

        new = self.rebuilt(body.jaxpr, inside)
        outs = eqn.primitive.bind(*ins, **{**eqn.params, body.param: new})
        self.held.update((id(x), (x, s)) for x, s in zip(outs, left, strict=True) if s is not None)
        return outs  # type: ignore[no-any-return]

    def rebuilt(
        self,
        like: Any,
        body: Callable[[Sequence[Any]], list[Any]],
        repeated: Mapping[int, Spread] = MappingProxyType({}),
    ) -> Any:
        """A jaxpr of the form of ``like`` that computes ``body``, with the operands of ``repeated``
        broadcasts in place of those arguments."""
        avals = [v.aval for v in compat.body(like).invars]
        for n, how in repeated.items():
            avals[n] = how.eqn.invars[0].aval
        structs = [compat.placed_struct(a) for a in avals]
        outside, self.evaluated = self.evaluated, {}  # a body reads nothing from outside
        try:
            closed, _ = compat.make_jaxpr(lambda *args: body(args), structs)
        finally:
            self.evaluated = outside
        return compat.rebuild(like, closed)

    def loop(self, eqn: Any, ins: list[Any], loop: Loop) -> Sequence[Any]:
        """Evaluate a loop with constraints inside."""
        ins = self.fetched(ins)
        ops = [self.step(kind) for kind in loop.entering]
        small = self.repeated(ops[: loop.consts], ins)
        ins = [
            small[k].array if k in small else self.at(op, "in", 0, x)
            for k, (op, x) in enumerate(zip(ops, ins, strict=True))
        ]
        stacks = loop.kind == "scan"
        new = {body.param: self.iteration(body, ops, stacks, small) for body in loop.bodies}
        for kind in loop.leaving:
            self.step(kind)
        return eqn.primitive.bind(*ins, **{**eqn.params, **new})  # type: ignore[no-any-return]

    def repeated(self, borders: Sequence[int], ins: Sequence[Any]) -> dict[int, Spread]:
        """The constants of a loop that are broadcasts, except those that the plan gathers."""
        broadcasts = {}
        for k, (op, x) in enumerate(zip(borders, ins, strict=False)):
            how, (held,) = self.spread.get(id(x)), self.held_as([x])
            said = [self.shardings.get((op, slot, 0)) for slot in STAGES["in"]]
            if how is not None and all(is_slice(held, s) for s in said):
                broadcasts[k] = how
        return broadcasts

    def iteration(
        self, body: Body, entering: Sequence[int], stacks: bool, small: Mapping[int, Spread]
    ) -> Any:
        """The body of a loop with constraints inside; ``entering``: borders of all operands;
        ``stacks``: whether results after the carries are slices of what the loop stacks; ``small``:
        operands that are broadcast inside."""
        spread = {n: small[k] for n, k in enumerate(body.operands) if k in small}

        def inside(args: Sequence[Any]) -> list[Any]:
            ops, args = body.args(entering), list(args)
            for n, (_, eqn, _) in spread.items():
                source, (broadcast,) = args[n], compat.evaluate_equation(eqn, [args[n]])
                args[n] = self.at(ops[n], "in", 0, broadcast)
                self.spread[id(args[n])] = Spread(args[n], eqn, source)
            args = [self.at(op, "out", 0, x) for op, x in zip(ops, args, strict=True)]
            outs = self.run(body.jaxpr, args)
            for k, kind in enumerate(body.closing):
                outs[k] = self.at(self.step(kind), "in", 0, outs[k])
            for k in range(len(body.closing) if stacks else len(outs), len(outs)):
                outs[k] = self.at(self.next + k, "in", 0, outs[k])  # the border that stacks it
            return outs

        return self.rebuilt(body.jaxpr, inside, spread)

    def cond(self, eqn: Any, ins: list[Any], branches: tuple[Body, ...]) -> Sequence[Any]:
        """Evaluate a conditional with constraints inside its branches."""
        ins = self.fetched(ins)
        counted = _Steps()
        counted.branches(branches)
        meets = self.next + counted.count  # the first border after the branches
        new = tuple(self.branch(body, meets, k) for k, body in enumerate(branches))
        for _ in eqn.outvars:
            self.step("branch_out")
        return eqn.primitive.bind(*ins, **{**eqn.params, "branches": new})  # type: ignore[no-any-return]

    def branch(self, body: Body, meets: int, number: int) -> Any:
        """A branch with constraints inside; ``meets``: the border of its first result."""
        ops = [self.step(kind) for kind in body.entering]

        def inside(args: Sequence[Any]) -> list[Any]:
            args = [self.at(op, "in", 0, x) for op, x in zip(ops, args, strict=True)]
            outs = self.run(body.jaxpr, args)
            return [self.at(meets + k, "in", number, x) for k, x in enumerate(outs)]

        return self.rebuilt(body.jaxpr, inside)
