"""``make_plan``: the door. trace -> rules -> groups -> price -> search -> Plan."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Unpack

from costmodels import Cluster
from planner.advice import Again, Case, Least, Shapes, advise, least_plan, rescued
from planner.annotate import MARKS, Pin
from planner.arguments.calls import Indices, Names, bind
from planner.arguments.metadata import rules_of, with_logical_axis_rules
from planner.choose.meshes import (
    Tried,
    choose,
    memory_floor,
    runners_up,
    scout_meshes,
    search_meshes,
    unfold,
)
from planner.choose.thrift import thrifty
from planner.collector import paused
from planner.cost.pricing import Priced
from planner.debug.stage import Stage
from planner.debug.stages import passed
from planner.errors import MemoryLimitError, RequestError
from planner.graph.trace import Traced, reshaped, trace
from planner.microbatch.rewrite import batch_size
from planner.plan.assemble import assembled
from planner.plan.compiled.confirmed import confirmer
from planner.plan.extract import Extraction
from planner.plan.plan import Plan
from planner.recipes import (
    Outcome,
    Recipe,
    Rewriter,
    Wish,
    parse_wish,
    recipe_of,
    recomputed_of,
    search_recipes,
)
from planner.remat.policy import FULL, NONE, OFFLOAD, parse_policy
from planner.remat.rewrite import policies, recomputed
from planner.report.shortage import host_text, shortage_text
from planner.report.units import bytes_text
from planner.request.marks import all_pins, placed_mesh
from planner.request.options import (
    Options,
    Request,
    given_options,
    parse_request,
    takes_options,
)
from planner.request.state import find_state
from planner.rules.borders import border_rule
from planner.rules.factor import FactorRule
from planner.rules.key import EqnKey
from planner.rules.registry import rules_for
from planner.search.iopddl import write_iopddl
from planner.search.pools import pool_peaks
from planner.search.problem import fits
from planner.space.buffer import Memory
from planner.space.decisions import chosen_values, with_decisions
from planner.space.groups import build_groups
from planner.space.replicated import held_whole
from planner.step.analysis import Analysis, analyse, ideal_s
from planner.step.classes import Quotient, fold_analysis

_Asked = ParamSpec("_Asked")


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, and the prices and choices that it was made from (for reports)."""

    plan: Plan
    extraction: Extraction
    quotient: Quotient
    pins: tuple[Pin, ...]
    request: Request
    others: tuple[tuple[Plan, Extraction], ...] = ()
    """The best plans of other meshes: ``request.candidates`` - 1."""


@takes_options
def plan_step(
    function: Callable[..., Any],
    *args: Any,
    cluster: str | Cluster,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: Indices = (),
    static_argnames: Names = (),
    **options: Unpack[Options],
) -> Planned:
    """Plan a train step for a cluster; starts no backend.

    Args:
        function: the step, any jit-able function of pytrees, Flax NNX objects and Equinox modules.
        *args: arrays or ShapeDtypeStructs, and NNX objects that hold such (``nnx.eval_shape``
            makes them); other leaves than arrays and numbers are static.
        cluster: ``"h100:8x4"``, ``"v5p:4x4x8"``, ``"cpu:8"``, a .toml path or a Cluster.
        donate_argnums: arguments whose memory the results may take; None means every
            argument that comes back as a result.
        static_argnums, static_argnames: as for ``jax.jit``.
        **options: see ``planner.request.options.Options``.

    Returns:
        The plan (all that ``make_plan`` returns), and what it was made from.

    Raises:
        ModelError: the step failed while traced.
        RequestError: the request can't be met (PinError, MemoryLimitError among them).

    >>> import jax, jax.numpy as jnp
    >>> w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 4096), (65536, 4096)))
    >>> plan = plan_step(lambda w, x: jnp.tanh(x @ w), w, x, cluster="h100:8").plan
    >>> tuple(plan.as_partition_specs()["[1]"])
    ('data',)
    """
    begun = time.perf_counter()
    asked = given_options("make_plan", options)
    parts, remat = asked.pop("microbatches", None), asked.pop("remat", None)
    bound = bind(function, args, static_argnums=static_argnums, static_argnames=static_argnames)
    rules = asked.pop("logical_axis_rules", None)
    function, args = with_logical_axis_rules(bound.function, rules), bound.args
    asked.setdefault("mesh", placed_mesh(args, cluster))
    request = parse_request(cluster, **asked)
    wish = parse_wish(parts, remat, function, request.mode == "AUTO_PARALLEL")
    with paused():
        return _under(wish, function, args, request, donate_argnums, begun)


