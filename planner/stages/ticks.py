"""The loop over microbatches as a pipeline, in one program.

Stages are a dimension of every array, split over the devices of the mesh axis ``stage``. A tick is
one forward and one backward pass of all p stages, each on a different microbatch. Tick t runs the
forward pass of microbatch t - s on stage s, and, from tick p - 1 on, the backward pass of
microbatch t - 2 (p - 1) + s. The last stage runs its backward pass directly after its forward pass
(1F1B; Narayanan et al., "PipeDream", 2019; its flushed form: "Memory-efficient pipeline-parallel
DNN training", 2021). So m microbatches take m + p - 1 forward and m + p - 1 backward passes of a
stage, and no stage holds the residuals of more than 2 p - 1 microbatches.

All devices run the rest together, one microbatch at a time: before the first stage (embeddings),
after the last (logits, loss, and their gradient), and after the first stage's backward pass (the
embeddings' gradient).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.graph.flat import Call, FlatJaxpr
from planner.stages.arrays import by_stage, row_of, shift, with_row
from planner.stages.body import Body, closure
from planner.stages.chains.chain import Chain, Task
from planner.stages.parts import Parts

Env = dict[int, Any]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The loop of ``body``, run as a pipeline of ``count`` stages over ``parts`` microbatches."""

    body: Body
    chain: Chain
    rest: Parts
    count: int
    parts: int

    def run(self, values: Sequence[Any]) -> list[Any]:
        """The results of the loop from its operands."""
        with compat.provenance(self.body.call.origin):
            return _Run(self, values).results()


