"""A chain of equal stages in the loop over microbatches: the program of a stage and its operands.

The layers of a model form a forward chain and a backward chain. All stages run one program, the
*task*; its values have the numbers of those of one of the stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from planner.graph.flat import Call


@dataclass(frozen=True)
class Stack:
    """One array per stage: a value for each stage, or equal parts of a single value along its first
    dimension."""

    values: tuple[int, ...]

    def joined(self, env: Mapping[int, Any], count: int) -> Any:
        """The arrays of all stages, as [stages, ...]."""
        if len(self.values) == count > 1:
            return jnp.stack([env[v] for v in self.values])
        x = env[self.values[0]]
        return x.reshape(count, x.shape[0] // count, *x.shape[1:])

    def apart(self, x: Any) -> dict[int, Any]:
        """The values, from [stages, ...]."""
        if len(self.values) == x.shape[0] > 1:
            return {v: x[k] for k, v in enumerate(self.values)}
        return {self.values[0]: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])}


@dataclass(frozen=True, eq=False)
class Task:
    """The work of every stage for a microbatch, forward or backward.

    Attributes:
        calls: in order.
        carries: per value passed from stage to stage: its number as an operand, its number as a
            result, and the value (or literal) that the first stage begins with.
        exits: per value of the last stage that the rest of the step reads: its number in the task,
            and in the rest.
        stacks: one array per stage that does not depend on the microbatch, by number in the task.
        rows: one slice of the batch per stage, by number in the task.
        shared: values that all stages read.
        sums: values that are added up over microbatches: by number in the task, those of the body.
        residuals: values of its stage's forward task that it reads.
    """

    calls: tuple[Call, ...]
    carries: tuple[tuple[int, int, Any], ...]
    exits: tuple[tuple[int, int], ...]
    stacks: Mapping[int, Stack]
    rows: Mapping[int, Stack]
    shared: frozenset[int]
    sums: Mapping[int, Stack]
    residuals: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Chain:
    """The chain of a loop's body.

    Attributes:
        forward, backward: the tasks; the backward pass begins with the last stage.
        members: calls of the body that belong to it, by position: True if they are forward.
        before: calls that compute stacks from values that do not depend on the batch.
        what: a line that describes it.
    """

    forward: Task
    backward: Task
    members: Mapping[int, bool]
    what: str
    before: tuple[Call, ...] = ()


def made_by(calls: Sequence[Call]) -> set[int]:
    """The results of calls."""
    return {v for c in calls for v in c.outs}


def read_by(calls: Sequence[Call]) -> dict[int, Call]:
    """The values that calls read, in order, and the first reader of each."""
    first_readers: dict[int, Call] = {}
    for call in calls:
        for v in call.ins:
            if isinstance(v, int):
                first_readers.setdefault(v, call)
    return first_readers
