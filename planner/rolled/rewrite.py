"""An unrolled step as a step of loops: the same operations, with a row of a stack for each block.

Its arguments and results have a stack in place of the leaves of equal blocks. It is there to be
planned: how recipes compare hardly depends on it, and it has a hundredth of the operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.arguments.outcome import StepOutcome
from planner.errors import RequestError
from planner.graph.flat import FlatJaxpr
from planner.graph.shapes import by_shapes
from planner.graph.trace import Traced, trace
from planner.rolled.layout import Layout, Loop, Part, layout_of
from planner.rolled.runs import Carry, Const, Literal, Operand, Own

LEAST_CALLS = 1500
"""Operations of a program that takes long to plan."""
COVERED = 0.8
"""Share of them that has to stand in loops."""
MOVED = 0.02
"""Bytes that may be moved in and out of stacks, relative to those of the arguments."""


@dataclass(frozen=True)
class Rolled:
    """A step of loops.

    Attributes:
        function: of ``args``.
        args: its arguments as ShapeDtypeStructs.
        repeats: what is in a loop, in words.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    repeats: str


def rolled(function: Callable[..., Any], traced: Traced, args: Sequence[Any]) -> Rolled | None:
    """The step with its equal blocks in loops; None where it is small, or loops hold too little of
    it.

    Args:
        function: the step.
        traced: what it is for ``args``.
        args: its arguments, or ShapeDtypeStructs.
    """
    flat = traced.flat
    if len(flat.calls) < LEAST_CALLS:
        return None
    layout = layout_of(flat, traced.in_paths)
    given = sum(layout.sizes.get(v, 0) for v in flat.inputs)
    if layout.covered < COVERED or layout.moved_bytes > MOVED * given:
        return None
    form = _Form(layout, traced)
    structs = [compat.as_struct(aval) for aval in traced.jaxpr.in_avals]
    mine = form.args(structs)

    def other(given: Sequence[Any]) -> Callable[..., Any]:
        """The step for other shapes, of a batch of another size."""
        leaves = list(structs)
        for position, leaf in form.leaves(given).items():
            leaves[position] = leaf
        again = trace(function, jax.tree_util.tree_unflatten(traced.in_tree, leaves), traced)
        if [c.kind for c in again.flat.calls] != [c.kind for c in flat.calls]:
            raise RequestError("with a batch of another size the step is another program")
        return form.program(again.flat)

    first = form.program(flat)
    step = by_shapes(first, mine, first, other)
    return Rolled(step, mine, layout.repeats)


