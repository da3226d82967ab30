"""Exact min-sum variable elimination with hash-consed tables.

Eliminating x from the tables that mention it,

    m(rest) = min_x  sum over tables f  f(x, rest restricted to f's scope),

preserves the minimum of the total. Reading the steps backwards and taking the best x given the
values already known recovers a minimizer.  The key of a step consists of the ids of its input
tables and the alignment of their axes; steps with the same key (repeated layers) are computed once.

Complexity: sum over distinct steps of the product of the joined domain sizes; O(1) numpy calls per
step unless blocks are needed to stay in cache.
Papers: Bertele and Brioschi, "Nonserial Dynamic Programming", 1972; Dechter, "Bucket elimination",
AI 113, 1999.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from planner.search.exact.elimination_order import EliminationOrder, EliminationStep
from planner.search.problem import Array

Key: TypeAlias = tuple[object, ...]
Job: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]

_BLOCK = 1 << 17
"""Entries that are joined at a time: about one megabyte."""


@dataclass(frozen=True, eq=False)
class Script:
    """A plan with its tables named.

    Attributes:
        names: per slot, the id of its table: inputs as given, results as -1, -2, ...
        jobs: per distinct result, (id, step node, input slots, output scope).
        work: joined entries of the distinct jobs.
    """

    names: list[int]
    jobs: list[Job]
    work: int


def make_script(plan: EliminationOrder, inputs: Sequence[int], share: bool = True) -> Script:
    """Name every table of a plan; equal tables share a name.

    Args:
        plan: the plan.
        inputs: table ids of the plan's first slots (node costs, then edges).
        share: whether equal steps share their result.

    Returns:
        The script, with the work of a run.
    """
    names = list(inputs) + [0] * (len(plan.scopes) - len(inputs))
    known: dict[Key, int] = {}
    jobs: list[Job] = []
    work = 0
    for step in plan.steps:
        for part, out in zip(step.parts, step.outs, strict=True):
            scope = plan.scopes[out]
            key = (_key(plan, names, step.node, part, scope), out if not share else -1)
            name = known.get(key)
            if name is None:
                name = known[key] = -1 - len(known)
                jobs.append((name, step.node, part, scope))
                work += math.prod(plan.sizes[other] for other in (*scope, step.node))
            names[out] = name
    return Script(names, jobs, work)


def _key(
    plan: EliminationOrder,
    names: list[int],
    node: int,
    part: tuple[int, ...],
    scope: tuple[int, ...],
) -> Key:
    """Table ids and axis positions (the node's own axis is -1) of one part, in canonical order."""
    place = {other: position for position, other in enumerate(scope)}
    place[node] = -1
    return tuple(
        sorted((tuple([place[at] for at in plan.scopes[slot]]), names[slot]) for slot in part)
    )


def run_script(
    plan: EliminationOrder, script: Script, tables: Sequence[Array]
) -> tuple[float, list[int]]:
    """Compute every table of a script and read back a minimizer.

    Args:
        plan: the plan.
        script: its script.
        tables: the input tables by id.

    Returns:
        ``(value, choice)``: the sum of the minima, and a minimizer. The value is the exact optimum
        for an exact plan, and a lower bound for a split one.
    """
    results: dict[int, Array] = {}

    def table(slot: int) -> Array:
        name = script.names[slot]
        return results[name] if name < 0 else tables[name]

    choice = [0] * len(plan.sizes)
    for name, node, part, scope in script.jobs:
        aligned = [_align(table(slot), plan.scopes[slot], node, scope) for slot in part]
        results[name] = _join(aligned, tuple(plan.sizes[other] for other in scope))
    value_sum = 0.0
    for step in plan.steps:
        for out in step.outs:
            if not plan.scopes[out]:
                value_sum += float(table(out))
    for step in reversed(plan.steps):
        choice[step.node] = _best(plan, step, choice, table)
    return value_sum, choice


def _align(table: Array, table_scope: tuple[int, ...], node: int, scope: tuple[int, ...]) -> Array:
    """Put the node's axis first, with a unit axis for every missing node of the scope."""
    at = table_scope.index(node)
    if at:
        table = np.moveaxis(table, at, 0)
    shape = [table.shape[0]] + [1] * len(scope)
    rest = [other for other in table_scope if other != node]
    for axis, other in enumerate(rest):
        shape[scope.index(other) + 1] = table.shape[axis + 1]
    return table.reshape(shape)


def _join(tables: list[Array], shape: tuple[int, ...]) -> Array:
    """Minimum over the first axis of the broadcast sum, in blocks that stay in cache."""
    tables = _absorb(tables)
    depth, width = tables[0].shape[0], math.prod(shape)
    if depth * width <= _BLOCK or not shape:
        return _minimum(tables)
    if width > _BLOCK and shape[0] > 1:
        rows = max(1, _BLOCK * shape[0] // width)
        out = np.empty(shape)
        for begin in range(0, shape[0], rows):
            block = slice(begin, begin + rows)
            cut = [t if t.shape[1] == 1 else t[:, block] for t in tables]
            inner = (out[block].shape[0], *shape[1:])
            out[block] = _layers(cut, inner, depth)
        return out
    return _layers(tables, shape, depth)


def _absorb(tables: list[Array]) -> list[Array]:
    """Add every table to the first larger one that covers its axes; ascending in size."""
    left: list[Array] = []
    for table in sorted(tables, key=lambda at: -at.size):
        for at, other in enumerate(left):
            if all(map(int.__le__, table.shape, other.shape)):
                left[at] = other + table
                break
        else:
            left.append(table)
    return left[::-1]


def _layers(tables: list[Array], shape: tuple[int, ...], depth: int) -> Array:
    """Minimum over the first axis, a few of its values at a time."""
    few = max(1, _BLOCK // max(math.prod(shape), 1))
    best = _minimum([table[:few] for table in tables])
    for begin in range(few, depth, few):
        np.minimum(best, _minimum([table[begin : begin + few] for table in tables]), out=best)
    return best


def _minimum(tables: list[Array]) -> Array:
    """Minimum over the first axis of the broadcast sum; small tables are added first."""
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    least: Array = np.asarray(total.min(axis=0))
    return least


def _best(
    plan: EliminationOrder, step: EliminationStep, choice: list[int], table: Callable[[int], Array]
) -> int:
    """The best value of a step's node, given the values of the nodes in its results."""
    total: Array | None = None
    for part in step.parts:
        for slot in part:
            scope = plan.scopes[slot]
            index = tuple([slice(None) if at == step.node else choice[at] for at in scope])
            row = table(slot)[index]
            total = row if total is None else total + row
    return 0 if total is None else int(np.argmin(total))
