"""The arguments and results of a rolled step, and the step itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from planner.arguments.outcome import StepOutcome
from planner.graph.flat import FlatJaxpr
from planner.graph.trace import Traced
from planner.rolled.layout import Layout
from planner.rolled.order import Unit, ordered
from planner.rolled.running import Values


def struct_of(rows: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    """The type of a stack of rows."""
    one = rows[0]
    return jax.ShapeDtypeStruct((len(rows), *one.shape), one.dtype, weak_type=one.weak_type)


@dataclass(eq=False)
class Form:
    """The arguments and results of a rolled step, and the step itself."""

    layout: Layout
    traced: Traced

    def __post_init__(self) -> None:
        layout, flat = self.layout, self.layout.flat
        position = {v: k for k, v in reversed(list(enumerate(flat.inputs)))}
        self.given: list[tuple[int, int]] = []  # position of the leaf that names it; stack or -1
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

    @cached_property
    def order(self) -> tuple[Unit, ...]:
        """The units in execution order."""
        return ordered(self.layout)

    def args(
        self, leaves: Sequence[Any], stacked: Callable[[Sequence[Any]], Any] = struct_of
    ) -> tuple[Any, ...]:
        """The arguments: for each argument of the original step, a dict of its leaves by path.

        ``leaves``: leaves of the original arguments. ``stacked``: makes a stack from its rows.
        """
        count = 1 + max(p[0].idx for p in self.traced.in_paths)
        out: tuple[dict[str, Any], ...] = tuple({} for _ in range(count))
        number = {v: k for k, v in enumerate(self.layout.flat.inputs)}
        for k, stack in self.given:
            path = self.traced.in_paths[k]
            rows = [leaves[number[v]] for v in self.layout.rows[stack]] if stack >= 0 else []
            out[path[0].idx][_name(path[1:])] = stacked(rows) if rows else leaves[k]
        return out

    def leaves(self, args: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
        """The leaves of the original arguments that are not rows of stacks, by position."""
        paths = self.traced.in_paths
        return {k: args[paths[k][0].idx][_name(paths[k][1:])] for k, s in self.given if s < 0}

    def program(self, flat: FlatJaxpr) -> Callable[..., Any]:
        """The rolled step; ``flat`` is the program for its shapes."""
        paths = self.traced.in_paths

        def step(*args: Mapping[str, Any]) -> Any:
            values = Values(self.layout, flat)
            for k, stack in self.given:
                leaf = args[paths[k][0].idx][_name(paths[k][1:])]
                if stack < 0:
                    values.env[flat.inputs[k]] = leaf
                else:
                    values.stacks[stack] = leaf
            for unit in self.order:
                values.run(unit)
            return self.results(lambda k: values.read(flat.outputs[k]), values.stacks.__getitem__)

        return step

    def results(self, one: Callable[[int], Any], stacked: Callable[[int], Any]) -> Any:
        """The results, in dicts by path, at the places that they have in the original step.

        ``one``: returns the result at a position of the original results. ``stacked``: returns a
        stack.
        """
        traced = self.traced
        first = [p[0] for p in traced.out_paths if p]
        tops = [k.idx for k in first if isinstance(k, jax.tree_util.SequenceKey)]
        several = not traced.updated and len(tops) == len(traced.out_paths)
        out: tuple[dict[str, Any], ...] = tuple({} for _ in range(1 + max(tops, default=0)))
        rest: dict[str, Any] = {}
        for k, stack in self.made:
            value, path = one(k) if stack < 0 else stacked(stack), traced.out_paths[k]
            if several or k < traced.updated:
                out[path[0].idx][_name(path[1:])] = value
            else:
                rest[_name(path)] = value
        if traced.updated:
            return StepOutcome(out, rest, None)  # type: ignore[arg-type]
        return out if several else rest


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path)