@dataclass(eq=False)
class _Form:
    """Arguments and results of a step of loops, and the step."""

    layout: Layout
    traced: Traced

    def __post_init__(self) -> None:
        layout, flat = self.layout, self.layout.flat
        position = {v: k for k, v in reversed(list(enumerate(flat.inputs)))}
        self.given: list[tuple[int, int]] = []  # position of the leaf that names it, stack or -1
        seen: set[int] = set()
        for k, value in enumerate(flat.inputs):
            stack = layout.place.get(value, (-1, 0))[0]
            if stack not in layout.given:
                self.given.append((k, -1))
            elif stack not in seen:
                seen.add(stack)
                self.given.append((position[layout.rows[stack][0]], stack))
        where = {v: k for k, v in reversed(list(enumerate(flat.outputs))) if isinstance(v, int)}
        returned = Counter(layout.place[v][0] for v in where if v in layout.place)
        self.made: list[tuple[int, int]] = []
        seen = set()
        for k, value in enumerate(flat.outputs):
            stack = layout.place.get(value, (-1, 0))[0] if isinstance(value, int) else -1
            if stack < 0 or returned[stack] < len(layout.rows[stack]):
                self.made.append((k, -1))
            elif stack not in seen:
                seen.add(stack)
                self.made.append((where[layout.rows[stack][0]], stack))

    def args(self, structs: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, ...]:
        """The arguments: per argument of the step a dict of its leaves by path."""
        count = 1 + max(p[0].idx for p in self.traced.in_paths)
        out: tuple[dict[str, Any], ...] = tuple({} for _ in range(count))
        for k, stack in self.given:
            leaf, path = structs[k], self.traced.in_paths[k]
            if stack >= 0:
                shape = (len(self.layout.rows[stack]), *leaf.shape)
                leaf = jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)
            out[path[0].idx][_name(path[1:])] = leaf
        return out

    def leaves(self, args: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
        """The leaves of the step's arguments that are no rows, by position."""
        paths = self.traced.in_paths
        return {k: args[paths[k][0].idx][_name(paths[k][1:])] for k, s in self.given if s < 0}

    def program(self, flat: FlatJaxpr) -> Callable[..., Any]:
        """The step; ``flat`` is the program for its shapes."""
        loops = {x.run.start: x for x in self.layout.loops}
        paths = self.traced.in_paths

        def step(*args: Mapping[str, Any]) -> Any:
            values = _Values(self.layout, flat)
            for k, stack in self.given:
                leaf = args[paths[k][0].idx][_name(paths[k][1:])]
                if stack < 0:
                    values.env[flat.inputs[k]] = leaf
                else:
                    values.stacks[stack] = leaf
            at = 0
            while at < len(flat.calls):
                if at in loops:
                    values.loop(loops[at])
                    at = loops[at].run.end
                else:
                    call = flat.calls[at]
                    results = call.run([values.read(v) for v in call.ins])
                    values.env.update(zip(call.outs, results, strict=True))
                    at += 1
            return self.results(values)

        return step

    def results(self, values: _Values) -> Any:
        """The results, in dicts by path, where the step has them."""
        traced = self.traced
        first = [p[0] for p in traced.out_paths if p]
        tops = [k.idx for k in first if isinstance(k, jax.tree_util.SequenceKey)]
        several = not traced.updated and len(tops) == len(traced.out_paths)
        updates: tuple[dict[str, Any], ...] = tuple({} for _ in range(1 + max(tops, default=0)))
        rest: dict[str, Any] = {}
        for k, stack in self.made:
            value = values.read(values.flat.outputs[k]) if stack < 0 else values.stacks[stack]
            path = traced.out_paths[k]
            if several or k < traced.updated:
                updates[path[0].idx][_name(path[1:])] = value
            else:
                rest[_name(path)] = value
        if traced.updated:
            return StepOutcome(updates, rest, None)  # type: ignore[arg-type]
        return updates if several else rest


@dataclass(eq=False)
class _Values:
    """What a program has computed."""

    layout: Layout
    flat: FlatJaxpr

    def __post_init__(self) -> None:
        self.env: dict[int, Any] = dict(self.flat.consts)
        self.stacks: dict[int, Any] = {}

    def read(self, atom: Any) -> Any:
        """A value, a literal, or a row."""
        if not isinstance(atom, int):
            return atom.val
        if atom not in self.env:
            stack, row = self.layout.place[atom]
            self.env[atom] = jax.lax.index_in_dim(self.stacks[stack], row, keepdims=False)
        return self.env[atom]

    def loop(self, loop: Loop) -> None:
        """Run a loop; what it makes goes into the stacks."""
        run = loop.run
        body = self.flat.calls[run.start : run.start + run.length]
        consts = {
            x.value: self.read(x.value) for row in run.operands for x in row if isinstance(x, Const)
        }

        def once(carry: Any, rows: Any) -> Any:
            made: dict[tuple[int, int], Any] = {}

            def operand(x: Operand, atom: Any) -> Any:
                if isinstance(x, Own):
                    return made[x.call, x.out]
                if isinstance(x, Carry):
                    return carry[x.number]
                if isinstance(x, Const):
                    return consts[x.value]
                return atom.val if isinstance(x, Literal) else rows[x.number]

            for k, call in enumerate(body):
                ins = [operand(x, v) for x, v in zip(run.operands[k], call.ins, strict=True)]
                made.update({(k, o): x for o, x in enumerate(call.run(ins))})
            ends = tuple(made[call, out] for call, out, _ in run.carries)
            return ends, tuple(made[key] for key in loop.results)

        first = tuple(
            _typed(self.read(atom), body[call].eqn.outvars[out].aval)
            for call, out, atom in run.carries
        )
        with compat.provenance(body[0].origin):
            rows = tuple(self.rows(s) for s in loop.sources)
            ends, made = jax.lax.scan(once, first, rows, length=run.count, reverse=loop.reverse)
        last = run.end - run.length
        for (call, out, _), value in zip(run.carries, ends, strict=True):
            self.env[self.flat.calls[last + call].outs[out]] = value
        self.stacks.update(zip(loop.stacks, made, strict=True))

    def rows(self, source: Part | tuple[int, ...]) -> Any:
        """The rows that a loop reads."""
        if not isinstance(source, Part):
            return jnp.stack([self.read(v) for v in source])
        stack, whole = self.stacks[source.stack], len(self.layout.rows[source.stack])
        if source.last - source.first == whole:
            return stack
        return jax.lax.slice_in_dim(stack, source.first, source.last)


def _typed(value: Any, aval: Any) -> Any:
    """A value of the type that a loop carries; literals have none."""
    if getattr(value, "dtype", None) == aval.dtype:
        return value
    return jnp.asarray(value, aval.dtype)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path)
