"""A chain of equal stages in the loop over microbatches: what one stage computes, and with what.

The layers of a model are a chain forward, and another one backward. All stages are one program, the
*task*; its values are numbered as those of one of the stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from planner.graph.flat import Call


@dataclass(frozen=True)
class Stack:
    """What every stage has one of: a value each, or equal parts of a single value, cut along its
    first dimension."""

    values: tuple[int, ...]

    def joined(self, env: Mapping[int, Any], count: int) -> Any:
        """[stages, ...]"""
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
    """What every stage does with a microbatch, forward or backward.

    Attributes:
        calls: in order.
        carries: per value that goes from stage to stage: the number under which it is read, that
            under which it is made, and the value (or literal) with which the first stage begins.
        exits: what the rest of the step reads of the last stage: its number in the task, and in the
            rest.
        stacks: what each stage has one of and does not depend on the microbatch.
        rows: what each stage has one of and is a slice of the batch.
        shared: what all stages read alike.
        sums: what is added up over microbatches: by number in the task, where it goes.
        residuals: what it reads of the forward task of its stage.
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
        forward, backward: the tasks; backward the last stage begins.
        members: calls of the body that belong to it, by position: True if they are forward.
        before: calls that make what stacks are made of, from what does not depend on the batch.
        what: a line about it.
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
    """The values that calls read, in order, and the first that reads each."""
    first_readers: dict[int, Call] = {}
    for call in calls:
        for v in call.ins:
            if isinstance(v, int):
                first_readers.setdefault(v, call)
    return first_readers
