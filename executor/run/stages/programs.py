"""The jitted programs of a step with stages: before the loop over microbatches, the passes of every
stage, and after the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from executor.run.decisions import applied
from executor.run.lowered import LoweredStep, lower_plan
from executor.run.mesh import mesh_axes
from executor.run.stages.places import Places, divides
from planner import compat
from planner.graph.flat import Call, FlatJaxpr
from planner.graph.trace import Traced
from planner.plan.plan import Plan
from planner.spec import STAGE
from planner.stages.programs.handed import handed, result_place
from planner.stages.programs.homes import ALL, Made
from planner.stages.programs.layered import Apart
from planner.stages.programs.split import Split, Task

Names = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A jitted function at a place. It takes the values named ``ins``, in order, and returns those
    named ``outs``."""

    ins: Names
    outs: Names
    place: int
    run: Callable[..., Any]


class Builder:
    """Builds the programs of a step under a plan.

    Args:
        traced: the step in microbatches.
        plan: its plan.
        places: the devices.
        apart: the step, split into programs.

    Attributes:
        inner, outer: shardings of values that leave their place, in a microbatch and outside.
    """

    def __init__(self, traced: Traced, plan: Plan, places: Places, apart: Apart) -> None:
        self.places, self.starts = places, apart.starts
        self.kinds, self.decided = [op.kind for op in traced.graph.ops], applied(plan)
        axes = {n: v for n, v in mesh_axes(plan).items() if n != STAGE}
        how = dataclasses.replace(plan.lowering, turned=False)  # what is split stands in its place
        plan = dataclasses.replace(plan, lowering=how)
        self.lowered = [lower_plan(plan, traced, mesh, axes) for mesh in places.stages]
        inner, outer = handed(apart)
        body = apart.split.body.flat.calls
        self.inner = self._specs(body, inner, apart.ops)
        self.outer = self._specs(apart.flat.calls, outer, apart.ops)

    def _specs(
        self, calls: Sequence[Call], values: frozenset[int], ops: Mapping[int, range]
    ) -> dict[int, PartitionSpec]:
        """Shardings of values that leave their place: those of the plan. Between processes, a value
        without one gets that of a value of the same shape, or is not split."""
        mesh, said = self.places.stages[0], self.lowered[0].shardings
        specs: dict[int, PartitionSpec] = {}
        alike: dict[tuple[int, ...], PartitionSpec] = {}
        unknown: dict[int, tuple[int, ...]] = {}
        for call in calls:
            for k, (v, var) in enumerate(zip(call.outs, call.eqn.outvars, strict=False)):
                if v not in values:
                    continue
                place, shape = result_place(call, k, ops), compat.aval_shape(var.aval)
                held = None if place is None else said.get((place[0], "out", place[1]))
                if held is not None and divides(mesh, held.spec, shape):
                    specs[v] = alike[shape] = held.spec
                else:
                    unknown[v] = shape
        if self.places.many:
            specs.update((v, alike.get(shape, PartitionSpec())) for v, shape in unknown.items())
        return specs

    def _held(
        self, place: int, values: Sequence[int], specs: Mapping[int, PartitionSpec]
    ) -> list[NamedSharding | None]:
        """The shardings of results; None leaves one to the compiler."""
        return [self.places.sharding(place, specs[v]) if v in specs else None for v in values]

    def evaluate(self, calls: Sequence[Call], env: dict[int, Any], place: int) -> None:
        """Run calls under the plan's constraints, or without them at the place ``ALL``."""
        if place == ALL:
            FlatJaxpr.run(calls, env)
            return
        walk = LoweredStep(self.kinds, self.lowered[place], self.decided)
        for call in calls:
            ins = [FlatJaxpr.read(v, env) for v in call.ins]
            start = self.starts.get(id(call))
            if start is None or call.made:
                outs: Sequence[Any] = call.run(ins)
            else:
                walk.next = start
                outs = walk.equation(call.eqn, ins)
            env.update(zip(call.outs, outs, strict=True))

    def once(
        self,
        calls: Sequence[Call],
        ins: Sequence[int],
        outs: Sequence[int],
        place: int,
        shardings: Mapping[int, Any],
    ) -> Program:
        """The program of values that are computed once, before the loop."""

        def ahead(*values: Any) -> list[Any]:
            env = dict(zip(ins, values, strict=True))
            self.evaluate(calls, env, place)
            return [env[v] for v in outs]

        held = [shardings.get(v) for v in outs]
        return Program(tuple(ins), tuple(outs), place, jax.jit(ahead, out_shardings=held))

    def task(self, task: Task, given: frozenset[int], consts: Mapping[int, Any]) -> Program:
        """The program of a pass; ``given``: slices of the state that are passed to it."""
        calls = [c for c in task.calls if not given.intersection(c.outs)]
        read = {v for c in calls for v in c.ins if isinstance(v, int)}
        read |= {*task.sums, *task.stacked}
        read -= {v for c in calls for v in c.outs}
        ins = tuple(sorted(read - consts.keys()))
        outs = (*task.outs, *task.sums, *task.stacked)

        def run(*values: Any) -> list[Any]:
            env = {v: consts[v] for v in read & consts.keys()}
            env.update(zip(ins, values, strict=True))
            self.evaluate(calls, env, task.stage)
            return [env[v] for v in outs]

        run.__name__ = f"{_WORDS[task.kind]}_{task.stage}"
        held = self._held(task.stage, outs, self.inner)
        return Program(ins, outs, task.stage, jax.jit(run, out_shardings=held))

    def behind(
        self,
        tasks: Sequence[Made],
        wanted: frozenset[int],
        split: Split,
        joined: frozenset[int],
        consts: Mapping[int, Any],
        shardings: Mapping[int, Any],
        given: frozenset[int],
    ) -> Program:
        """The program after the loop at one place and level. It reads sums as ``("sum", value)``,
        pieces of all stages as ``("joined", result)``, stacks as ``("stack", value, microbatch)``.
        ``given``: arguments that are donated to it.
        """
        loop = split.body.call
        results = {v: k for k, v in enumerate(loop.outs)}
        produced = {v for m in tasks for v in m.outs}
        ins: dict[Any, None] = {}
        for m in tasks:
            ins.update(
                (v, None) for v in m.ins if isinstance(v, int) and v not in produced | consts.keys()
            )
            if m.call is None:
                ins.update((name, None) for name in self._pieces(split, results[m.outs[0]], joined))
        names = tuple(ins)
        outs = tuple(v for m in tasks for v in m.outs if v in wanted)
        place = tasks[0].place

        def behind(*values: Any) -> list[Any]:
            env = {**consts, **dict(zip(names, values, strict=True))}
            for m in tasks:
                if m.call is not None:
                    self.evaluate([m.call], env, place)
                else:
                    env[m.outs[0]] = self._result(split, results[m.outs[0]], joined, env, m)
            return [env[v] for v in outs]

        own_way = self._held(place, outs, self.outer)
        held = [shardings.get(v, way) for v, way in zip(outs, own_way, strict=True)]
        donated = tuple(k for k, name in enumerate(names) if name in given)
        run = jax.jit(behind, out_shardings=held, donate_argnums=donated)
        return Program(names, outs, place, run)

    @staticmethod
    def _pieces(split: Split, at: int, joined: frozenset[int]) -> list[Any]:
        out = split.body.call.outs[at]
        if at >= len(split.pieces):
            v = split.body.stacked[at - len(split.pieces)]
            parts = split.body.loop.trips or 0
            return [("stack", v, i) for i in range(parts)] if isinstance(v, int) else []
        if out in joined:
            return [("joined", out)]
        return [("sum", p) for piece in split.pieces[at] for p in piece if isinstance(p, int)]

    @staticmethod
    def _result(split: Split, at: int, joined: frozenset[int], env: dict[Any, Any], m: Made) -> Any:
        """A result of the loop."""
        parts = split.body.loop.trips or 0
        if at >= len(split.pieces):
            v: Any = split.body.stacked[at - len(split.pieces)]
            rows = [env["stack", v, i] if isinstance(v, int) else v.val for i in range(parts)]
            return jnp.stack([jnp.asarray(x) for x in rows])
        start = FlatJaxpr.read(m.ins[0], env)
        if m.outs[0] in joined:
            total = env["joined", m.outs[0]]
        else:
            sums = []
            for piece in split.pieces[at]:
                terms = [env["sum", p] if isinstance(p, int) else p.val * parts for p in piece]
                sums.append(sum(terms[1:], start=terms[0]))
            total = jnp.concatenate(sums) if len(sums) > 1 else sums[0]
        return start + jnp.asarray(total, jnp.result_type(start))


_WORDS = {"F": "forward", "B": "backward", "W": "weights"}