def _plan_alone(plan: Callable[_Asked, Planned]) -> Callable[_Asked, Plan]:
    """The same function, which returns the plan and lets go of what it was made from."""

    @functools.wraps(plan)
    def make_plan(*args: _Asked.args, **options: _Asked.kwargs) -> Plan:
        return plan(*args, **options).plan

    make_plan.__name__ = make_plan.__qualname__ = "make_plan"
    return make_plan


make_plan = _plan_alone(plan_step)


def plan_traced(
    traced: Traced,
    args: Sequence[Any],
    request: Request,
    donate_argnums: int | Sequence[int] | None,
    begun: float,
    *,
    function: Callable[..., Any] | None = None,
) -> Planned:
    """The part of ``plan_step`` after tracing; ``function`` is traced again if no plan fits."""
    with paused():
        return _Row(traced, args, request, donate_argnums, function).planned(begun)


class _Row:
    """A step under one recipe, on all meshes."""

    def __init__(
        self,
        traced: Traced,
        args: Sequence[Any],
        request: Request,
        donate_argnums: int | Sequence[int] | None,
        function: Callable[..., Any] | None,
    ) -> None:
        self.traced, self.args, self.request = traced, args, request
        self.donate_argnums, self.function = donate_argnums, function
        self.step = self.prepare(traced)

    @functools.cached_property
    def searched(self) -> tuple[tuple[Tried, ...], Least | None]:
        """What was found on all meshes; and the plan of the least peak, where it came to that."""
        quotient, request = self.step.quotient, self.request
        tried = search_meshes(quotient, self.step.pins, request)
        if choose(tried)[1].feasible:
            return tried, None
        least = least_plan(quotient, tried, request)
        return rescued(least, tried, request), least

    @property
    def fits(self) -> bool:
        """Whether the search finds a plan that fits."""
        near = memory_floor(self.step.quotient, self.request) <= self.request.limit_bytes
        return near and choose(self.searched[0])[1].feasible

    def prepare(self, traced: Traced, request: Request | None = None) -> _Prepared:
        """Rules, groups and analysis of a trace."""
        request = self.request if request is None else request
        rules = rules_of(self.function)
        pins = all_pins(traced, self.args, request.shardings, rules, request.mode)
        return _prepared(traced, pins, request, self.donate_argnums)

    def planned(self, begun: float, also: str = "") -> Planned:
        """The plan; raises MemoryLimitError, whose text ends with ``also``."""
        again = Again(
            self._retraced, lambda r: self.prepare(self.traced, r).quotient, self._recomputed
        )
        planned = _planned(self.step, *self.searched, self.request, begun, again, also)
        made = recipe_of(self.function)
        plan = dataclasses.replace(
            planned.plan,
            microbatches=made.microbatches,
            remat=made.remat,
            recomputed=recomputed_of(self.function),
        )
        planned = dataclasses.replace(planned, plan=plan)
        if self.request.confirm:
            return _confirmed(planned, self.traced, self.donate_argnums)
        return planned

    def _retraced(self, shapes: Shapes) -> tuple[Quotient, Sequence[Pin]]:
        if self.function is None:
            raise RequestError("only the trace is known")
        again = self.prepare(trace(self.function, reshaped(self.args, shapes)))
        return again.quotient, again.pins

    def _recomputed(self, on_host: bool) -> tuple[str, Quotient, Sequence[Pin]] | None:
        found = recomputed(self.traced, parse_policy(OFFLOAD if on_host else FULL))
        if found is None:
            return None
        again = self.prepare(trace(found.function, self.args))
        return found.what, again.quotient, again.pins


MOST_PARTS = 64
"""Microbatches that are tried at most."""


