"""Plan + the same step -> one jitted function."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from executor.processes.agreement.alike import compare_arguments, compare_program
from executor.processes.progress import begin_step, refuse_step
from executor.run.decisions import applied
from executor.run.interpret import Kept, returned
from executor.run.lowered import LoweredPlan, LoweredStep, lower_plan
from executor.run.mesh import (
    build_mesh,
    is_local,
    lacks_memory,
    mesh_axes,
    named_sharding,
    spread,
    without_devices,
)
from planner import compat
from planner.arguments.calls import Bound, Calls, Indices, Names
from planner.arguments.metadata import with_logical_axis_rules
from planner.arguments.outcome import kept_leaves
from planner.errors import RequestError
from planner.graph.trace import Traced, abstract, trace
from planner.plan.compiled.lowering import PLAIN
from planner.plan.compiled.option_sets import options_on, without_defaults
from planner.plan.plan import Plan
from planner.recipes import rewritten
from planner.space.decisions.host_memory import DEVICE

log = logging.getLogger("meshwright")


class ShapesChangedError(Exception):
    """The arguments no longer have the shapes that the step was compiled for."""


class CompiledStep:
    """A step that runs under a plan. A call costs the same as a call of a hand-written ``jax.jit``.

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
        name: str = "step",
    ) -> None:
        plan.check_matches(traced.graph)
        if plan.schedule:
            raise RequestError(
                f"schedule={plan.schedule!r}: the stages of this plan are programs of their own; "
                "here one program is needed: plan without schedule="
            )
        self.plan = plan
        self.traced = traced
        if abstract_mesh:  # without devices, no device-specific lowering
            plan = dataclasses.replace(plan, lowering=PLAIN)
        axes = mesh_axes(plan)
        self.mesh = (
            without_devices(plan.mesh) if abstract_mesh else build_mesh(plan.mesh, devices, axes)
        )
        lowered = lower_plan(plan, traced, self.mesh, axes)
        away = self._away(plan)
        on_mesh = functools.partial(named_sharding, self.mesh, axes=axes)
        ins = [on_mesh(leaf.spec, away.get(leaf.memory)) for leaf in plan.inputs]
        outs = [on_mesh(leaf.spec, away.get(leaf.memory)) for leaf in plan.outputs]
        hosted = [
            (on_mesh(leaf.spec), leaf.fetched) if leaf.memory in away else None
            for leaf in plan.inputs
        ]
        left = [on_mesh(leaf.spec) if leaf.memory in away else None for leaf in plan.outputs]
        self.in_shardings = jax.tree_util.tree_unflatten(traced.in_tree, ins)
        out_shardings = jax.tree_util.tree_unflatten(traced.out_tree, outs)
        self._expected = [(leaf.shape, leaf.dtype) for leaf in plan.inputs]
        self._donated = donated_leaves(traced, donate_argnums)
        self._back = back = tuple(
            k for k in kept_leaves(traced.out_shape) if k in frozenset(self._donated)
        )
        self._weak = weak_leaves(traced)
        step = self._function(plan, lowered, ins, hosted, left)
        step.__name__ = step.__qualname__ = name
        results = (out_shardings, [ins[k] for k in back]) if back else out_shardings
        self._jit = functools.partial(
            jax.jit,
            step,
            in_shardings=self.in_shardings,
            out_shardings=results,
            donate_argnums=donate_argnums,
        )
        self._options = _options(plan, self.mesh)
        self.jitted = self._jit(compiler_options=self._options or None)
        self._inner = (
            self.jitted
            if not self._options
            else jax.jit(step, in_shardings=self.in_shardings, out_shardings=results)
        )
        self._program: Any = None
        self._foreign = self._compared = False
        self._many = not abstract_mesh and jax.process_count() > 1
        self._spans = self._many and len({d.process_index for d in self.mesh.devices.flat}) > 1

    def _function(
        self,
        plan: Plan,
        lowered: LoweredPlan,
        ins: Sequence[jax.sharding.NamedSharding],
        hosted: Sequence[tuple[jax.sharding.NamedSharding, Any] | None],
        left: Sequence[jax.sharding.NamedSharding | None],
    ) -> Any:
        """The function to jit: the step with what the plan says about each operation.

        Args:
            plan: the plan.
            lowered: what its operations need.
            ins: per argument, its sharding.
            hosted: per argument in another memory, its sharding on the device, and where it is
                fetched.
            left: per result in another memory, its sharding on the device.
        """
        traced, expected, back = self.traced, self._expected, self._back
        kinds, decided = [op.kind for op in traced.graph.ops], applied(plan)
        sources = [op.source for op in traced.graph.ops]

        def step(*args: Any) -> Any:
            leaves, tree = jax.tree_util.tree_flatten(args)
            got = [
                (compat.aval_shape(x.aval if hasattr(x, "aval") else x), compat.dtype_name(x))
                for x in leaves
            ]
            if tree != traced.in_tree or got != expected:
                raise ShapesChangedError
            given = [x if k is None else Kept(x, *k) for x, k in zip(leaves, hosted, strict=True)]
            walk = LoweredStep(kinds, lowered, decided, sources).known_as(given, ins)
            flat = walk.run(traced.jaxpr, given)
            result = jax.tree_util.tree_unflatten(traced.out_tree, returned(flat, left))
            return (result, [leaves[k] for k in back]) if back else result

        return step

    def _away(self, plan: Plan) -> dict[str, str]:
        """The memory kinds other than the device's that the plan uses and the devices have."""
        kinds = {leaf.memory for leaf in plan.inputs} - {DEVICE}
        if isinstance(self.mesh, jax.sharding.AbstractMesh):  # not needed without devices
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
        """Put arguments (host arrays, or arrays placed otherwise) where the plan wants them. A host
        array must be the same in every process; each process takes its own part."""
        if jax.process_count() > 1:
            args = self._parted(args)
        return tuple(jax.device_put(args, self.in_shardings))

    def _parted(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with local arrays laid out over the devices; no communication."""
        if not any(is_local(x) for x in jax.tree_util.tree_leaves(args)):
            return args

        parted: tuple[Any, ...] = jax.tree.map(spread, args, self.in_shardings)
        return parted

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether ``args`` have the structure, shapes and dtypes that the step was made for."""
        leaves, tree = jax.tree_util.tree_flatten(abstract(args))
        got = [(compat.aval_shape(x), compat.dtype_name(x)) for x in leaves]
        return bool(tree == self.traced.in_tree and got == self._expected)

    def weak_as_traced(self, args: Sequence[Any]) -> bool:
        """Whether scalars and weakly typed arrays have the weak types that the step was traced
        with, which decide the dtypes of what is computed from them."""
        leaves = jax.tree_util.tree_leaves(args) if self._weak else []
        if self._weak and len(leaves) != len(self._expected):
            return True  # another structure, which ``run`` refuses
        return all(_is_weak(leaves[k]) == weak for k, weak in self._weak)

    def _unshared(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments in which a donated array occurs once; its other places get copies, since memory
        can be donated only once."""
        leaves, tree = jax.tree_util.tree_flatten(args)
        count = len(leaves)
        if len(set(map(id, leaves))) == count or count != len(self._expected) or is_inside(args):
            return args
        donated = {id(leaves[k]) for k in self._donated if isinstance(leaves[k], jax.Array)}
        seen: set[int] = set()
        for k, x in enumerate(leaves):
            if id(x) not in donated:
                continue
            leaves[k] = jax.numpy.copy(x) if id(x) in seen else x
            seen.add(id(x))
        unshared: tuple[Any, ...] = jax.tree_util.tree_unflatten(tree, leaves)
        return unshared

    def __call__(self, *args: Any) -> Any:
        """Run one step; the first call places the arguments."""
        return self.run(*args)[0]

    def run(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run one step; returns its result, and the current arguments: placed as the plan wants,
        with new arrays in place of donated ones that are not updated."""
        result, args = self._run(*(self._unshared(args) if self._donated else args))
        if not self._back:
            return result, args
        result, returned = result
        leaves, tree = jax.tree_util.tree_flatten(args)
        for k, x in zip(self._back, returned, strict=True):
            leaves[k] = x
        return result, jax.tree_util.tree_unflatten(tree, leaves)

    @property
    def program(self) -> jax.stages.Compiled | None:
        """The compiled program; None before the first step."""
        compiled: jax.stages.Compiled | None = self._program
        return compiled

    @property
    def text(self) -> str:
        """The compiled program as HLO text; empty before the first step."""
        return "" if self._program is None else str(self._program.as_text())

    def _run(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        program = self._program
        if program is None:
            if not self.fits(args):
                raise ShapesChangedError
            if is_inside(args):
                return self._inside(args), args
            if self._spans and not self._compared:
                self._compare(args)
            args = self.place(*args)
            program = self._program = self.compile(*args)
            return self._dispatch(program, args), args
        if not self._foreign:
            try:
                return self._dispatch(program, self._parted(args) if self._many else args), args
            except (TypeError, ValueError) as error:
                self._check(args, error)
        if is_inside(args):
            return self._inside(args), args
        if self._foreign and not self.fits(args):
            raise ShapesChangedError
        args = self.place(*args)
        return self._dispatch(program, args), args

    def _inside(self, args: Sequence[Any]) -> Any:
        """Run inside a transformation; compiler options apply to a whole program only."""
        if self._options:
            log.warning("compiler_options of the plan are ignored inside jax.jit; pass them there")
        return self._inner(*args)

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """Compile the step for arguments, or ShapeDtypeStructs of them.

        Raises:
            RequestError: the back end refuses a compiler option. If a plan has it by default, the
                step is compiled without it, with a warning.
        """
        try:
            return self.jitted.lower(*args).compile()
        except jax.errors.JaxRuntimeError as error:
            said = str(error).strip().partition("\n")[0]
            given = dict(without_defaults(tuple(self._options.items())))
            if any(name in said for name in self._options.keys() - given.keys()):
                log.warning("%s; compiled without it: the step may take longer than planned", said)
                self._options, self.jitted = given, self._jit(compiler_options=given or None)
                return self.compile(*args)
            if given and "option" in said.lower():
                raise RequestError(f"compiler_options: {said}; leave it out") from error
            raise

    def _check(self, args: Sequence[Any], error: Exception) -> None:
        """Check that refused arguments only have to be placed; raises if not."""
        if is_inside(args):
            return
        if not self.fits(args):
            raise ShapesChangedError from error
        said = str(error)
        self._foreign = "not found in mesh" in said  # of a mesh with explicit axes
        if not any(word in said for word in ("sharding", "device", "memory", "not found in mesh")):
            raise error

    def _dispatch(self, program: Any, args: Sequence[Any]) -> Any:
        """Run the compiled step; counts it if other processes take part."""
        if not self._spans:
            return program(*args)
        begin_step()
        try:
            return program(*args)
        except Exception:
            refuse_step()
            raise

    def _compare(self, args: Sequence[Any]) -> None:
        """Compare the first arguments with those of the other processes: in full if an argument
        comes back as a result, else only what several processes hold."""
        self._compared = True
        paths = [path.partition("]")[0] for path in self.traced.graph.input_paths]
        graph = self.traced.graph
        states = {p for p, v in zip(paths, graph.inputs, strict=True) if graph.values[v].carried}
        shardings = self.in_shardings
        compare_arguments("the step", args, shardings, lambda k: paths[k] in states)


def _options(plan: Plan, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> dict[str, str]:
    """The plan's compiler options for the devices of a mesh."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return dict(plan.compiler_options)
    platform = mesh.devices.flat[0].platform
    options, away = options_on(platform, plan.compiler_options, plan.confirmed is not None)
    if away:
        log.warning("%s devices have no compiler options %s: left out", platform, ", ".join(away))
    return dict(options)


def donated_leaves(traced: Traced, donate_argnums: int | Sequence[int]) -> tuple[int, ...]:
    """Positions of the argument leaves that are donated."""
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    roots = tuple(f"[{n}]" for n in numbers)
    return tuple(k for k, path in enumerate(traced.graph.input_paths) if path.startswith(roots))


def weak_leaves(traced: Traced) -> list[tuple[int, bool]]:
    """Positions of arguments whose weak type matters, and whether each has one."""
    return [
        (k, bool(getattr(aval, "weak_type", False)))
        for k, aval in enumerate(traced.jaxpr.in_avals)
        if getattr(aval, "weak_type", False) or not compat.aval_shape(aval)
    ]


def compiled_step(
    traced: Traced, plan: Plan, *, donate_argnums: int | Sequence[int] = (), name: str = "step"
) -> CompiledStep:
    """The step under a plan: one program, called ``name`` in profiles, or one for each pass of each
    stage."""
    if not plan.schedule:
        return CompiledStep(traced, plan, donate_argnums=donate_argnums, name=name)
    from executor.run.stages.compiled import StagedStep

    return StagedStep(traced, plan, donate_argnums=donate_argnums)


def _is_weak(x: Any) -> bool:
    """Whether an argument is weakly typed, as Python numbers are."""
    return type(x) in (int, float, complex) or bool(getattr(x, "weak_type", False))


def is_inside(args: Any) -> bool:
    """Whether a transformation, such as ``jax.jit``, is tracing a call with these arguments."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree_util.tree_leaves(args))


class _Unplanned:
    """What ``compile_plan`` returns: compiles at the first call, when arguments are known."""

    def __init__(self, calls: Calls, plan: Plan) -> None:
        self.calls, self.plan = calls, plan
        self.compiled: CompiledStep | None = None
        self._key: Hashable = None

    @property
    def is_planned(self) -> bool:
        """Whether the step has been built."""
        return self.compiled is not None

    def prepare(self, *args: Any, **keywords: Any) -> CompiledStep:
        """Trace, check that the plan fits, build the jitted step; runs nothing."""
        return self._prepared(self.calls.bind(args, keywords))

    def _prepared(self, bound: Bound) -> CompiledStep:
        function = with_logical_axis_rules(bound.function)
        compare_program(function, bound.args)
        traced = trace(self._cut(function, bound.args), abstract(bound.args))
        self.compiled = compiled_step(
            traced, self.plan, donate_argnums=bound.donated, name=getattr(self, "__name__", "step")
        )
        self._key = bound.key
        return self.compiled

    def _cut(self, function: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
        """The step rewritten by the plan's recipe: its microbatches and rematerialization."""
        return rewritten(function, args, self.plan.recipe)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run one step under the plan."""
        bound = self.calls.bind(args, keywords)
        before = step = self.compiled
        if step is None or self._key != bound.key or not step.weak_as_traced(bound.args):
            step = self._prepared(bound)
        try:
            result, used = step.run(*bound.args)
        except ShapesChangedError:
            function = self._cut(with_logical_axis_rules(bound.function), bound.args)
            again = trace(function, abstract(bound.args))
            self.plan.check_matches(again.graph)
            raise
        result = bound.finish(result, used)
        if step is not before:
            self.calls.check_cached(bound, args, keywords)
        return result


def compile_plan(
    function: Callable[..., Any],
    plan: Plan,
    *,
    donate_argnums: Indices = (),
    donate_argnames: Names = (),
    static_argnums: Indices = (),
    static_argnames: Names = (),
) -> _Unplanned:
    """A callable that runs ``function`` under ``plan``.

    Args:
        function: the step that the plan was made for. If it was planned under logical axis rules,
            it needs them again (``planner.with_logical_axis_rules``, or those in force in Flax).
        plan: from ``planner.make_plan`` or ``planner.load_plan``.
        donate_argnums, donate_argnames: as for ``jax.jit``.
        static_argnums, static_argnames: as for ``jax.jit``.

    Raises (at the first call):
        PlanMismatchError: the plan is for another step; names the first differing operation.
        RequestError: fewer devices are present than the plan's mesh needs.
    """
    calls = Calls(
        function,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
    return _Unplanned(calls, plan)
