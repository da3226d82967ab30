"""``parallelize``: plan at the first call, then just run."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import jax

from executor.processes.agreement.alike import compare_program
from executor.processes.bootstrap import agree
from executor.run.compile import CompiledStep, ShapesChangedError, compiled_step, is_inside
from executor.run.follow import follow
from executor.run.mesh import detect_cluster, detected_memory
from planner import compat
from planner.announce import announced
from planner.arguments.calls import Bound, Calls, Indices, Names, captured_objects, name_of
from planner.arguments.metadata import check_rules, with_logical_axis_rules
from planner.arguments.outcome import unwrapped
from planner.errors import NotPlannedError, PlanMismatchError, RequestError
from planner.frontend import capture
from planner.frontend.inert import inert_notes
from planner.graph.trace import Traced, abstract, trace
from planner.modes import DEFAULT_SEARCH, check_mode, get_parallel_mode
from planner.plan.assemble import NOT_SPLIT, OVER
from planner.plan.plan import Plan
from planner.planning import make_plan
from planner.recipes import PLAIN, rewritten
from planner.report.sections.recipe import in_vain
from planner.report.units import bytes_text
from planner.request.options import Options, given_options, takes_options
from planner.space.replicated import held_whole
from planner.spec import REWRITINGS

log = logging.getLogger("meshwright")

PLANS_KEPT = 16
"""Default number of planned and compiled steps that ``parallelize`` keeps."""
LARGE, LARGE_SHARE = 256_000_000, 0.01
"""Bytes, or the share of a device's memory, from which an operation that runs whole is named."""


_Key = tuple[Hashable, Any, tuple[tuple[Any, ...], ...]]
"""The parts of a call that decide its plan: its static values, its structure, and per array its
shape, dtype and weak type."""


@dataclass(frozen=True)
class _Entry:
    """A planned step, and the calls that it serves."""

    step: CompiledStep
    key: Hashable
    is_plain: bool


