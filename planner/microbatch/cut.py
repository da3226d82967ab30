"""Divides a step into what runs once, what runs in every microbatch, and what runs after them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from planner import compat
from planner.annotate import FREE as OPEN
from planner.annotate import shard
from planner.errors import RequestError
from planner.graph.jaxpr.walk import STRUCTURED, loop_of
from planner.graph.trace import Traced
from planner.microbatch.algebra import FREE, MAP, POST, SUM, Class
from planner.microbatch.bodies.draws import drawing as draws_of
from planner.microbatch.bodies.draws import draws as has_draws
from planner.microbatch.bodies.groups import without_axes
from planner.microbatch.bodies.merged import merged
from planner.microbatch.classes import Classes
from planner.microbatch.errors import NotExactError
from planner.microbatch.pairs import Node, Number, Operand, Pair
from planner.microbatch.shares import Shares
from planner.microbatch.statistics.own import Own


@dataclass(eq=False)
class Cut:
    """A step in microbatches.

    Attributes:
        shares, examples: how the batch is cut, and how many examples it has.
        once: equations that run before the loop, on the whole batch if they read it.
        body: equations of the loop, with the numbers (such as the 1/B of a mean) of the whole step.
        after: equations that run after the loop.
        sliced: values of the whole batch that the loop iterates over.
        drawing: functions that compute the equations of ``body`` which make values for the whole
            batch inside, by position.
        summed, stacked, kept: values that the loop adds up, stacks, and returns unchanged because
            they are the same in every iteration.
    """

    whole: Traced
    step: Pair
    shares: Shares
    examples: int
    once: list[Node]
    body: list[tuple[Node, Any]]
    after: list[Node]
    sliced: list[int]
    summed: list[int]
    stacked: list[int]
    kept: list[int]
    apart: bool
    drawing: dict[int, Any]
    own: Own | None
    coupled: tuple[str, ...]

    @staticmethod
    def of(
        whole: Traced,
        step: Pair,
        step_classes: Classes,
        batch: Sequence[int],
        shares: Shares,
        apart: bool,
        axes: frozenset[str],
        own_stats: Own | None,
    ) -> Cut:
        """Sort the equations into the three parts; marks in the loop leave out ``axes``."""
        of, live = step_classes.of, step.live() if own_stats is None else [True] * len(step.nodes)
        nodes = [n for n, x in zip(step.nodes, live, strict=True) if x]
        inside, after = _sorted(nodes, step_classes, apart)
        loop_outs = {o for n in inside for o in n.outs}
        if own_stats is not None:
            inside = [own_stats.inside.get(id(n), n) for n in inside]
        ends = {o for o in step.outputs if not isinstance(o, Number)}
        read_after = {v for n in after for v in n.values} | ends
        waiting = _waiting(inside, read_after, of) if own_stats is None else []
        if waiting:
            behind = {id(n) for n in after} | {id(n) for n in waiting}
            after = [n for n in nodes if id(n) in behind]
            read_after.update(v for n in waiting for v in n.values)
            loop_outs -= {o for n in waiting for o in n.outs}
        summed = sorted(v for v in loop_outs & read_after if of[v] is SUM)
        stacked = sorted(v for v in loop_outs & read_after if of[v] is MAP)
        unchanged = sorted(v for v in loop_outs & read_after if of[v] < MAP)
        needed = set(summed) | set(stacked) | set(unchanged)
        body = []
        for n in reversed(inside):
            if needed.intersection(n.outs):
                body.append(n)
                needed.update(n.values)
        body.reverse()
        outside = (needed | read_after) - {o for n in body for o in n.outs}
        once, behind = [], {id(n) for n in after}
        for n in reversed(nodes):
            if id(n) not in behind and (outside.intersection(n.outs) or n.whole.effects):
                once.append(n)
                outside.update(n.values)
        once.reverse()
        inputs = {step.inputs[k] for k in batch}
        reads = {v for n in body for v in n.values}
        sliced = sorted((inputs | step_classes.drawn) & (reads | set(stacked)))
        numbers = own_stats is None  # whether they are those of the whole batch
        run = [(n, merged(n.whole, n.small) if numbers else n.small) for n in body]
        if own_stats is not None:
            for v in (*summed, *stacked):
                own_stats.factor(v, v in set(stacked))
        if axes:
            run = [(n, without_axes(eqn, axes)) for n, eqn in run]
        examples, _ = step.counts(step.inputs[batch[0]])
        part = functools.partial(shares.part, examples=examples)
        drawing = {
            k: draws_of(n.whole, eqn, step_classes.inside, part)
            for k, (n, eqn) in enumerate(run)
            if n.name in STRUCTURED and has_draws(n.whole, step_classes.inside)
        }
        return Cut(
            whole,
            step,
            shares,
            examples,
            once,
            run,
            after,
            sliced,
            summed,
            stacked,
            unchanged,
            apart,
            drawing,
            own_stats,
            step_classes.coupled,
        )

    def __call__(self, *args: Any) -> Any:
        """Run the step."""
        leaves, tree = jax.tree_util.tree_flatten(args)
        if tree != self.whole.in_tree:
            raise RequestError("microbatches: the arguments have another structure")
        env: dict[int, Any] = dict(self.step.consts)
        env.update(zip(self.step.inputs, leaves, strict=True))
        for n in self.once:
            env.update(_run(n, n.whole, env))
        if self.body:
            self._loop(env)
        for n in self.after:
            env.update(_run(n, n.whole, env))
        out = [_read(o, env) for o in self.step.outputs]
        return jax.tree_util.tree_unflatten(self.whole.out_tree, out)

    def _loop(self, env: dict[int, Any]) -> None:
        """Run all microbatches; adds their sums, stacks and unchanged values to ``env``."""

        at = self.group_axes()
        loop_values = {o for n, _ in self.body for o in n.outs} | set(self.sliced)
        read = {v for n, _ in self.body for v in n.values} | set(self.stacked) | set(self.kept)
        outer = sorted(v for v in read - loop_values if isinstance(env[v], jax.core.Tracer))
        constants = self._constants()
        behind = [k for k, v in enumerate(outer) if v not in constants]

        def turn(carry: tuple[list[Any], list[Any]], row: tuple[list[Any], Any]) -> Any:
            slices, number = row
            # without these barriers, a compiler gathers parameters before the loop, reduces
            # gradients after it, and stores both whole; if that pays, the plan does it explicitly
            held = [*(env[v] for v in outer), *slices]
            if not self.apart:
                some = [*behind, *range(len(outer), len(held))]
                for k, x in zip(some, _alone(tuple(held[k] for k in some)), strict=True):
                    held[k] = x
            outs = self._shared(env, outer, held, number)
            sums = [
                a + (x if self.apart else _alone(x)).astype(a.dtype)
                for a, x in zip(carry[0], outs[0], strict=True)
            ]
            return (sums, outs[1]), outs[2]

        def zeros(v: int, wide: bool) -> Any:
            aval = self.step.avals[v][1]
            dtype = jnp.promote_types(aval.dtype, jnp.float32) if wide else aval.dtype
            floating = jnp.issubdtype(aval.dtype, jnp.floating)
            shape = list(aval.shape)
            if wide and self.shares.replicas > 1:
                shape.insert(at.get(v, 0), self.shares.replicas)
            return jnp.zeros(shape, dtype if floating else aval.dtype)

        if self.shares.turns > 1:
            start = [zeros(v, True) for v in self.summed], [zeros(v, False) for v in self.kept]
            slices = [self.shares.cut(self._front(v, env[v]), self.examples) for v in self.sliced]
            numbers = jnp.arange(self.shares.turns) if self.drawing else None
            rows = slices, numbers
            (sums, last), stacks = jax.lax.scan(turn, start, rows, length=self.shares.turns)
        else:
            only = [self.shares.only(self._front(v, env[v])) for v in self.sliced]
            held = [*(env[v] for v in outer), *only]
            sums, last, stacks = self._shared(env, outer, held, jnp.int32(0))
        for v, x in zip(self.summed, sums, strict=True):
            if self.shares.replicas > 1:  # the sum over groups may be sharded
                x = jax.lax.reduce(x, x.dtype.type(0), jax.lax.add, (at[v],))
                x = shard(x, *[OPEN] * x.ndim)
            env[v] = self._scaled(v, x, False).astype(self.step.avals[v][0].dtype)
        env.update(zip(self.kept, last, strict=True))
        for v, x in zip(self.stacked, stacks, strict=True):
            (d,) = self.step.scaled(v)
            whole = compat.aval_shape(self.step.avals[v][0])
            env[v] = self._scaled(v, self.shares.joined(x, whole, d, self.examples), True)

    def _constants(self) -> set[int]:
        """The values computed before the loop from literals alone, such as masks and positions."""
        constants: set[int] = set()
        for n in self.once:
            if constants.issuperset(n.values):
                constants.update(n.outs)
        return constants

    def _front(self, value: int, array: Any) -> Any:
        """A sliced value with its examples first; random numbers may have samples before them."""
        (d,) = self.step.scaled(value)
        return jnp.moveaxis(array, d, 0) if d else array

    def _back(self, value: int, share: Any) -> Any:
        """A share of a sliced value, with its examples moved back to their dimension."""
        (d,) = self.step.scaled(value)
        return jnp.moveaxis(share, 0, d) if d else share

    def _scaled(self, value: int, array: Any, stacked: bool) -> Any:
        """The result of all microbatches, scaled to that of the whole batch."""
        factor = 1.0 if self.own is None else self.own.factor(value, stacked)
        return array if factor == 1.0 else array * jnp.asarray(factor, array.dtype)

    def group_axes(self) -> dict[int, int]:
        """Per sum, the position of its dimension of groups. It follows the dimension of a scan's
        iterations, which stays first so that scanned layers can be divided between stages."""
        makers = {o: n for n, _ in self.body for o in n.outs}
        axes: dict[int, int] = {}
        for v in self.summed:
            n = makers.get(v)
            while n is not None and n.name in ("convert_element_type", "mul") and n.values:
                n = makers.get(n.values[0])
            axes[v] = 0
            if n is not None and n.name == "scan" and v not in n.outs[: loop_of(n.whole).carries]:
                axes[v] = 1 if self.step.avals[v][1].shape else 0
        return axes

    def _shared(
        self, env: Mapping[int, Any], outer: list[int], held: list[Any], number: Any
    ) -> Any:
        """One iteration: the summed, unchanged and stacked values. With several replicas, sums have
        a dimension of replicas at ``group_axes``, and stacks have one in front."""

        def share(slices: list[Any], others: list[Any], group: Any = None) -> Any:
            inner = dict(env)
            inner.update(zip(outer, others, strict=True))
            inner.update((v, self._back(v, x)) for v, x in zip(self.sliced, slices, strict=True))
            share_numbers = [x for x in (number, group) if x is not None]
            small = self.own is not None
            for k, (n, eqn) in enumerate(self.body):
                if k in self.drawing:
                    drawn_values = self.drawing[k](
                        [_read(i, inner, small) for i in n.ins], share_numbers
                    )
                    inner.update(zip(n.outs, drawn_values, strict=True))
                else:
                    inner.update(_run(n, eqn, inner, small))
            return [[inner[v] for v in vs] for vs in (self.summed, self.kept, self.stacked)]

        others, slices = held[: len(outer)], held[len(outer) :]
        if self.shares.replicas == 1:
            return share(slices, others)
        try:
            at = self.group_axes()
            out_axes = [[at[v] for v in self.summed], 0, 0]
            groups = jnp.arange(self.shares.replicas) if self.drawing else None
            mapped = jax.vmap(
                share,
                (0, None, 0 if self.drawing else None),
                out_axes,
                axis_size=self.shares.replicas,
            )
            sums, unchanged, stacks = mapped(slices, others, groups)
        except NotImplementedError as error:  # an operation without a batching rule
            raise NotExactError(
                f"replicas={self.shares.replicas}: the step can't be computed for several groups "
                f"of examples at once: {error}; plan with replicas=1, which reduces gradients in "
                "every microbatch"
            ) from error
        return sums, [x[0] for x in unchanged], stacks


def _sorted(
    nodes: Sequence[Node], step_classes: Classes, apart: bool
) -> tuple[list[Node], list[Node]]:
    """The equations that run in the loop, and those that run after it; others can run before it."""
    of = step_classes.of
    inside, after = [], []
    late: set[int] = set()  # FREE results of equations in the loop
    for n in nodes:
        classes = {of[o] for o in n.outs}
        here = classes & {MAP, SUM} and not step_classes.drawn.intersection(n.outs)
        if apart and classes == {SUM} and MAP not in {of[v] for v in n.values}:
            after.append(n)  # sums of sums can wait
        elif n.whole.effects and any(of[v] > MAP or v in late for v in n.values):
            after.append(n)
        elif here or (POST not in classes and late.intersection(n.values)):
            inside.append(n)
            late.update(o for o in n.outs if of[o] is FREE)
        elif POST in classes:
            after.append(n)
    return inside, after


def _waiting(inside: Sequence[Node], read_after: set[int], of: Mapping[int, Class]) -> list[Node]:
    """Equations of the loop that can run after it instead, on sums that are read there anyway: of a
    gradient and a tenth of it, only one is added up."""
    derived: dict[int, Node] = {}
    for n in inside:
        sums = [v for v in n.values if of[v] is SUM]
        alone = {of[o] for o in n.outs} == {SUM} and MAP not in {of[v] for v in n.values}
        if n.name in STRUCTURED or not alone:
            continue
        if all(v in derived or v in read_after for v in sums):
            derived.update(dict.fromkeys(n.outs, n))
    waiting: dict[int, Node] = {}
    wanted = [v for v in read_after if v in derived]
    while wanted:
        n = derived[wanted.pop()]
        if id(n) not in waiting:
            waiting[id(n)] = n
            wanted += [v for v in n.values if v in derived]
    return list(waiting.values())


def _alone(value: Any) -> Any:
    """Values behind a barrier: they are complete before they are read."""
    return jax.lax.optimization_barrier(value)


def _read(operand: Operand, env: dict[int, Any], small: bool = False) -> Any:
    if isinstance(operand, Number):
        return operand.small if small else operand.whole
    return env[operand]


def _run(node: Node, eqn: Any, env: dict[int, Any], small: bool = False) -> dict[int, Any]:
    ins = [_read(i, env, small) for i in node.ins]
    return dict(zip(node.outs, compat.evaluate_equation(eqn, ins, node.origin), strict=True))
