"""A step -> its jaxpr and its Graph, without a backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from planner import compat
from planner.arguments.calls import name_of
from planner.arguments.outcome import StepOutcome
from planner.errors import MeshwrightError, ModelError
from planner.graph.flat import FlatJaxpr, execute, flatten
from planner.graph.ir import Graph
from planner.graph.jaxpr.build import Builder, graph_of
from planner.graph.jaxpr.inlined import with_inlined
from planner.graph.jaxpr.own_rows import takes_indices, with_own_rows
from planner.graph.labels.examples import BY_DIMENSIONS, with_roles
from planner.graph.labels.label import by_dimensions
from planner.graph.op_rules import op_rules
from planner.rules.factor import FactorRule
from planner.rules.key import EqnKey

_HINTS = {
    "passed to shard_map": (
        "\nA step is planned on a mesh with Auto axes, which leave shardings open: build the mesh "
        "with axis_types=(jax.sharding.AxisType.Auto,) * number of axes (jax.make_mesh makes "
        "Explicit axes)"
    ),
    "unbound axis name": (
        "\nA step is planned as one program of whole arrays: leave collectives over that axis out "
        "(the mean over the whole batch is the mean over devices), or pass the step under jax.pmap "
        "or jax.shard_map, as it runs today"
    ),
}
"""Hints, by a part of an error message of jax."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced step.

    Attributes:
        jaxpr: closed.
        in_tree, out_tree: of its arguments and results.
        out_shape: its results as ShapeDtypeStructs.
        in_paths, out_paths: the paths of their leaves.
        updated: how many of the outputs, the first ones, update arguments in place.
        origin: of a rewritten form of a step, the trace of the step as written, which has the roles
            of the arguments.
        inlined: names of the libraries' primitives that became calls (``graph.jaxpr.inlined``).
    """

    jaxpr: Any
    in_tree: Any
    out_tree: Any
    out_shape: Any
    in_paths: list[tuple[Any, ...]]
    out_paths: list[tuple[Any, ...]]
    updated: int
    origin: Traced | None = None
    inlined: tuple[str, ...] = ()

    @functools.cached_property
    def graph(self) -> Graph:
        """Its graph, built on first access: forms of a step that are only rewritten further need
        none."""
        graph, _ = self._built
        if self.origin is not None:
            known = self.origin.graph
            pairs = zip(graph.inputs, known.inputs, strict=True)
            roles = {v: known.values[w].role for v, w in pairs}
            return with_roles(graph, {v: r for v, r in roles.items() if r in BY_DIMENSIONS})
        return by_dimensions(graph, lambda: self.rules)

    @functools.cached_property
    def flat(self) -> FlatJaxpr:
        """Its jaxpr as a flat list of calls, without those whose results are unused."""
        return flatten(self.jaxpr).live()

    @functools.cached_property
    def eqns(self) -> tuple[EqnKey | None, ...]:
        """One key per operation, None for borders."""
        return tuple(self._built[1].eqns)

    @functools.cached_property
    def bodies(self) -> tuple[tuple[int, int], ...]:
        """Per operation, the region and the rematerialized body that contain it (0: none)."""
        return tuple(self._built[1].bodies)

    @functools.cached_property
    def rules(self) -> tuple[FactorRule, ...]:
        """One factor rule per operation."""
        return op_rules(self._built[0], self.eqns)

    @functools.cached_property
    def _built(self) -> tuple[Graph, Builder]:
        """The graph without roles that follow from dimensions."""
        return graph_of(self.jaxpr, self.in_paths, self.out_paths, self.updated)


def abstract(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with their arrays replaced by ShapeDtypeStructs (shape, dtype, weak type).

    The placement of an array must not change the plan.
    """

    def one(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
        return compat.as_struct(jax.typeof(x))

    return tuple(jax.tree_util.tree_map(one, args))


def reshaped(args: Sequence[Any], shapes: Mapping[int, tuple[int, ...]]) -> tuple[Any, ...]:
    """Arguments with other shapes for some of their leaves, by position.

    Raises:
        ModelError: a type of the arguments rejects the shapes, such as one that stores its sizes.
    """
    leaves, tree = jax.tree_util.tree_flatten(abstract(args))
    for k, shape in shapes.items():
        leaves[k] = jax.ShapeDtypeStruct(shape, leaves[k].dtype, weak_type=leaves[k].weak_type)
    try:
        return tuple(jax.tree_util.tree_unflatten(tree, leaves))
    except Exception as error:
        raise ModelError(f"arguments of other shapes: {type(error).__name__}: {error}") from error


def trace(
    function: Callable[..., Any], args: Sequence[Any], origin: Traced | None = None
) -> Traced:
    """Trace ``function(*args)`` into a Graph; starts no backend, computes nothing.

    Args:
        function: a jit-able function of pytrees.
        args: arrays or ShapeDtypeStructs.
        origin: see ``Traced``.

    Raises:
        ModelError: the function raised; the user's exception is the cause.
    """
    args = abstract(args)
    inlined: set[str] = set()
    try:
        closed, out_shape = compat.make_jaxpr(function, args)
        closed = _with_own_rows(with_inlined(closed, inlined), args)
    except MeshwrightError:
        raise
    except Exception as error:
        name, text = name_of(function), str(error)
        hint = next((h for part, h in _HINTS.items() if part in text), "")
        said = f"tracing {name} failed: {type(error).__name__}: {text}{hint}"
        raise ModelError(said) from error
    ins, in_tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    outs, out_tree = jax.tree_util.tree_flatten_with_path(out_shape)
    updates = out_shape.updates if isinstance(out_shape, StepOutcome) else ()
    updated = len(jax.tree_util.tree_leaves(updates))
    paths = [p for p, _ in outs]
    if isinstance(out_shape, StepOutcome) and not updated:
        paths = [p[1:] for p in paths]
    paths_in = [p for p, _ in ins]
    fields = (closed, in_tree, out_tree, out_shape, paths_in, paths, updated, origin)
    return Traced(*fields, tuple(sorted(inlined)))


def _with_own_rows(closed: Any, args: Sequence[Any]) -> Any:
    """See ``planner.graph.jaxpr.own_rows``; calls are inlined if that exposes more lookups."""
    rewritten = with_own_rows(closed)
    if rewritten is closed or not takes_indices(rewritten):
        return rewritten
    flat = flatten(closed)
    leaves = jax.tree_util.tree_leaves(tuple(args))
    return with_own_rows(compat.make_jaxpr(lambda *leaves: execute(flat, leaves), leaves)[0])