class _Run:
    """One evaluation."""

    def __init__(self, pipeline: Pipeline, values: Sequence[Any]) -> None:
        self.pipeline = p = pipeline
        body, self.count, self.parts = p.body, p.count, p.parts
        consts, self.start, rows = body.loop.split(values)
        flat = body.flat
        numbers, _, over = body.loop.split(flat.inputs)
        self.free: Env = {**dict(zip(numbers, consts, strict=True)), **flat.consts}
        self.rows: Env = dict(zip(over, rows, strict=True))
        self.ahead, self.back = p.chain.forward, p.chain.backward
        self.stage = jnp.arange(self.count)
        once = [c for c in p.rest.base if not body.batch.intersection(c.outs)]
        wanted = [v for c in flat.calls for v in c.ins if isinstance(v, int)]
        wanted += [v for c in p.chain.before for v in c.ins if isinstance(v, int)]
        flat.run(closure(once, wanted), self.free)
        flat.run(p.chain.before, self.free)
        self.base = [c for c in p.rest.base if body.batch.intersection(c.outs)]
        self.depth = 2 * self.count - 1

    # work done once per microbatch

    def at(self, values: Sequence[Any], i: Any) -> Env:
        """Values of microbatch ``i`` that depend on the batch alone."""
        env = dict(self.free)
        numbers = [v for v in values if isinstance(v, int)]
        calls = closure(self.base, numbers)
        read = {v for c in calls for v in c.ins if isinstance(v, int)} | set(numbers)
        for v in sorted(read & self.rows.keys()):
            env[v] = row_of(self.rows[v], i)
        FlatJaxpr.run(calls, env)
        return env

    def rest(self, calls: Sequence[Call], outs: Sequence[Any], given: Env, i: Any) -> list[Any]:
        """The results ``outs`` of calls outside the stages, for microbatch ``i``."""
        available = {v for c in calls for v in c.outs} | given.keys()
        read = [v for c in calls for v in c.ins] + list(outs)
        env = self.at([v for v in read if isinstance(v, int) and v not in available], i)
        env.update(given)
        FlatJaxpr.run(calls, env)
        return [FlatJaxpr.read(v, env) for v in outs]

    # stages

    def lanes(self, task: Task) -> Callable[..., Any]:
        """The task of all stages at once: a function of (microbatches, carries, residuals), each
        [stages, ...]."""
        stacks = list(task.stacks)
        joined = [by_stage(task.stacks[v].joined(self.free, self.count)) for v in stacks]
        rows = list(task.rows)
        over = [by_stage(jnp.stack([self.rows[r] for r in task.rows[v].values])) for v in rows]
        if task is self.ahead:
            out = sorted({*(u for u, _ in task.exits), *self.back.residuals, *task.sums})
            out = [v for v in out if v in {x for c in task.calls for x in c.outs}]
        else:
            out = sorted({*(u for u, _ in task.exits), *task.sums})
        out = sorted({*out, *(carry for _, carry, _ in task.carries)})

        def lane(i: Any, pieces: list[Any], sliced: list[Any], carries: Any, left: Any) -> Env:
            env = self.at(sorted(task.shared), i)
            env.update(zip(stacks, pieces, strict=True))
            env.update((v, row_of(x, i)) for v, x in zip(rows, sliced, strict=True))
            env.update(left)
            env.update(zip((read for read, _, _ in task.carries), carries, strict=True))
            FlatJaxpr.run(task.calls, env)
            return {v: env[v] for v in out}

        def run(i: Any, carries: list[Any], left: Env) -> Env:
            env = jax.vmap(lane)(jnp.clip(i, 0, self.parts - 1), joined, over, carries, left)
            return {v: by_stage(x) for v, x in env.items()}

        return run

    def picked(self, x: Any, at: int) -> Any:
        """The row of one stage, on all devices."""
        mask = (self.stage == at).reshape(-1, *(1,) * (x.ndim - 1))
        chosen = jnp.where(mask, x, jnp.zeros((), x.dtype))
        if x.dtype == jnp.bool_:
            return chosen.any(axis=0)
        return chosen.sum(axis=0, dtype=x.dtype)

    def entered(self, x: Any, first: Any, at: int) -> Any:
        """[stages, ...] with the row of one stage replaced by ``first``."""
        mask = (self.stage == at).reshape(-1, *(1,) * (x.ndim - 1))
        return by_stage(jnp.where(mask, jnp.broadcast_to(first, x.shape), x))

    # the loop

    def results(self) -> list[Any]:
        count, parts = self.count, self.parts
        forward, backward = self.lanes(self.ahead), self.lanes(self.back)
        residuals = self.back.residuals
        first = [c for _, _, c in self.ahead.carries]

        def step_forward(t: Any, h: list[Any], rings: Env) -> tuple[list[Any], Env, Env, Env]:
            begun = self.rest([], first, {}, jnp.clip(t, 0, parts - 1))
            h = [self.entered(x, a, 0) for x, a in zip(h, begun, strict=True)]
            env = forward(t - self.stage, h, {})
            inputs = dict(zip((r for r, _, _ in self.ahead.carries), h, strict=True))
            rings = {v: self.put(rings[v], env.get(v, inputs.get(v)), t) for v in rings}
            return [shift(env[u], 1) for _, u, _ in self.ahead.carries], rings, env, inputs

        def step_backward(t: Any, d: list[Any], rings: Env) -> tuple[list[Any], Env]:
            i = t - 2 * (count - 1) + self.stage
            left = {v: self.take(rings[v], i + self.stage) for v in residuals}
            env = backward(i, d, left)
            return [shift(env[u], -1) for _, u, _ in self.back.carries], env

        def add(sums: Env, task: Task, env: Env, i: Any) -> Env:
            valid = (i >= 0) & (i < parts)
            out = dict(sums)
            for v in task.sums:
                mask = valid.reshape(-1, *(1,) * (env[v].ndim - 1))
                out[v] = by_stage(sums[v] + jnp.where(mask, env[v], 0).astype(sums[v].dtype))
            return out

        def tail(t: Any, sums: Env, env: Env) -> Env:
            i = t - 2 * (count - 1)
            given = {r: self.picked(env[u], 0) for u, r in self.back.exits}
            outs = self.rest(self.tail, self.late, given, jnp.clip(i, 0, parts - 1))
            valid = (i >= 0) & (i < parts)
            new = dict(sums)
            for v, x in zip(self.late, outs, strict=True):
                new[v] = sums[v] + jnp.where(valid, x, 0).astype(sums[v].dtype)
            return new

        def warm(state: Any, t: Any) -> Any:
            h, d, rings, sums = state
            h, rings, env, _ = step_forward(t, h, rings)
            return (h, d, rings, add(sums, self.ahead, env, t - self.stage)), None

        def steady(state: Any, t: Any) -> Any:
            h, d, rings, sums = state
            h, rings, env, _ = step_forward(t, h, rings)
            sums = add(sums, self.ahead, env, t - self.stage)
            i = t - (count - 1)
            given = {r: self.picked(env[u], count - 1) for u, r in self.ahead.exits}
            wanted = [*self.begins, *self.soon, *self.pipeline.body.stacked]
            outs = iter(self.rest(self.pipeline.rest.middle, wanted, given, i))
            d = [self.entered(x, next(outs), count - 1) for x in d]
            for v in self.soon:
                sums = {**sums, v: sums[v] + next(outs).astype(sums[v].dtype)}
            d, env = step_backward(t, d, rings)
            sums = add(sums, self.back, env, t - 2 * (count - 1) + self.stage)
            return (h, d, rings, tail(t, sums, env)), list(outs)

        def cool(state: Any, t: Any) -> Any:
            h, d, rings, sums = state
            d, env = step_backward(t, d, rings)
            sums = add(sums, self.back, env, t - 2 * (count - 1) + self.stage)
            return (h, d, rings, tail(t, sums, env)), None

        state: Any = self.zeros(forward, backward)
        state, _ = jax.lax.scan(warm, state, jnp.arange(count - 1))
        steps = jnp.arange(count - 1, count - 1 + parts)
        state, stacks = jax.lax.scan(steady, state, steps)
        steps = jnp.arange(count - 1 + parts, 2 * (count - 1) + parts)
        state, _ = jax.lax.scan(cool, state, steps)
        return self.finished(state[3], stacks)

    @property
    def tail(self) -> Sequence[Call]:
        return self.pipeline.rest.tail

    @property
    def begins(self) -> list[Any]:
        return [c for _, _, c in self.back.carries]

    @property
    def soon(self) -> list[int]:
        """Sums of the part after the last stage, and of values that depend on the batch alone."""
        return self.pipeline.rest.soon

    @property
    def late(self) -> list[int]:
        """Sums of the part after the first stage's backward pass."""
        return self.pipeline.rest.late

    def put(self, ring: Any, x: Any, t: Any) -> Any:
        """Store each stage's residual of tick ``t``."""
        return by_stage(with_row(ring, x, t % self.depth))

    def take(self, ring: Any, t: Any) -> Any:
        """The residual of stage s from tick ``t[s]``, for each s."""
        return by_stage(jax.vmap(row_of)(ring, t % self.depth))

    def zeros(self, forward: Any, backward: Any) -> Any:
        """The state before the first tick."""
        zero = jnp.zeros((), jnp.int32)
        count = self.count

        def lanes(run: Any, ins: Sequence[Any], left: Any) -> Any:
            grown = [jax.ShapeDtypeStruct((count, *x.shape), x.dtype) for x in ins]
            return jax.eval_shape(lambda a, b: run(self.stage, a, b), grown, left)

        first = [c for _, _, c in self.ahead.carries]
        begun = jax.eval_shape(lambda i: self.rest([], first, {}, i), zero)
        ahead = lanes(forward, begun, {})
        inputs = dict(zip((r for r, _, _ in self.ahead.carries), begun, strict=True))
        left = {}
        for v in self.back.residuals:
            x = ahead.get(v)
            left[v] = (
                x
                if x is not None
                else jax.ShapeDtypeStruct((count, *inputs[v].shape), inputs[v].dtype)
            )
        given = {
            r: jax.ShapeDtypeStruct(ahead[u].shape[1:], ahead[u].dtype) for u, r in self.ahead.exits
        }
        middle = self.pipeline.rest.middle
        ends = jax.eval_shape(lambda g, i: self.rest(middle, self.begins, g, i), given, zero)
        back = lanes(backward, ends, left)

        def filled(x: Any) -> Any:
            return by_stage(jnp.zeros(x.shape, x.dtype))

        h = [filled(ahead[u]) for _, u, _ in self.ahead.carries]
        d = [filled(back[u]) for _, u, _ in self.back.carries]
        rings = {
            v: by_stage(jnp.zeros((count, self.depth, *x.shape[1:]), x.dtype))
            for v, x in left.items()
        }
        sums: Env = {}
        for task, env in ((self.ahead, ahead), (self.back, back)):
            for v, stack in task.sums.items():
                sums[v] = by_stage(jnp.zeros(env[v].shape, self.types[stack.values[0]][1]))
        sums.update((v, jnp.zeros(*self.types[v])) for v in (*self.soon, *self.late))
        return h, d, rings, sums

    @functools.cached_property
    def types(self) -> dict[int, tuple[tuple[int, ...], Any]]:
        """Shape and dtype in which each value is accumulated."""
        sum_types: dict[int, tuple[tuple[int, ...], Any]] = {}
        avals = {
            v: var.aval
            for c in self.pipeline.body.flat.calls
            for v, var in zip(c.outs, c.eqn.outvars, strict=False)
        }
        for value, x in zip(self.pipeline.body.summed, self.start, strict=True):
            for v in value if isinstance(value, tuple) else (value,):
                if isinstance(v, int):
                    whole = not isinstance(value, tuple)
                    sum_types[v] = (x.shape if whole else compat.aval_shape(avals[v]), x.dtype)
        return sum_types

    def finished(self, sums: Env, stacks: Sequence[Any]) -> list[Any]:
        """The loop's results."""
        totals: Env = {v: sums[v] for v in (*self.soon, *self.late)}
        for task in (self.ahead, self.back):
            for v, stack in task.sums.items():
                totals.update(stack.apart(sums[v]))
        body = self.pipeline.body
        out = []
        for v, x in zip(body.summed, self.start, strict=True):
            if isinstance(v, tuple):
                total = jnp.concatenate([totals[k] for k in v])
            else:
                total = totals[v] if isinstance(v, int) else v.val * self.parts
            out.append(x + jnp.asarray(total, x.dtype))
        return [*out, *stacks]
