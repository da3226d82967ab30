"""The initial state of a step; each array is made on the devices that store it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from executor.run.compile import _Unplanned
from executor.run.parallelize import Parallelized
from planner.arguments import nnx_graph
from planner.errors import ModelError, RequestError


@dataclass(frozen=True)
class _Made:
    """A state, split into its arrays and a function that rebuilds it from other arrays."""

    arrays: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]

    @staticmethod
    def of(state: Any) -> _Made:
        """Split a state; NNX objects become their States, so that shared arrays stay shared."""
        pure, graph, _ = nnx_graph.split(state)
        leaves, tree = jax.tree_util.tree_flatten(pure)
        arrays = [k for k, x in enumerate(leaves) if isinstance(x, jax.Array)]

        def rebuild(new: Sequence[Any]) -> Any:
            full = list(leaves)
            for k, x in zip(arrays, new, strict=True):
                full[k] = x
            whole = jax.tree_util.tree_unflatten(tree, full)
            return whole if graph is None else nnx_graph.merge(whole, graph)[0]

        return _Made([leaves[k] for k in arrays], rebuild)


def init(
    step: Parallelized | _Unplanned,
    make_state: Callable[[], Any],
    *rest: Any,
    unpack: bool = False,
    **keywords: Any,
) -> Any:
    """The initial state of a step, sharded as its plan stores it.

    ``make_state`` is traced for its shapes, the step is planned for them, and ``make_state`` is
    compiled with the plan's shardings for its results. So no device or host ever holds a whole
    array that the plan splits. The values are those of ``make_state()``.

    Args:
        step: from ``parallelize`` or ``compile_plan``.
        make_state: a function without arguments that returns the step's first argument, a pytree of
            arrays, Flax NNX objects or Equinox modules.
        *rest: the step's other arguments, arrays or ShapeDtypeStructs.
        **keywords: its keyword arguments, likewise.
        unpack: ``make_state`` returns a tuple of the step's first arguments, not one argument.

    Returns:
        The result of ``make_state``.

    Raises:
        RequestError: ``make_state`` returns no tuple under ``unpack``, or planning fails.
        ModelError: the step fails for these arguments.
    """
    if not hasattr(step, "prepare"):
        raise RequestError(
            f"init: the step is a {type(step).__name__}; expected one from parallelize or "
            "compile_plan"
        )
    if not callable(make_state):
        raise RequestError(
            f"init: make_state is a {type(make_state).__name__}; expected a function without "
            "arguments that makes the state, so that no device holds all of it"
        )
    states: list[_Made] = []

    def shapes() -> list[Any]:
        states.append(_Made.of(make_state()))
        return states[-1].arrays

    abstract = jax.eval_shape(shapes)
    state = states[-1]
    first = state.rebuild(abstract)
    if unpack and not isinstance(first, tuple):
        raise RequestError(
            f"init: unpack=True, but make_state gives a {type(first).__name__}; expected a tuple "
            "of the step's first arguments"
        )
    args = (*first, *rest) if unpack else (first, *rest)
    try:
        compiled = step.prepare(*args, **keywords)
    except ModelError as error:
        if unpack or not isinstance(first, tuple):
            raise
        raise ModelError(
            f"{error}\nmake_state gives a tuple of {len(first)}; init(..., unpack=True) passes "
            "these as the step's first arguments"
        ) from error.__cause__
    leaves = jax.tree_util.tree_leaves(step.calls.bind(args, keywords).args)
    planned = jax.tree_util.tree_leaves(compiled.in_shardings)
    shardings = {id(leaf): sharding for leaf, sharding in zip(leaves, planned, strict=True)}
    whole = NamedSharding(compiled.mesh, PartitionSpec())
    out = [shardings.get(id(x), whole) for x in abstract]
    return state.rebuild(jax.jit(lambda: _Made.of(make_state()).arrays, out_shardings=out)())
