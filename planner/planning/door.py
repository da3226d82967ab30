"""``make_plan``, the entry point: searches recipes, per recipe meshes, per mesh shardings."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Unpack

from costmodels import Cluster
from planner.arguments.calls import Indices, Names, bind
from planner.arguments.metadata import with_logical_axis_rules
from planner.collector import paused
from planner.errors import RequestError
from planner.frontend.capture import call_of
from planner.graph.trace import Traced
from planner.plan.plan import Plan
from planner.planning.open_recipes import Door
from planner.planning.outer.padding import with_padding
from planner.planning.outer.pipelines import of_stage, over_stages, where_hopeful, with_stages
from planner.planning.outer.replicas import with_recipe
from planner.planning.row import Planned, Row
from planner.recipes import AUTO, Rewriter, Wish, parse_wish
from planner.request.marks import placed_mesh
from planner.request.options import Options, given_options, takes_options
from planner.request.parsed import Request, parse_request
from planner.spec import REWRITINGS

_Asked = ParamSpec("_Asked")


@takes_options
def plan_step(
    function: Callable[..., Any],
    *args: Any,
    cluster: str | Cluster | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: Indices = (),
    static_argnames: Names = (),
    **options: Unpack[Options],
) -> Planned:
    """Plan a train step for a cluster; starts no backend.

    Args:
        function: the step, any jit-able function of pytrees, Flax NNX objects and Equinox modules.
            The options of a parallelized step apply where none are given here.
        *args: arrays or ShapeDtypeStructs, and NNX objects that hold such (``nnx.eval_shape``
            makes them); other leaves than arrays and numbers are static.
        cluster: ``"h100:8x4"``, ``"v5p:4x4x8"``, ``"cpu:8"``, a .toml path or a Cluster; required
            unless the step is parallelized and names one.
        donate_argnums: arguments whose memory the results may take; None means every
            argument that comes back as a result.
        static_argnums, static_argnames: as for ``jax.jit``.
        **options: see ``planner.request.options.Options``.

    Returns:
        The plan (all that ``make_plan`` returns), and what it was made from.

    Raises:
        ModelError: the step failed while traced.
        RequestError: the request can't be met (includes PinError and MemoryLimitError).

    >>> import jax, jax.numpy as jnp
    >>> w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 4096), (65536, 4096)))
    >>> plan = plan_step(lambda w, x: jnp.tanh(x @ w), w, x, cluster="h100:8").plan
    >>> tuple(plan.as_partition_specs()["[1]"])
    ('data',)
    """
    begun = time.perf_counter()
    if (call := call_of(function, args)) is not None:
        function, args = call.function, call.args
        given = dict(call.options)
        planned_for, donated = (given.pop(name, None) for name in ("cluster", "donate_argnums"))
        cluster = planned_for if cluster is None else cluster
        donate_argnums = donated if donate_argnums is None else donate_argnums
        options = {**given, **given_options("make_plan", options)}  # type: ignore[typeddict-item]
    if cluster is None:
        raise RequestError(
            "make_plan: no cluster given; expected cluster='cpu:8', 'h100:8', 'v5p:4x4x4', the "
            "path of a .toml file or a Cluster (mw.detect_cluster() describes what is here)"
        )
    bound = bind(function, args, static_argnums=static_argnums, static_argnames=static_argnames)
    return _asked(bound.function, bound.args, cluster, donate_argnums, options, begun)


def plan_tried(
    function: Callable[..., Any],
    *args: Any,
    cluster: str | Cluster,
    donate_argnums: int | Sequence[int] | None = None,
    made: dict[str, Rewriter] | None = None,
    **options: Any,
) -> Planned:
    """Like ``plan_step``, for one of many tries. If no plan fits, it does not search for what would
    help, which takes longest.

    Args:
        function, *args, cluster, donate_argnums, **options: as for ``plan_step``.
        made: cache for tries of the same step with the same arguments and options, except for the
            cluster and the recipe; empty at first.
    """
    begun = time.perf_counter()
    return _asked(
        function, args, cluster, donate_argnums, options, begun, advice=False, rewriters=made
    )


def _asked(
    function: Callable[..., Any],
    args: Sequence[Any],
    cluster: str | Cluster,
    donate_argnums: int | Sequence[int] | None,
    options: Mapping[str, Any],
    begun: float,
    *,
    advice: bool = True,
    rewriters: dict[str, Rewriter] | None = None,
) -> Planned:
    request_options = given_options("make_plan", options)
    rewriting = {name: request_options.pop(name, None) for name in REWRITINGS}
    rules = request_options.pop("logical_axis_rules", None)
    function = with_logical_axis_rules(function, rules)
    placed = "mesh" not in request_options
    request_options.setdefault("mesh", placed_mesh(args, cluster))
    request = parse_request(cluster, **request_options)
    request = dataclasses.replace(request, advice=advice, placed=placed)
    if request.staged:
        rewriting["stages"] = _staged(rewriting["stages"])
    unsaid = rewriting["stages"] is None
    wish = parse_wish(rewriting, function, request.mode != "STAND_ALONE")
    with paused():
        rewriter = ({} if rewriters is None else rewriters).setdefault(
            "rewriter", Rewriter(function, args)
        )
        door = Door(rewriter, args, request, donate_argnums, begun)
        plain = dataclasses.replace(wish, open=wish.open - {"pad_batch"})
        planned = _under(plain, door)
        if unsaid:
            planned = where_hopeful(planned, plain, door)
        return with_padding(planned, plain, door) if "pad_batch" in wish.open else planned


def _staged(stages: Any) -> Any:
    """The number of pipeline stages under a mode with stages; ``AUTO`` if none is given.

    Raises:
        RequestError: one stage is requested.
    """
    if stages in (1, "1"):
        raise RequestError("stages=1 contradicts the mode pp: leave one of them out")
    return AUTO if stages is None else stages


def _plan_alone(plan: Callable[_Asked, Planned]) -> Callable[_Asked, Plan]:
    """The same function, but it returns the plan alone."""

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
        return Row(traced, args, request, donate_argnums, function).planned(begun)


def _under(wish: Wish, door: Door) -> Planned:
    """The plan under the requested recipe, or under the best of those left open."""
    if "stages" in wish.open:
        return over_stages(wish, door)
    if wish.recipe.stages > 1:
        wish = with_stages(wish, door)
    if wish.recipe.schedule:
        door = dataclasses.replace(door, request=of_stage(door.request, wish.recipe.stages))
    return with_recipe(wish, door)
