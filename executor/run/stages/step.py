"""A step whose stages are separate programs, run in the order of a schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from costmodels.orders import Order, Task, Work, simulate
from executor.run.mesh import build_mesh
from executor.run.stages.places import Places, over_stages, spec_of
from executor.run.stages.programs import Builder, Program
from executor.run.stages.sending import Sender, nowhere
from executor.run.stages.walk import Pass, Shapes, Store, passes
from planner.graph.trace import Traced
from planner.plan.plan import Plan
from planner.stages.body import closure
from planner.stages.programs.homes import ALL, Made
from planner.stages.programs.layered import Apart, taken_apart

SMALL = 1 << 20
"""Maximum bytes of a result outside of the state that is sent to all devices."""


class Runner:
    """Runs a step as its programs.

    Attributes:
        shardings: of the arguments, in order.
        places: the devices of all stages and of each.
    """

    def __init__(
        self,
        traced: Traced,
        plan: Plan,
        order: Order,
        devices: Any = None,
        donated: Sequence[int] = (),
    ) -> None:
        self.order, self.traced, self.donated = order, traced, frozenset(donated)
        self.apart: Apart = taken_apart(
            traced, plan.microbatches, len(order.place), order.splits_weights, plan.cuts
        )
        self.places = Places.of(build_mesh(plan.mesh, devices), order.place)
        self.sender, self.shapes = Sender(self.places), Shapes(self.places)
        self._sorted = _in_time(order)
        self._build(traced, plan)

    def _build(self, traced: Traced, plan: Plan) -> None:
        apart, places = self.apart, self.places
        flat, split, where = apart.flat, apart.split, apart.homes
        self.shardings = [
            places.sharding(place, self._spec(leaf.spec, v, leaf.shape))
            for v, leaf, place in zip(flat.inputs, plan.inputs, where.home, strict=True)
        ]
        builder = Builder(traced, plan, places, apart)
        graph = traced.graph
        number = {v: k for k, v in enumerate(graph.inputs)}
        after = {graph.next_values[v]: number[v] for v in graph.inputs if v in graph.next_values}
        self.updates = [after.get(v) for v in graph.outputs]
        final = {
            v: self.shardings[j]
            for v, j in zip(flat.outputs, self.updates, strict=True)
            if isinstance(v, int) and j is not None and where.place[v] == where.home[j]
        }
        loop = flat.calls[apart.at]
        inside, _, over = split.body.loop.split(split.body.flat.inputs)
        consts, _, rows = split.body.loop.split(loop.ins)
        self.outer: dict[int, Any] = dict(zip((*inside, *over), (*consts, *rows), strict=True))
        self.over = frozenset(over)
        given = frozenset(v for parts in where.sliced.values() for part in parts for v in part)
        self.given = {
            v: (u, stage)
            for u, parts in where.sliced.items()
            for stage, part in enumerate(parts)
            for v in part
        }
        literals = {v: u.val for v, u in self.outer.items() if not isinstance(u, int)}
        fixed = {**split.body.flat.consts, **literals}
        self.tasks = {
            key: self._pass(builder.task(t, given, fixed), t) for key, t in split.tasks.items()
        }
        self.readers: dict[int, int] = {}
        for task in self.tasks.values():
            for k in task.others:
                v = task.program.ins[k]
                self.readers[v] = self.readers.get(v, 0) + 1
        self.ahead = self._ahead(builder)
        self.behind = self._behind(builder, final)
        self.specs = {v: s.spec for v, s in zip(flat.inputs, self.shardings, strict=True)}
        self.specs.update(builder.outer)
        self.inner = builder.inner

    def _pass(self, program: Program, task: Any) -> Pass:
        rows = [k for k, v in enumerate(program.ins) if v in self.over]
        once = {*self.over, *self.given, *self.outer}
        others = [k for k, v in enumerate(program.ins) if v not in once]
        return Pass(program, task.outs, task.sums, task.stacked, tuple(rows), tuple(others))

    def _spec(self, spec: Any, v: int, shape: tuple[int, ...]) -> Any:
        """How an argument is sharded at its place."""
        inner = jax.sharding.PartitionSpec(*spec.entries)
        if v not in self.apart.homes.parted or not shape:
            return inner
        whole = over_stages(inner)
        sizes = dict(self.places.mesh.shape)
        axes = whole[0] if isinstance(whole[0], tuple) else (whole[0],)
        if shape[0] % int(np.prod([sizes[a] for a in axes])) == 0:
            return whole
        if shape[0] % len(self.places.stages) == 0:
            return over_stages(jax.sharding.PartitionSpec(None, *inner[1:]))
        return inner

    def _ahead(self, builder: Builder) -> list[Program]:
        """Programs before the loop."""
        apart = self.apart
        flat, where = apart.flat, apart.homes
        out = []
        known = {*flat.inputs, *flat.consts}
        for stage, calls in enumerate(where.ahead):
            outputs = {v for c in calls for v in c.outs}
            need = [
                self.outer.get(v)
                for (_, s), task in apart.split.tasks.items()
                if s == stage
                for v in (*task.fixed, *task.rows)
            ]
            need = list({v for v in need if isinstance(v, int)})
            outs = sorted(v for v in need if isinstance(v, int) and v in outputs)
            read = sorted({v for c in calls for v in c.ins if isinstance(v, int)} & known)
            if outs:
                out.append(builder.once(calls, read, outs, stage, {}))
        sliced = [v for v in where.sliced if v not in known]
        if sliced:
            others = [c for k, c in enumerate(flat.calls) if k != apart.at]
            calls = tuple(closure(others, sliced))
            read = sorted({v for c in calls for v in c.ins if isinstance(v, int)} & known)
            spec = over_stages(jax.sharding.PartitionSpec())
            held = {v: self.places.sharding(ALL, spec) for v in sliced}
            out.append(builder.once(calls, read, sliced, ALL, held))
        return out

    def _behind(self, builder: Builder, final: Mapping[int, Any]) -> list[Program]:
        """Programs after the loop, in order."""
        apart = self.apart
        flat, where = apart.flat, apart.homes
        groups: dict[tuple[int, int], list[Made]] = {}
        for m in where.behind:
            groups.setdefault((m.level, m.place), []).append(m)
        key_of = {v: key for key, group in groups.items() for m in group for v in m.outs}
        wanted = {v for v in flat.outputs if isinstance(v, int)}
        for key, group in groups.items():
            wanted |= {
                v for m in group for v in m.ins if isinstance(v, int) and key_of.get(v) != key
            }
        out = []
        ties = {
            j: v
            for v, j in zip(flat.outputs, self.updates, strict=True)
            if j in self.donated and isinstance(v, int) and v in final
        }
        last = {v: key for key in sorted(groups) for m in groups[key] for v in m.ins if _int(v)}
        given = {
            flat.inputs[j]: key_of[v]
            for j, v in ties.items()
            if key_of.get(v) is not None
            and last.get(flat.inputs[j]) == key_of[v]
            and flat.inputs[j] not in flat.outputs
        }
        for key in sorted(groups):
            group, held = groups[key], {v: s for v, s in final.items() if key_of.get(v) == key}
            program = builder.behind(
                group,
                frozenset(wanted),
                apart.split,
                where.joined,
                flat.consts,
                held,
                frozenset(v for v, at in given.items() if at == key),
            )
            out.append(program)
        return out

    def _outer_spec(self, name: Any) -> Any:
        """How a value outside of the loop is sharded between places."""
        if isinstance(name, int):
            return self.specs.get(name)
        return self.inner.get(name[1]) if name[0] in ("sum", "stack") else None

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Run the step on arguments that are in place; returns its results in order."""
        apart, places = self.apart, self.places
        flat, split, where = apart.flat, apart.split, apart.homes
        values = Store(self.sender, self._outer_spec)
        for v, x, place in zip(flat.inputs, leaves, where.home, strict=True):
            values.held[v] = x, place
        values.held.update((v, (x, ALL)) for v, x in flat.consts.items())
        made_at: dict[tuple[int, int], Any] = {}
        for program in self.ahead:
            results = self.shapes.run(program, values.at(program.ins, program.place))
            for v, x in zip(program.outs, results, strict=True):
                if program.place == ALL:
                    values.held[v] = x, ALL
                else:
                    made_at[v, program.place] = x
        cache: dict[tuple[int, int], Any] = {}

        def constant(v: int, stage: int) -> Any:
            if (v, stage) not in cache:
                if v in self.given:
                    x = places.part(values.held[self.given[v][0]][0], stage)
                else:
                    u = self.outer[v]
                    x = made_at[u, stage] if (u, stage) in made_at else values.at([u], stage)[0]
                cache[v, stage] = x
            return cache[v, stage]

        within = Store(self.sender, lambda name: self.inner.get(name[0]))
        count = self.order.microbatches
        sums, stacks = passes(
            self._sorted, self.tasks, self.readers, constant, within, self.shapes, count
        )
        for v, x in sums.items():
            values.held["sum", v] = x, split.makers[v][1]
        values.held.update(stacks)
        for out in where.joined:
            pieces = split.pieces[split.body.call.outs.index(out)]
            parts = []
            for stage, piece in enumerate(pieces):
                terms = values.at([("sum", p) for p in piece], stage)
                here = places.mine(stage)
                parts.append(sum(terms[1:], start=terms[0]) if here else terms[0])
            values.held["joined", out] = places.joined(parts, self.inner.get(pieces[0][0])), ALL
        for program in self.behind:
            results = self.shapes.run(program, values.at(program.ins, program.place))
            for v, x in zip(program.outs, results, strict=True):
                values.held[v] = x, program.place
        return [self._result(values, v, j) for v, j in zip(flat.outputs, self.updates, strict=True)]

    def _result(self, values: Store, v: Any, j: int | None) -> Any:
        """A result where the next step wants it; small results outside of the state go to all
        devices."""
        if not isinstance(v, int):
            return self.places.put(v.val, self.places.sharding(ALL, jax.sharding.PartitionSpec()))
        x, place = values.held[v]
        if j is not None:
            x = values.at([v], self.apart.homes.home[j])[0]
            return self._as(x, self.shardings[j])
        size = math.prod(x.shape) * x.dtype.itemsize
        if place != ALL and size <= SMALL:
            return values.at([v], ALL)[0]
        return self._as(x, self.places.sharding(place, values.spec(v) or spec_of(x)))

    def _as(self, x: Any, sharding: jax.sharding.NamedSharding) -> Any:
        """An array on the same devices with another sharding; in a process that has none of its
        parts, an array without local shards."""
        if isinstance(x, jax.Array):
            return x if x.sharding == sharding else jax.device_put(x, sharding)
        return nowhere(x, sharding)


def _int(v: Any) -> bool:
    return isinstance(v, int)


def _in_time(order: Order) -> list[Task]:
    """The tasks of all devices, in an order in which the operands of each are available."""
    one = Work(1.0, 1.0, 1.0) if order.splits_weights else Work(1.0, 2.0)
    done = simulate(order, [one] * len(order.place))
    timed = [
        (end, device, task)
        for device, (tasks, ends) in enumerate(zip(order.devices, done.ends, strict=True))
        for task, end in zip(tasks, ends, strict=True)
    ]
    return [task for _, _, task in sorted(timed)]
