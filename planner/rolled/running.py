"""Runs a program with some of its calls in loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.graph.flat import FlatJaxpr
from planner.rolled.layout import Layout, Loop, Part
from planner.rolled.order import OnStacks, Single, Unit
from planner.rolled.runs import Carry, Const, Literal, Operand, Own


@dataclass(eq=False)
class Values:
    """The values that a program has computed so far."""

    layout: Layout
    flat: FlatJaxpr

    def __post_init__(self) -> None:
        self.env: dict[int, Any] = dict(self.flat.consts)
        self.stacks: dict[int, Any] = {}

    def read(self, atom: Any) -> Any:
        """A value, a literal, or a row."""
        if not isinstance(atom, int):
            return atom.val
        atom = self.layout.same.get(atom, atom)
        if atom not in self.env:
            stack, row = self.layout.place[atom]
            self.env[atom] = jax.lax.index_in_dim(self.stacks[stack], row, keepdims=False)
        return self.env[atom]

    def run(self, unit: Unit) -> None:
        """Run a unit; its results can be read afterwards."""
        if isinstance(unit, Loop):
            self.loop(unit)
        elif isinstance(unit, Single):
            call = self.flat.calls[unit.at]
            results = call.run([self.read(v) for v in call.ins])
            self.env.update(zip(call.outs, results, strict=True))
        else:
            self.on_stacks(unit)

    def on_stacks(self, unit: OnStacks) -> None:
        """Run an operation on stacks."""
        call = self.flat.calls[unit.batch.calls[0]]
        by_row = unit.batch.by_row
        ins = [
            self.stacks[self.layout.place[self.layout.same.get(v, v)][0]] if rows else self.read(v)
            for v, rows in zip(call.ins, by_row, strict=True)
        ]
        axes = tuple(0 if rows else None for rows in by_row)
        with compat.provenance(call.origin):
            results = jax.vmap(lambda *values: call.run(values), in_axes=axes)(*ins)
        self.stacks.update(zip(unit.stacks, results, strict=True))

    def loop(self, loop: Loop) -> None:
        """Run a loop and store its results in the stacks."""
        run = loop.run
        body = self.flat.calls[run.start : run.start + run.length]
        consts = {
            x.value: self.read(x.value) for row in run.operands for x in row if isinstance(x, Const)
        }

        entering = self.layout.entering.get(self.layout.loops.index(loop), [])

        def once(carry: Any, rows: Any) -> Any:
            results: dict[tuple[int, int], Any] = {}

            def operand(x: Operand, atom: Any) -> Any:
                if isinstance(x, Own):
                    return results[x.call, x.out]
                if isinstance(x, Carry):
                    return carry[x.number]
                if isinstance(x, Const):
                    return consts[x.value]
                return atom.val if isinstance(x, Literal) else rows[x.number]

            for k, call in enumerate(body):
                ins = [operand(x, v) for x, v in zip(run.operands[k], call.ins, strict=True)]
                results.update({(k, o): x for o, x in enumerate(call.run(ins))})
            ends = tuple(results[call, out] for call, out, _ in run.carries)
            return ends, (*(results[key] for key in loop.results), *(carry[k] for k, _ in entering))

        first = tuple(
            _typed(self.read(atom), body[call].eqn.outvars[out].aval)
            for call, out, atom in run.carries
        )
        with compat.provenance(body[0].origin):
            rows = tuple(self.rows(s) for s in loop.sources)
            ends, stacked = jax.lax.scan(once, first, rows, length=run.count, reverse=loop.reverse)
        last = run.end - run.length
        for (call, out, _), value in zip(run.carries, ends, strict=True):
            self.env[self.flat.calls[last + call].outs[out]] = value
        stacks = (*loop.stacks, *(stack for _, stack in entering))
        self.stacks.update(zip(stacks, stacked, strict=True))

    def rows(self, source: Part | tuple[int, ...]) -> Any:
        """The rows that a loop reads."""
        if not isinstance(source, Part):
            return jnp.stack([self.read(v) for v in source])
        stack, whole = self.stacks[source.stack], len(self.layout.rows[source.stack])
        if source.last - source.first == whole:
            return stack
        return jax.lax.slice_in_dim(stack, source.first, source.last)


def _typed(value: Any, aval: Any) -> Any:
    """A value converted to the dtype of a carry; literals have no dtype."""
    if getattr(value, "dtype", None) == aval.dtype:
        return value
    return jnp.asarray(value, aval.dtype)