def _under(
    wish: Wish,
    function: Callable[..., Any],
    args: Sequence[Any],
    request: Request,
    donate_argnums: int | Sequence[int] | None,
    begun: float,
) -> Planned:
    """The plan under the recipe that was asked for, or under the best of those left open."""
    rewriter = Rewriter(function, args)

    def look(recipe: Recipe, known_s: float) -> Outcome[_Row]:
        made = rewriter(recipe)
        row = _Row(trace(made, args), args, request, donate_argnums, made)
        cost_s, fits = scout_meshes(row.step.quotient, row.step.pins, request, known_s)
        return Outcome(cost_s, fits, row)

    made = rewriter(wish.recipe)
    first = _Row(trace(made, args), args, request, donate_argnums, made)
    if not wish.is_open or (not wish.always and first.fits):
        return first.planned(begun)
    counts, why = _counts(wish, rewriter)
    found = policies(rewriter.cut(wish.recipe.microbatches)[1]) if wish.open_remat else ()
    kept = (NONE, *found) if wish.open_remat else (wish.recipe.remat,)
    least_s = ideal_s(first.step.quotient.whole, request.model, request.cluster.num_devices)
    best, seen = search_recipes(counts, kept, look, lambda _: least_s)
    tried = (
        f"{len(seen)} of {len(counts) * len(kept)} recipes planned: "
        f"{' or '.join(map(str, counts))} microbatches, remat {', '.join(kept)}"
    )
    if why:
        tried += f"; no microbatches: {why}"
    if best is None:
        return first.planned(begun, tried)
    planned = seen[best].found.planned(begun)
    note = tried if wish.always else f"as it is, the step fits nowhere; {tried}"
    plan = dataclasses.replace(planned.plan, notes=(*planned.plan.notes, note))
    return dataclasses.replace(planned, plan=plan)


def _counts(wish: Wish, rewriter: Rewriter) -> tuple[tuple[int, ...], str]:
    """Numbers of microbatches to try, and why there are no more than one."""
    given = wish.recipe.microbatches
    if not wish.open_microbatches:
        return (given,), ""
    try:
        size = batch_size(rewriter.cut(1)[1])
    except RequestError as error:
        return (1,), str(error)
    counts = [m for m in range(1, min(size, MOST_PARTS) + 1) if size % m == 0]
    twos = [m for m in counts if m & (m - 1) == 0]
    counts = twos if len(twos) > 1 else counts
    try:
        rewriter.cut(counts[min(1, len(counts) - 1)])
    except RequestError as error:
        return (1,), str(error)
    return tuple(counts), ""


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A traced step, ready to be planned on any mesh."""

    rules: tuple[FactorRule, ...]
    quotient: Quotient
    pins: tuple[Pin, ...]


def _prepared(
    traced: Traced,
    pins: tuple[Pin, ...],
    request: Request,
    donate_argnums: int | Sequence[int] | None,
) -> _Prepared:
    graph = traced.graph
    passed(Stage.GRAPH, graph)
    rules = graph_rules(traced)
    donated = _donated(traced, donate_argnums)
    chosen = chosen_values(graph, request.decided)
    groups = with_decisions(build_groups(graph, rules, pins), chosen)
    passed(Stage.GROUPS, groups, graph)
    analysis = analyse(graph, rules, groups, donated, request.cluster.device, chosen)
    passed(Stage.ANALYSIS, analysis)
    along_axis = bool(request.tensor or request.sequence)
    state = find_state(graph, request.state) if request.state or along_axis else None
    differ = request.mode != "AUTO_PARALLEL" or along_axis
    quotient = fold_analysis(analysis, pins, inputs_differ=differ, state=state)
    passed(Stage.CLASSES, quotient)
    return _Prepared(rules, quotient, pins)


def _planned(
    step: _Prepared,
    tried: tuple[Tried, ...],
    least: Least | None,
    request: Request,
    begun: float,
    again: Again,
    also: str,
) -> Planned:
    picked = choose(tried)
    best = thrifty(step.quotient, picked, request)
    tried = tuple(best if t is picked else t for t in tried)
    priced, solution = unfold(step.quotient, best)
    passed(Stage.PROBLEM, best[0], priced)
    passed(Stage.SOLUTION, best, (priced, solution))
    if request.dump_problem is not None:
        write_problem(priced, request.dump_problem)
    if least is not None and not solution.feasible:
        raise _shortage(Case(step.quotient, step.pins, request, least, again), also)
    fallbacks = _fallbacks(priced.analysis, step.rules)
    plan, extraction = assembled(
        step.quotient, step.pins, (priced, solution), best, tried, request, fallbacks, begun
    )
    passed(Stage.PLAN, plan, extraction.graph)
    others = tuple(
        assembled(
            step.quotient,
            step.pins,
            unfold(step.quotient, t),
            t,
            tuple(t if x[0].mesh == t[0].mesh else x for x in tried),
            request,
            fallbacks,
            begun,
        )
        for t in runners_up(step.quotient, step.pins, request, best, tried)
    )
    return Planned(plan, extraction, step.quotient, step.pins, request, others)


def _confirmed(
    planned: Planned, traced: Traced, donate_argnums: int | Sequence[int] | None
) -> Planned:
    """The best of the plans as the compiler sees them."""
    request = planned.request
    made = [(planned.plan, planned.extraction), *planned.others]
    number, plan = confirmer()(
        [plan for plan, _ in made],
        traced,
        request.cluster,
        donate_argnums=donate_argnums,
        seconds=request.confirm_limit_s,
    )
    return dataclasses.replace(planned, plan=plan, extraction=made[number][1])


def _shortage(case: Case, also: str) -> MemoryLimitError:
    """What to say when no plan fits: the host's memory, where that alone is short, else the
    device's, with what would help."""
    request, least = case.request, case.least
    peaks = pool_peaks(least.priced.problem, least.memory.choice)
    for pool in least.priced.problem.pools[1:]:
        if peaks[pool.name] > pool.limit_bytes and fits(
            peaks[Memory.DEVICE], least.priced.problem.limit_bytes
        ):
            return MemoryLimitError(
                host_text(request.cluster.text, peaks[pool.name], pool.limit_bytes),
                least_bytes=peaks[pool.name],
                lower_bytes=0.0,
                limit_bytes=pool.limit_bytes,
            )
    scalars = least.priced.analysis.scalar_bytes
    if not request.advice:
        return MemoryLimitError(
            f"no plan fits in {request.limit_bytes:g} bytes per device on {request.cluster.text}",
            least_bytes=least.memory.peak_bytes + scalars,
            lower_bytes=least.lower_bytes,
            limit_bytes=request.limit_bytes,
        )
    shortage = advise(case)
    return MemoryLimitError(
        shortage_text(shortage) + (f"\n  also tried: {also}" if also else ""),
        least_bytes=shortage.least_bytes,
        lower_bytes=shortage.lower_bytes,
        limit_bytes=shortage.limit_bytes,
    )


