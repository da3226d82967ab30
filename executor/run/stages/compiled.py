"""A step that runs under a plan whose stages are separate programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from executor.processes.progress import begin_step, refuse_step, tell
from executor.run.compile import (
    CompiledStep,
    ShapesChangedError,
    donated_leaves,
    is_inside,
    weak_leaves,
)
from executor.run.stages.sending import placed
from executor.run.stages.step import Runner
from planner.arguments.outcome import kept_leaves
from planner.errors import RequestError
from planner.graph.trace import Traced
from planner.plan.plan import Plan
from planner.space.decisions.host_memory import DEVICE
from planner.stages.programs.homes import ALL
from planner.stages.programs.layered import order_of


class StagedStep(CompiledStep):
    """Like ``CompiledStep``, but runs many programs from the host, in one process or several.

    Raises (at the call):
        RequestError: the call is inside another transformation, or an argument is on devices of
            several processes other than those where the plan wants it.
    """

    def __init__(
        self,
        traced: Traced,
        plan: Plan,
        *,
        donate_argnums: int | Sequence[int] = (),
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        plan.check_matches(traced.graph)
        if any(leaf.memory != DEVICE for leaf in plan.inputs):
            raise RequestError("a plan with schedule= can't keep its state in host memory")
        self.plan, self.traced = plan, traced
        order = order_of(plan.recipe)
        donated = donated_leaves(traced, donate_argnums)
        back = tuple(k for k in kept_leaves(traced.out_shape) if k in frozenset(donated))
        self.runner = Runner(traced, plan, order, devices, sorted({*donated} - {*back}))
        self.mesh = self.runner.places.mesh
        self.in_shardings = jax.tree_util.tree_unflatten(traced.in_tree, self.runner.shardings)
        self._expected = [(leaf.shape, leaf.dtype) for leaf in plan.inputs]
        self._donated, self._back = donated, back
        self._weak = weak_leaves(traced)
        processes = self.runner.places.processes(ALL)
        if len(processes) < jax.process_count():
            raise RequestError(
                f"the mesh {plan.mesh} lies on processes {sorted(processes)} of "
                f"{jax.process_count()}: with schedule= every process needs devices of it; use "
                "more devices, or start fewer processes"
            )
        self._spans, self._compared = len(processes) > 1, False
        self.jitted = _NoProgram(plan.schedule)  # type: ignore[assignment]

    def run(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run one step; returns its result and the arguments where the plan wants them."""
        if is_inside(args):
            raise RequestError(
                f"schedule={self.plan.schedule!r}: the step is many programs and can't run inside "
                "of jax.jit or another transformation; call it from Python"
            )
        if not self.fits(args):
            raise ShapesChangedError
        args = self._unshared(args) if self._donated else args
        if self._spans and not self._compared:
            self._compare(args)
        leaves = self._placed(jax.tree_util.tree_leaves(args))
        results = self._walked(leaves)
        live_ids = {id(x) for x in results} | {id(leaves[k]) for k in self._back}
        for k in self._donated:
            if id(leaves[k]) not in live_ids:
                leaves[k].delete()
        result = jax.tree_util.tree_unflatten(self.traced.out_tree, results)
        return result, jax.tree_util.tree_unflatten(self.traced.in_tree, leaves)

    def place(self, *args: Any) -> tuple[Any, ...]:
        """Put arguments where the plan wants them; see ``CompiledStep.place``."""
        leaves, tree = jax.tree_util.tree_flatten(args)
        placed: tuple[Any, ...] = jax.tree_util.tree_unflatten(tree, self._placed(leaves))
        return placed

    def _placed(self, leaves: list[Any]) -> list[Any]:
        shardings = self.runner.shardings
        if not self._spans:
            if all(
                getattr(x, "sharding", None) == s for x, s in zip(leaves, shardings, strict=True)
            ):
                return leaves
            return list(jax.device_put(leaves, shardings))
        paths = [leaf.path for leaf in self.plan.inputs]
        return list(map(placed, leaves, shardings, paths))

    def _walked(self, leaves: list[Any]) -> list[Any]:
        """Run the programs; counts the step if other processes take part."""
        if not self._spans:
            return self.runner(leaves)
        begin_step()
        tell(self.runner.shapes.where)
        try:
            return self.runner(leaves)
        except Exception:
            refuse_step()
            raise


class _NoProgram:
    """Stands in for a jitted function."""

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule

    def lower(self, *_: Any, **__: Any) -> Any:
        """There is no one program.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"schedule={self.schedule!r}: the stages are programs of their own, so there is no one "
            "program to lower"
        )
