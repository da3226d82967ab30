"""A step whose stages are programs of their own, run in the order of a schedule."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from costmodels.orders import Order, Task, Work, simulate
from executor.run.mesh import build_mesh
from executor.run.stages.places import Places, over_stages
from executor.run.stages.programs import Builder, Program
from planner.graph.trace import Traced
from planner.plan.plan import Plan
from planner.stages.body import closure
from planner.stages.programs.homes import ALL, Made
from planner.stages.programs.layered import Apart, taken_apart

log = logging.getLogger("meshwright")

SMALL = 1 << 20
"""Bytes up to which a result that is no state comes to all devices."""


@dataclass(eq=False)
class _Values:
    """Values of one step by name, where each is, and their copies elsewhere."""

    places: Places
    held: dict[Any, tuple[Any, int]]
    copies: dict[tuple[Any, int], Any]

    def at(self, name: Any, place: int) -> Any:
        """A value at a place."""
        x, here = self.held[name]
        if here == place:
            return x
        if (name, place) not in self.copies:
            self.copies[name, place] = self.places.moved(x, here, place)
        return self.copies[name, place]

    def drop(self, names: Sequence[Any]) -> None:
        """Forget values."""
        for name in names:
            self.held.pop(name, None)
            for place in range(len(self.places.stages)):
                self.copies.pop((name, place), None)


class Runner:
    """Runs a step in its programs.

    Attributes:
        in_shardings, places: of the arguments, in order.
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
            traced, plan.microbatches, plan.stages, order.splits_weights, plan.cuts
        )
        self.places = Places.of(build_mesh(plan.mesh, devices))
        self._sorted = _in_time(order)
        self._build(traced, plan)

    def _build(self, traced: Traced, plan: Plan) -> None:
        apart, places = self.apart, self.places
        flat, split, where = apart.flat, apart.split, apart.homes
        self.shardings = [
            places.sharding(place, self._spec(leaf.spec, v, leaf.shape))
            for v, leaf, place in zip(flat.inputs, plan.inputs, where.home, strict=True)
        ]
        builder = Builder(traced, plan, places, apart.starts)
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
        self.tasks = {k: builder.task(t, given, fixed) for k, t in split.tasks.items()}
        self.ahead = self._ahead(builder)
        self.behind = self._behind(builder, final)
        self._plan_drops()

    def _spec(self, spec: Any, v: int, shape: tuple[int, ...]) -> Any:
        """How an argument lies at its place."""
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

    def _ahead(self, builder: Builder) -> list[tuple[int, Program]]:
        """Programs in front of the loop."""
        apart = self.apart
        flat, where = apart.flat, apart.homes
        out = []
        known = {*flat.inputs, *flat.consts}
        for stage, calls in enumerate(where.ahead):
            made = {v for c in calls for v in c.outs}
            need = [
                self.outer.get(v)
                for (_, s), task in apart.split.tasks.items()
                if s == stage
                for v in (*task.fixed, *task.rows)
            ]
            need = list({v for v in need if isinstance(v, int)})
            outs = sorted(v for v in need if isinstance(v, int) and v in made)
            read = sorted({v for c in calls for v in c.ins if isinstance(v, int)} & known)
            if outs:
                out.append((stage, builder.once(calls, read, outs, stage, {})))
        sliced = [v for v in where.sliced if v not in known]
        if sliced:
            others = [c for k, c in enumerate(flat.calls) if k != apart.at]
            calls = tuple(closure(others, sliced))
            read = sorted({v for c in calls for v in c.ins if isinstance(v, int)} & known)
            spec = over_stages(jax.sharding.PartitionSpec())
            held = {v: self.places.sharding(ALL, spec) for v in sliced}
            out.append((ALL, builder.once(calls, read, sliced, ALL, held)))
        return out

    def _behind(self, builder: Builder, final: Mapping[int, Any]) -> list[tuple[int, Program]]:
        """Programs behind the loop, in order."""
        apart = self.apart
        flat, where = apart.flat, apart.homes
        groups: dict[tuple[int, int], list[Made]] = {}
        for m in where.behind:
            groups.setdefault((m.level, m.place), []).append(m)
        key_of = {v: key for key, made in groups.items() for m in made for v in m.outs}
        wanted = {v for v in flat.outputs if isinstance(v, int)}
        for key, made in groups.items():
            wanted |= {
                v for m in made for v in m.ins if isinstance(v, int) and key_of.get(v) != key
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
            made, held = groups[key], {v: s for v, s in final.items() if key_of.get(v) == key}
            program = builder.behind(
                made,
                frozenset(wanted),
                apart.split,
                where.joined,
                flat.consts,
                held,
                frozenset(v for v, at in given.items() if at == key),
            )
            out.append((key[1], program))
        return out

    def _plan_drops(self) -> None:
        """After which task each value of a microbatch is not needed any more."""
        self.readers: dict[int, int] = {}
        for program in self.tasks.values():
            for v in program.ins:
                self.readers[v] = self.readers.get(v, 0) + 1

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """The results of the step, in order, for its arguments, which are in place."""
        apart, places = self.apart, self.places
        flat, split, where = apart.flat, apart.split, apart.homes
        values = _Values(places, {}, {})
        for v, x, place in zip(flat.inputs, leaves, where.home, strict=True):
            values.held[v] = x, place
        values.held.update((v, (x, ALL)) for v, x in flat.consts.items())
        made_at: dict[tuple[int, int], Any] = {}
        for place, program in self.ahead:
            results = program.run(*(values.at(v, place) for v in program.ins))
            for v, x in zip(program.outs, results, strict=True):
                if place == ALL:
                    values.held[v] = x, place
                else:
                    made_at[v, place] = x
        cache: dict[tuple[int, int], Any] = {}

        def constant(v: int, stage: int) -> Any:
            """What does not change between microbatches, and the whole batch."""
            if (v, stage) not in cache:
                if v in self.given:
                    u, _ = self.given[v]
                    x = places.part(values.held[u][0], stage)
                else:
                    u = self.outer[v]
                    x = made_at[u, stage] if (u, stage) in made_at else values.at(u, stage)
                cache[v, stage] = x
            return cache[v, stage]

        rows: dict[tuple[int, int], list[Any]] = {}
        env: dict[tuple[int, int], tuple[Any, int]] = {}
        copies: dict[tuple[int, int, int], Any] = {}
        left = {}
        sums: dict[int, Any] = {}
        stacks: dict[tuple[Any, ...], tuple[Any, int]] = {}

        def read(v: int, stage: int, i: int) -> Any:
            if v in self.over:
                if (v, stage) not in rows:
                    rows[v, stage] = _rows(constant(v, stage), self.order.microbatches)
                return rows[v, stage][i]
            if v in self.given or v in self.outer:
                return constant(v, stage)
            x, here = env[v, i]
            if here == stage:
                return x
            if (v, i, stage) not in copies:
                copies[v, i, stage] = places.moved(x, here, stage)
            return copies[v, i, stage]

        for kind, stage, i in self._sorted:
            task, program = split.tasks[kind, stage], self.tasks[kind, stage]
            results = program.run(*(read(v, stage, i) for v in program.ins))
            found = dict(zip(program.outs, results, strict=True))
            for v in task.outs:
                env[v, i] = found[v], stage
                left[v, i] = self.readers.get(v, 0)
            new = [found[v] for v in task.sums]
            if task.sums:
                known = [sums[v] for v in task.sums] if task.sums[0] in sums else None
                sums.update(
                    zip(task.sums, new if known is None else _added(known, new), strict=True)
                )
            for v in task.stacked:
                stacks["stack", v, i] = found[v], stage
            for v in program.ins:
                if (v, i) in left:
                    left[v, i] -= 1
                    if not left[v, i]:
                        del env[v, i], left[v, i]
                        for s in range(split.count):
                            copies.pop((v, i, s), None)
        for v, x in sums.items():
            values.held["sum", v] = x, split.makers[v][1]
        values.held.update(stacks)
        for out in where.joined:
            pieces = split.pieces[split.body.call.outs.index(out)]
            parts = []
            for stage, piece in enumerate(pieces):
                total = sums[piece[0]]
                for p in piece[1:]:
                    total = total + places.moved(sums[p], split.makers[p][1], stage)
                parts.append(total)
            values.held["joined", out] = places.joined(parts), ALL
        for place, program in self.behind:
            results = program.run(*(values.at(v, place) for v in program.ins))
            for v, x in zip(program.outs, results, strict=True):
                values.held[v] = x, place
        return [self._result(values, v, j) for v, j in zip(flat.outputs, self.updates, strict=True)]

    def _result(self, values: _Values, v: Any, j: int | None) -> Any:
        """A result where the next step wants it; small ones that are no state everywhere."""
        if not isinstance(v, int):
            spec = jax.sharding.PartitionSpec()
            return jax.device_put(v.val, self.places.sharding(ALL, spec))
        x, place = values.held[v]
        if j is not None:
            return x if x.sharding == self.shardings[j] else jax.device_put(x, self.shardings[j])
        small = place != ALL and x.nbytes <= SMALL
        return self.places.moved(x, place, ALL) if small else x


def _int(v: Any) -> bool:
    return isinstance(v, int)


def _in_time(order: Order) -> list[Task]:
    """The tasks of all devices in an order in which each finds what it reads."""
    one = Work(1.0, 1.0, 1.0) if order.splits_weights else Work(1.0, 2.0)
    done = simulate(order, [one] * len(order.place))
    timed = [
        (end, device, task)
        for device, (tasks, ends) in enumerate(zip(order.devices, done.ends, strict=True))
        for task, end in zip(tasks, ends, strict=True)
    ]
    return [task for _, _, task in sorted(timed)]


@functools.partial(jax.jit, donate_argnums=0)
def _added(old: list[Any], new: list[Any]) -> list[Any]:
    return [a + b for a, b in zip(old, new, strict=True)]


@functools.partial(jax.jit, static_argnums=1)
def _rows(x: Any, count: int) -> list[Any]:
    return [x[i] for i in range(count)]
