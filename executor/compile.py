"""Plan + the same step -> one jitted function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from executor.interpret import ConstrainedStep, Kept, returned
from executor.mesh import build_mesh, lacks_memory, named
from planner import compat
from planner.graph.trace import Traced, abstract, trace
from planner.metadata import with_logical_axis_rules
from planner.offload import DEVICE
from planner.plan import Plan

log = logging.getLogger("meshwright")


class ShapesChangedError(Exception):
    """The arguments no longer have the shapes that the step was compiled for."""


class CompiledStep:
    """A step that runs under a plan. Calls cost what a hand-written ``jax.jit`` call costs.

    Attributes:
        plan: the plan.
        mesh: the jax mesh.
        in_shardings: pytree of NamedShardings of the arguments.
        jitted: the jitted function (``.lower`` works as usual).
    """

    def __init__(
        self,
        traced: Traced,
        plan: Plan,
        *,
        donate_argnums: int | Sequence[int] = (),
        devices: Sequence[jax.Device] | None = None,
        abstract_mesh: bool = False,
    ) -> None:
        plan.check_matches(traced.graph)
        self.plan = plan
        self.traced = traced
        self.mesh = (
            jax.sharding.AbstractMesh(
                plan.mesh.sizes,
                plan.mesh.names,
                axis_types=(jax.sharding.AxisType.Auto,) * len(plan.mesh.sizes),
            )
            if abstract_mesh
            else build_mesh(plan.mesh, devices)
        )
        sharding = {(c.op, c.slot, c.position): named(self.mesh, c.spec) for c in plan.constraints}
        away = self._away(plan)
        ins = [named(self.mesh, leaf.spec, away.get(leaf.memory)) for leaf in plan.inputs]
        outs = [named(self.mesh, leaf.spec, away.get(leaf.memory)) for leaf in plan.outputs]
        kept = [
            (named(self.mesh, leaf.spec), leaf.fetched) if leaf.memory in away else None
            for leaf in plan.inputs
        ]
        left = [
            named(self.mesh, leaf.spec) if leaf.memory in away else None for leaf in plan.outputs
        ]
        self.in_shardings = jax.tree_util.tree_unflatten(traced.in_tree, ins)
        out_shardings = jax.tree_util.tree_unflatten(traced.out_tree, outs)
        expected = self._expected = [(leaf.shape, leaf.dtype) for leaf in plan.inputs]
        kinds = [op.kind for op in traced.graph.ops]

        def step(*args: Any) -> Any:
            leaves, tree = jax.tree_util.tree_flatten(args)
            got = [
                (compat.shape_of(x.aval if hasattr(x, "aval") else x), compat.dtype_name(x))
                for x in leaves
            ]
            if tree != traced.in_tree or got != expected:
                raise ShapesChangedError
            given = [x if k is None else Kept(x, *k) for x, k in zip(leaves, kept, strict=True)]
            flat = ConstrainedStep(kinds, sharding).run(traced.jaxpr, given)
            return jax.tree_util.tree_unflatten(traced.out_tree, returned(flat, left))

        self.jitted = jax.jit(
            step,
            in_shardings=self.in_shardings,
            out_shardings=out_shardings,
            donate_argnums=donate_argnums,
        )
        self._placed = self._foreign = False
        self._many = jax.process_count() > 1

    def _away(self, plan: Plan) -> dict[str, str]:
        """The memory kinds besides the device's that the plan uses and the devices have."""
        kinds = {leaf.memory for leaf in plan.inputs} - {DEVICE}
        if isinstance(self.mesh, jax.sharding.AbstractMesh):  # of no interest to who asks for it
            return {}
        for kind in sorted(kinds):
            if lacks_memory(list(self.mesh.devices.flat), kind):
                kinds.discard(kind)
                log.warning(
                    "%s devices have no memory kind %r: what the plan keeps there stays in device "
                    "memory, which takes %s bytes more on each than the plan says",
                    self.mesh.devices.flat[0].platform,
                    kind,
                    f"{plan.prediction.host_bytes:.3g}",
                )
        return {kind: kind for kind in kinds}

    def place(self, *args: Any) -> tuple[Any, ...]:
        """Put arguments where the plan wants them (host arrays, or arrays placed otherwise). Of a
        host array, which must be the same in every process, each process takes its own part."""
        if jax.process_count() > 1:
            args = self._parted(args)
        return tuple(jax.device_put(args, self.in_shardings))

    def _parted(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments without the arrays that only this process has; asks no other process."""
        if not any(_is_local(x) for x in jax.tree_util.tree_leaves(args)):
            return args

        parted: tuple[Any, ...] = jax.tree.map(spread, args, self.in_shardings)
        return parted

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether ``args`` have the structure, shapes and dtypes that the step was made for."""
        leaves, tree = jax.tree_util.tree_flatten(abstract(args))
        got = [(compat.shape_of(x), compat.dtype_name(x)) for x in leaves]
        return bool(tree == self.traced.in_tree and got == self._expected)

    def __call__(self, *args: Any) -> Any:
        """Run one step; the first call places the arguments."""
        if not self._placed:
            if not self.fits(args):
                raise ShapesChangedError
            args = self.place(*args)
            result = self.jitted(*args)
            self._placed = not self._foreign
            return result
        try:
            return self.jitted(*(self._parted(args) if self._many else args))
        except ValueError as error:
            if not self.fits(args):
                raise ShapesChangedError from error
            self._foreign = "not found in mesh" in str(error)  # of a mesh with explicit axes
            self._placed = not self._foreign
            known = ("sharding", "device", "memory")
            if not self._foreign and not any(word in str(error) for word in known):
                raise
            return self.jitted(*self.place(*args))


def spread(x: Any, sharding: jax.sharding.Sharding) -> Any:
    """An array that only this process has, or every process for itself, laid out over the devices;
    others as they are. Asks no other process."""
    if not _is_local(x):
        return x
    if jax.numpy.issubdtype(getattr(x, "dtype", np.int32), jax.dtypes.prng_key):
        keys = spread(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(keys, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _is_local(x: Any) -> bool:
    """Whether only this process has it: a host array, or one on devices of this process alone."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


class _Unplanned:
    """What ``compile_plan`` returns: compiles at the first call, when arguments are known."""

    def __init__(
        self, function: Callable[..., Any], plan: Plan, donate_argnums: int | Sequence[int]
    ) -> None:
        self.function, self.plan, self.donate = function, plan, donate_argnums
        self.compiled: CompiledStep | None = None

    @property
    def is_planned(self) -> bool:
        """Whether the step has been built."""
        return self.compiled is not None

    def prepare(self, *args: Any) -> CompiledStep:
        """Trace, check that the plan fits, build the jitted step; runs nothing."""
        traced = trace(with_logical_axis_rules(self.function), abstract(args))
        self.compiled = CompiledStep(traced, self.plan, donate_argnums=self.donate)
        return self.compiled

    def __call__(self, *args: Any) -> Any:
        """Run one step under the plan."""
        step = self.compiled or self.prepare(*args)
        try:
            return step(*args)
        except ShapesChangedError:
            again = trace(with_logical_axis_rules(self.function), abstract(args))
            self.plan.check_matches(again.graph)
            raise


def compile_plan(
    function: Callable[..., Any],
    plan: Plan,
    *,
    donate_argnums: int | Sequence[int] = (),
) -> _Unplanned:
    """A callable that runs ``function`` under ``plan``.

    Args:
        function: the step that the plan was made for; if that was under logical axis rules, under
            them again (``planner.with_logical_axis_rules``, or those in force in Flax).
        plan: from ``planner.make_plan`` or ``planner.load_plan``.
        donate_argnums: as for ``jax.jit``.

    Raises (at the first call):
        PlanMismatchError: the plan is for another step; names the first differing operation.
        RequestError: fewer devices are present than the plan's mesh needs.
    """
    return _Unplanned(function, plan, donate_argnums)