def graph_rules(traced: Traced) -> tuple[FactorRule, ...]:
    """One factor rule per operation: borders by hand, the rest from the registry, which is asked
    once for equal operations."""
    graph = traced.graph
    asked: dict[int, EqnKey] = {}
    alike: list[int] = []  # per operation, the one whose rule it has
    first: dict[int, int] = {}
    for op, eqn, code in zip(graph.ops, traced.eqns, graph.codes, strict=True):
        told = eqn is None or bool(op.attrs) or not eqn.params  # the code tells the parameters
        at = first.setdefault(code, op.index) if told else op.index
        alike.append(at)
        if at == op.index and eqn is not None and op.kind not in MARKS:
            asked[at] = eqn
    known = dict(zip(asked, rules_for(list(asked.values())), strict=True))
    for op, at in zip(graph.ops, alike, strict=True):
        if at == op.index and at not in known:
            ins = [graph.values[i].shape if i >= 0 else () for i in op.inputs]
            known[at] = border_rule(op.kind, ins, [graph.values[o].shape for o in op.outputs])
    return tuple([known[at] for at in alike])


def write_problem(priced: Priced, path: str | Path) -> None:
    """Write the problem of a mesh; seconds and bytes, memory without that of scalar inputs."""
    try:
        write_iopddl(priced.problem, path)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from error


def _donated(traced: Traced, donate_argnums: int | Sequence[int] | None) -> tuple[bool, ...]:
    graph = traced.graph
    if donate_argnums is None:
        return tuple(graph.values[v].carried for v in graph.inputs)
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    return tuple(any(path.startswith(f"[{n}]") for n in numbers) for path in graph.input_paths)


def _fallbacks(analysis: Analysis, rules: Sequence[FactorRule]) -> tuple[str, ...]:
    return tuple(
        f"{w.name}: no rule, replicated"
        + (f" x{w.count}" if w.count > 1 else "")
        + f"; {bytes_text(w.nbytes)} of operands and results"
        + (" each" if w.count > 1 else "")
        for w in held_whole(analysis.graph, rules)
    )
