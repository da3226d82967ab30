"""One run of a step whose stages are separate programs.

Every process walks all tasks in the same order. For a stage on other processes' devices it knows
only the shapes, and runs only the programs that bring values to or from its own devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from costmodels.orders import Task
from executor.run.stages.places import Places, absent, inside, spec_of
from executor.run.stages.programs import Program
from executor.run.stages.sending import Sender

SpecOf = Callable[[Any], PartitionSpec | None]


@dataclass(eq=False)
class Store:
    """Values by name, the place of each, and their copies at other places.

    ``spec``: how a value is sharded between places; None: unchanged.
    """

    sender: Sender
    spec: SpecOf
    held: dict[Any, tuple[Any, int]] = field(default_factory=dict)
    copies: dict[Any, dict[int, Any]] = field(default_factory=dict)

    def at(self, names: Sequence[Any], place: int) -> list[Any]:
        """Values at a place; values from the same other place are moved together."""
        missing: dict[int, list[Any]] = {}
        for name in dict.fromkeys(names):
            here = self.held[name][1]
            if here != place and place not in self.copies.get(name, ()):
                missing.setdefault(here, []).append(name)
        for here, which in missing.items():
            values = [self.held[name][0] for name in which]
            specs = [self._spec(name, x) for name, x in zip(which, values, strict=True)]
            for name, x in zip(which, self.sender.moved(values, here, place, specs), strict=True):
                self.copies.setdefault(name, {})[place] = x
        return [
            self.held[name][0] if self.held[name][1] == place else self.copies[name][place]
            for name in names
        ]

    def drop(self, name: Any) -> None:
        """Forget a value."""
        self.held.pop(name, None)
        self.copies.pop(name, None)

    def _spec(self, name: Any, x: Any) -> PartitionSpec:
        said = self.spec(name)
        return inside(spec_of(x) if said is None else said)


@dataclass(frozen=True, eq=False)
class Pass:
    """A program of a stage, and the sources of its operands.

    Attributes:
        program: the program.
        outs, sums, stacked: see ``planner.stages.programs.split.Task``.
        rows, others: positions of operands that are rows of the batch, and of those that other
            passes of the microbatch compute; the remaining operands do not change.
    """

    program: Program
    outs: tuple[int, ...]
    sums: tuple[int, ...]
    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    others: tuple[int, ...]


@dataclass(eq=False)
class Shapes:
    """Runs programs; for those on other processes' devices, computes only the results' shapes."""

    places: Places
    known: dict[int, list[Any]] = field(default_factory=dict)
    at: Task | None = None
    """The current pass."""

    def where(self) -> str:
        """The current pass as text, for the report of a lost process."""
        if self.at is None:
            return ""
        owners = ", ".join(map(str, sorted(self.places.processes(self.at.chunk))))
        return (
            f", at {self.at.kind} of microbatch {self.at.microbatch} of stage {self.at.chunk} (on "
            f"process {owners}),"
        )

    def run(self, program: Program, args: Sequence[Any]) -> Sequence[Any]:
        """The results of a program, or ShapeDtypeStructs in their place."""
        if self.places.mine(program.place):
            results = program.run(*args)
            if self.places.waits:
                jax.block_until_ready(results)
            return results  # type: ignore[no-any-return]
        if id(program) not in self.known:
            structs = jax.eval_shape(program.run, *map(absent, args))
            self.known[id(program)] = [absent(x) for x in structs]
        return self.known[id(program)]


def passes(
    order: Sequence[Task],
    tasks: Mapping[tuple[str, int], Pass],
    readers: Mapping[int, int],
    constant: Callable[[int, int], Any],
    store: Store,
    shapes: Shapes,
    count: int,
) -> tuple[dict[int, Any], dict[Any, tuple[Any, int]]]:
    """Run all passes of all microbatches.

    Args:
        order: (kind, stage, microbatch), such that the operands of each are available.
        tasks: the passes by kind and stage.
        readers: per value, the number of passes that read it.
        constant: the values that do not change between microbatches, and the whole batch, by number
            in the microbatch and stage.
        store: the values of microbatches, by (number, microbatch).
        shapes: runs the programs.
        count: number of microbatches.

    Returns:
        The sums, and by ("stack", number, microbatch) the stacked values, each with its place.
    """
    given: dict[tuple[str, int], list[Any]] = {}
    cut: dict[tuple[int, int], list[Any]] = {}
    left: dict[tuple[int, int], int] = {}
    sums: dict[int, Any] = {}
    stacks: dict[Any, tuple[Any, int]] = {}

    def rows(v: int, stage: int) -> list[Any]:
        if (v, stage) not in cut:
            x = constant(v, stage)
            is_here = shapes.places.mine(stage)
            cut[v, stage] = (
                _rows(x, count) if is_here else [jax.ShapeDtypeStruct(x.shape[1:], x.dtype)] * count
            )
        return cut[v, stage]

    for now in order:
        shapes.at = now
        kind, stage, i = now
        task = tasks[kind, stage]
        names = task.program.ins
        if (kind, stage) not in given:
            known = {*task.rows, *task.others}
            given[kind, stage] = [
                None if k in known else constant(v, stage) for k, v in enumerate(names)
            ]
        args = list(given[kind, stage])
        for k in task.rows:
            args[k] = rows(names[k], stage)[i]
        if task.others:
            operands = store.at([(names[k], i) for k in task.others], stage)
            for k, x in zip(task.others, operands, strict=True):
                args[k] = x
        results = shapes.run(task.program, args)
        outputs = dict(zip(task.program.outs, results, strict=True))
        for v in task.outs:
            store.held[v, i] = outputs[v], stage
            left[v, i] = readers.get(v, 0)
        if task.sums:
            new = [outputs[v] for v in task.sums]
            if task.sums[0] in sums and shapes.places.mine(stage):
                new = _added([sums[v] for v in task.sums], new)
                if shapes.places.waits:
                    jax.block_until_ready(new)
            sums.update(zip(task.sums, new, strict=True))
        for v in task.stacked:
            stacks["stack", v, i] = outputs[v], stage
        for k in task.others:
            v = names[k]
            left[v, i] -= 1
            if not left[v, i]:
                store.drop((v, i))
    shapes.at = None
    return sums, stacks


@functools.partial(jax.jit, donate_argnums=0)
def _added(old: list[Any], new: list[Any]) -> list[Any]:
    return [a + b for a, b in zip(old, new, strict=True)]


@functools.partial(jax.jit, static_argnums=1)
def _rows(x: Any, count: int) -> list[Any]:
    return [x[i] for i in range(count)]