class Parallelized:
    """A train step that plans itself; behaves like the function it wraps.

    New shapes and new static values trigger a new plan (and a WARNING of the ``meshwright``
    logger); the last ``max_plans`` plans are kept.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: dict[str, Any],
        calls: Calls,
        max_plans: int,
        like: Parallelized | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.__name__ = name_of(function)
        self.__wrapped__ = self.function = function
        if "logical_axis_rules" in options:
            check_rules(options["logical_axis_rules"])
        if max_plans < 1:
            raise RequestError(f"max_plans={max_plans}: expected at least 1")
        self.options, self.like = options, like
        self.calls, self._max_plans = calls, max_plans
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._current: _Entry | None = None

    def __repr__(self) -> str:
        plan = repr(self.plan) if self.is_planned else "not planned yet"
        return f"<Parallelized {self.__name__}: {plan}>"

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan."""
        return self._current is not None

    @property
    def plan(self) -> Plan:
        """The plan in use; raises NotPlannedError before the first call."""
        return self.compiled.plan

    @property
    def compiled(self) -> CompiledStep:
        """The compiled step in use; raises NotPlannedError before the first call."""
        if self._current is None:
            raise NotPlannedError(
                f"{self.__name__} has not been called yet, so it "
                "has no plan; call it once, or use mw.make_plan(step, *args, cluster=...)"
            )
        return self._current.step

    def to_plan(self, *args: Any, **keywords: Any) -> capture.CapturedCall:
        """What a call with these arguments would plan, with the options; plans nothing."""
        bound = self.calls.bind(args, keywords)
        function, given, options = self._asked(bound, abstract(bound.args))
        return capture.CapturedCall(function, given, {**options, "donate_argnums": bound.donated})

    def prepare(self, *args: Any, **keywords: Any) -> CompiledStep:
        """Trace and plan for these arguments (arrays or ShapeDtypeStructs); runs nothing."""
        return self._planned(self.calls.bind(args, keywords)).step

    def lower(self, *args: Any, **keywords: Any) -> jax.stages.Lowered:
        """Lower the planned step for these arguments, as ``jax.jit(step).lower`` does."""
        bound = self.calls.bind(args, keywords)
        return self._planned(bound).step.jitted.lower(*abstract(bound.args))

    def _planned(self, bound: Bound) -> _Entry:
        """The step for a call: one that is already planned, or a new one."""
        shapes = abstract(bound.args)
        leaves, tree = jax.tree_util.tree_flatten(shapes)
        key = (bound.key, tree, tuple((x.shape, str(x.dtype), x.weak_type) for x in leaves))
        if key not in self._entries:
            step = self._retraced(bound, shapes)
            if step is None:
                if self._entries:
                    news = self._news(bound, key)
                    log.warning("%s: arguments of %s, planning again", self.__name__, news)
                step = self._built(bound, shapes)
            self._check_passed(bound, step)
            self._entries[key] = _Entry(step, bound.key, bound.is_plain)
            self._evict()
        self._entries.move_to_end(key)
        self._current = self._entries[key]
        return self._current

    def _check_passed(self, bound: Bound, step: CompiledStep) -> None:
        """Compare all arrays of static objects from now on if the step has one of them as a
        constant."""
        passed = {id(x) for _, fixed in bound.function.partition.statics for x in fixed.passed}
        if passed and any(id(x) in passed for x in compat.all_consts(step.traced.jaxpr)):
            self.calls.trusting = False

    def _retraced(self, bound: Bound, shapes: tuple[Any, ...]) -> CompiledStep | None:
        """The step under the plan of a call that differs only in weak types, if that plan fits."""
        for entry in reversed(self._entries.values()):
            if entry.key != bound.key or not entry.step.fits(shapes):
                continue
            rules = self.options.get("logical_axis_rules")
            function = with_logical_axis_rules(bound.function, rules)
            traced = trace(rewritten(function, shapes, entry.step.plan.recipe), shapes)
            try:
                return compiled_step(
                    traced, entry.step.plan, donate_argnums=bound.donated, name=self.__name__
                )
            except PlanMismatchError:
                return None
        return None

    def _news(self, bound: Bound, key: _Key) -> str:
        """What is new about a call, as text."""
        if self._current is None or self._current.key == bound.key:
            for other in reversed(self._entries):
                pairs = list(zip(key[2], other[2], strict=False))
                if key[:2] == other[:2] and all(a[:2] == b[:2] for a, b in pairs):
                    paths = jax.tree_util.tree_flatten_with_path(bound.args)[0]
                    changed = [k for k, (a, b) in enumerate(pairs) if a != b]
                    first = jax.tree_util.keystr(paths[changed[0]][0])
                    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                    return (
                        f"the same shapes with other weak types, as of jnp.log(10.0), at {first}"
                        f"{more} (give such arrays a dtype)"
                    )
            return "new shapes"
        return "new static values or structure" + bound.difference(self._current.key)

    def _evict(self) -> None:
        if len(self._entries) <= self._max_plans:
            return
        self._entries.popitem(last=False)
        log.warning(
            "%s: more than %d planned steps, dropped the one used longest ago; pad batches to "
            "fewer shapes, or pass max_plans=",
            self.__name__,
            self._max_plans,
        )

    def _asked(
        self, bound: Bound, shapes: tuple[Any, ...]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function to plan, its arguments with their marks, and the options."""
        # None: those in force in Flax
        rules = self.options.get("logical_axis_rules")
        function = with_logical_axis_rules(bound.function, rules)
        options, given = dict(self.options), bound.args
        if self.like is not None and (self.like.is_planned or not capture.is_on()):
            given, options = follow(self.like.compiled, self.like.options, given, options)
        # placements are marks at the first call; later ones come from our plans
        if (self._entries and self.like is None) or is_inside(given):
            given = shapes
        return function, given, options

    def _built(self, bound: Bound, shapes: tuple[Any, ...]) -> CompiledStep:
        function, given, options = self._asked(bound, shapes)
        capture.offer(function, given, {**options, "donate_argnums": bound.donated})
        compare_program(function, shapes)
        if not options.get("cluster"):
            options["cluster"] = detect_cluster()
            options.setdefault("memory", detected_memory(options["cluster"]))
        traced = trace(function, shapes)
        for line in inert_notes(traced.graph) if self.like is None else ():
            log.warning("%s: %s", self.__name__, line)
        for name in captured_objects(bound.function):
            log.warning(
                "%s reads the NNX object %r from around it: its arrays are constants of the "
                "compiled step, later changes are not seen; pass it as an argument",
                self.__name__,
                name,
            )
        with announced(f"planning {self.__name__} for {options['cluster']}"):
            plan = make_plan(function, *given, donate_argnums=bound.donated, **options)
        plan = agree(plan)
        notes = [line for line in plan.notes if NOT_SPLIT in line or OVER in line]
        for line in (*notes, *in_vain(plan)):
            log.warning("%s: %s", self.__name__, line)
        if plan.recipe != PLAIN:
            self._tell(plan, options)
            traced = trace(rewritten(function, shapes, plan.recipe), shapes)
        for line in replicated(traced, plan):
            log.warning("%s: %s", self.__name__, line)
        return compiled_step(traced, plan, donate_argnums=bound.donated, name=self.__name__)

    def _tell(self, plan: Plan, options: Mapping[str, Any]) -> None:
        """Warn if the step was rewritten in a respect that no option requests."""
        chosen, plain = dataclasses.asdict(plan.recipe), dataclasses.asdict(PLAIN)
        names = [name for name in REWRITINGS if name not in options]
        unasked = {k: chosen[k] for k in names if chosen[k] != plain[k]}
        named = options.get("mode")
        mode = check_mode(named, DEFAULT_SEARCH) if named else get_parallel_mode()
        if mode.staged or plan.order:  # pipelines were requested, and imply these
            come = ("stages", "microbatches", "schedule")
            unasked = {k: v for k, v in unasked.items() if k not in come}
        replicas = unasked.pop("replicas", 1)
        if replicas > 1:
            log.info(
                "%s: reduces the gradients of all %s once per step, in %d replicas (replicas=1 "
                "reduces them in every one)",
                self.__name__,
                "microbatches" if plan.microbatches > 1 else "turns of its loops",
                replicas,
            )
        if unasked:
            why = "does not fit in device memory as it is; it runs with"
            if plan.stages > 1:
                why = f"runs in {plan.stages} pipeline stages, and for them with"
            log.warning(
                "%s: %s %s (%s turns that off)",
                self.__name__,
                why,
                ", ".join(f"{k}={v!r}" for k, v in unasked.items()),
                ", ".join(f"{k}={plain[k]!r}" for k in unasked),
            )

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run one step; plans first when these shapes or static values are new."""
        entry = self._current
        if entry and entry.is_plain and not keywords and entry.step.weak_as_traced(args):
            try:
                return unwrapped(*entry.step.run(*args))
            except (ShapesChangedError, TypeError):  # JAX raises TypeError for non-arrays
                pass
        bound = self.calls.bind(args, keywords)
        result = self._call(bound)
        if self._current is not entry:
            self.calls.check_cached(bound, args, keywords)
        return result

    def _call(self, bound: Bound) -> Any:
        entry = self._current
        if entry is None or entry.key != bound.key or not entry.step.weak_as_traced(bound.args):
            entry = self._planned(bound)
        try:
            result, used = entry.step.run(*bound.args)
        except ShapesChangedError:
            result, used = self._planned(bound).step.run(*bound.args)
        return bound.finish(result, used)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the object is the first argument, as for ``jax.jit``."""
        return self if instance is None else Method(self, instance)


class Method:
    """A parallelized method of an object; its other attributes are those of the step."""

    def __init__(self, step: Parallelized, instance: Any) -> None:
        self.__func__, self.__self__ = step, instance

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run one step of the object."""
        return self.__func__(self.__self__, *args, **keywords)

    def to_plan(self, *args: Any, **keywords: Any) -> capture.CapturedCall:
        """As ``Parallelized.to_plan``."""
        return self.__func__.to_plan(self.__self__, *args, **keywords)

    def prepare(self, *args: Any, **keywords: Any) -> CompiledStep:
        """As ``Parallelized.prepare``."""
        return self.__func__.prepare(self.__self__, *args, **keywords)

    def lower(self, *args: Any, **keywords: Any) -> jax.stages.Lowered:
        """As ``Parallelized.lower``."""
        return self.__func__.lower(self.__self__, *args, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)


def replicated(traced: Traced, plan: Plan) -> list[str]:
    """A line for each large operation that has no sharding rule and runs whole on every device."""
    if not plan.fallbacks:
        return []
    return [
        f"{w.name}{f' x{w.count}' if w.count > 1 else ''} has no sharding rule: every device holds "
        f"its {bytes_text(w.nbytes)} of operands and results and does all of its work"
        for w in held_whole(traced.graph, traced.rules)
        if w.nbytes >= min(LARGE, LARGE_SHARE * plan.prediction.limit_bytes)
    ]


@takes_options
def parallelize(
    function: Callable[..., Any] | None = None,
    *,
    donate_argnums: Indices = (),
    donate_argnames: Names = (),
    static_argnums: Indices = (),
    static_argnames: Names = (),
    like: Parallelized | None = None,
    max_plans: int = PLANS_KEPT,
    cluster: str | None = None,
    **options: Unpack[Options],
) -> Any:
    """Run a train step in parallel: the first call traces, plans and compiles.

    Args:
        function: a jit-able step of pytrees, Flax NNX objects (updated in place, as by ``nnx.jit``)
            or Equinox modules; None makes this a decorator with options.
        donate_argnums, donate_argnames, static_argnums, static_argnames: as for ``jax.jit``.
        like: a step that is already planned, such as the train step for an evaluation step: this
            step uses the same mesh, and the arrays that both have stay where that plan keeps them.
        max_plans: how many plans to keep, each with its compiled program; one per set of shapes and
            static values. The least recently used one is dropped first.
        cluster: the cluster to plan for; None describes the devices present.
        **options: as for ``planner.make_plan``.

    Returns:
        A ``Parallelized``: call it like ``function``; ``.plan`` is the Plan.
    """
    given = given_options("parallelize", options)
    if cluster is not None:
        given["cluster"] = cluster

    def wrapped(function: Callable[..., Any]) -> Parallelized:
        calls = Calls(
            function,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
        )
        return Parallelized(function, given.copy(), calls, max_plans, like)

    return wrapped if function is None else wrapped(function)
