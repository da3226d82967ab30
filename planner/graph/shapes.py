"""Rewritten steps: one program for each combination of argument shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from planner.graph.trace import abstract

Step = Callable[..., Any]


def by_shapes(
    function: Step, args: Sequence[Any], program: Step, rewrite: Callable[..., Step]
) -> Step:
    """A step with one program for each combination of shapes and dtypes of its arguments.

    Args:
        function: the original step; names and documentation come from it.
        args: arguments, or ShapeDtypeStructs, that already have a program.
        program: the program for ``args``.
        rewrite: makes the program for others from their ShapeDtypeStructs (a tuple); called once
            for each combination.
    """
    known = {_types(args): program}

    @functools.wraps(function)
    def step(*args: Any) -> Any:
        key = _types(args)
        if key not in known:
            known[key] = rewrite(abstract(args))
        return known[key](*args)

    return step


def _types(args: Sequence[Any]) -> Any:
    leaves, tree = jax.tree_util.tree_flatten(tuple(args))
    return tree, tuple((jnp.shape(x), str(jnp.result_type(x))) for x in leaves)
