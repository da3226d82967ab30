"""``parallelize``: plan at the first call, then just run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from executor.compile import CompiledStep, ShapesChangedError
from executor.follow import follow
from executor.hosts import agree
from executor.mesh import detect_cluster
from planner import capture
from planner.errors import RequestError
from planner.graph.trace import abstract, trace
from planner.metadata import with_logical_axis_rules
from planner.pipeline import make_plan
from planner.plan import Plan

log = logging.getLogger("meshwright")


class Parallelized:
    """A train step that plans itself; behaves like the function it wraps.

    New shapes plan again (and say so through the ``meshwright`` logger, level WARNING);
    plans of shapes met before are kept.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: dict[str, Any],
        donate_argnums: int | Sequence[int],
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = with_logical_axis_rules(function, options["logical_axis_rules"])
        self.options = options
        self.like: Parallelized | None = options.pop("like", None)
        self.donate_argnums = donate_argnums
        self._steps: dict[Any, CompiledStep] = {}
        self._current: CompiledStep | None = None

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan."""
        return self._current is not None

    @property
    def plan(self) -> Plan:
        """The plan in use; raises RequestError before the first call."""
        if self._current is None:
            raise RequestError(
                f"{getattr(self.function, '__name__', 'the step')} has not been called yet, so it "
                "has no plan; call it once, or use planner.make_plan(step, *args, cluster=...)"
            )
        return self._current.plan

    @property
    def compiled(self) -> CompiledStep:
        """The compiled step in use; raises RequestError before the first call."""
        _ = self.plan
        assert self._current is not None
        return self._current

    def prepare(self, *args: Any) -> CompiledStep:
        """Trace and plan for these arguments (arrays or ShapeDtypeStructs); runs nothing."""
        shapes = abstract(args)
        leaves, tree = jax.tree_util.tree_flatten(shapes)
        key = (tree, tuple((x.shape, str(x.dtype), x.weak_type) for x in leaves))
        if key not in self._steps:
            if self._steps:
                log.warning(
                    "%s: arguments of new shapes, planning again",
                    getattr(self.function, "__name__", "step"),
                )
            function = with_logical_axis_rules(
                self.function
            )  # those in force in Flax, unless it has some
            capture.offer(function, args, {**self.options, "donate_argnums": self.donate_argnums})
            options = dict(self.options)
            if self.like is not None:
                args, options = follow(self.like.compiled, self.like.options, args, options)
            options["cluster"] = options["cluster"] or detect_cluster()
            # where arrays lie is a mark the first time; later it is our own doing
            given = shapes if self._steps and self.like is None else args
            plan = agree(make_plan(function, *given, donate_argnums=self.donate_argnums, **options))
            self._steps[key] = CompiledStep(
                trace(function, shapes), plan, donate_argnums=self.donate_argnums
            )
        self._current = self._steps[key]
        return self._current

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; plans first when these shapes are new."""
        if kwargs:
            raise RequestError(f"call the step with positional arguments; got {sorted(kwargs)}")
        step = self._current or self.prepare(*args)
        try:
            return step(*args)
        except ShapesChangedError:
            return self.prepare(*args)(*args)


def parallelize(
    function: Callable[..., Any] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    cluster: str | None = None,
    mode: str | None = None,
    search: str | None = None,
    mesh: str | Mapping[str, int] | None = None,
    memory: str | float | None = None,
    shardings: Mapping[str, Any] | None = None,
    logical_axis_rules: Sequence[Any] | None = None,
    zero: int | None = None,
    whole_below: str | float = 0.0,
    never_fsdp: str | Sequence[str] = (),
    offload: str | Sequence[str] = (),
    like: Parallelized | None = None,
) -> Any:
    """Run a train step in parallel: the first call traces, plans and compiles.

    Args:
        function: a jit-able step; None makes this a decorator with options.
        donate_argnums: as for ``jax.jit``.
        cluster: what to plan for; None describes the devices present.
        mode, search: None takes what ``set_parallel_mode`` set.
        mesh, memory, shardings, logical_axis_rules: as for ``planner.make_plan``.
        zero, whole_below, never_fsdp, offload: likewise.
        like: a step that is planned already, such as the train step for an evaluation step: the
            same mesh, and the arrays that both have stay where that plan keeps them.

    Returns:
        A ``Parallelized``: call it like ``function``; ``.plan`` is the Plan.
    """
    options = {
        "cluster": cluster,
        "mode": mode,
        "search": search,
        "mesh": mesh,
        "memory": memory,
        "shardings": shardings,
        "logical_axis_rules": logical_axis_rules,
        "zero": zero,
        "whole_below": whole_below,
        "never_fsdp": never_fsdp,
        "offload": offload,
        "like": like,
    }
    if function is None:
        return lambda f: Parallelized(f, options, donate_argnums)
    return Parallelized(function, options, donate_argnums)
