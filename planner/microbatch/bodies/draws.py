"""Random numbers for the batch inside loops and rematerialized blocks.

A microbatch takes its share of them, as of every other value that is made for the whole batch.
Before the loop over microbatches, the share is a slice. Inside a body, every microbatch makes the
numbers for the whole batch and drops all but its share. A compiler skips the dropped numbers if
each number depends only on its position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax.numpy as jnp

from planner import compat
from planner.graph.flat import Call, Run, again, execute, flatten, looped
from planner.graph.jaxpr.walk import REMAT, called

Take = Callable[[Any, Sequence[Any]], Any]
"""Takes a share of an array for the whole batch: (array, indices of the share)."""
Results = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""Computes the results of an equation from its operands and the indices of a share."""


def draws(eqn: Any, inside: Set[int]) -> bool:
    """Whether the bodies of an equation contain one of the equations ``inside``, at any depth."""
    bodies = (compat.body(v) for v in eqn.params.values())
    return any(
        id(inner) in inside or draws(inner, inside)
        for body in bodies
        if hasattr(body, "eqns")
        for inner in body.eqns
    )


def drawing(whole: Any, small: Any, inside: Set[int], take: Take) -> Results:
    """A function for the results of an equation whose body makes values for the whole batch.

    Args:
        whole, small: the equation in both traces.
        inside: the equations that make such values, by ``id``.
        take: see ``Take``.
    """

    def results(values: Sequence[Any], share: Sequence[Any]) -> list[Any]:
        count = len(share)
        if whole.primitive.name in REMAT:  # its body has access only to its operands
            body, twin = called(whole), called(small)
            assert body is not None and twin is not None

            def inner(given: Sequence[Any]) -> list[Any]:
                share_numbers = list(given[-count:])
                return _run(body.jaxpr, twin.jaxpr, inside, take, given[:-count], share_numbers)

            return again(small, inner)([*values, *share])
        bodies = whole.params["jaxpr"], small.params["jaxpr"]
        return looped(small, lambda given: _run(*bodies, inside, take, given, share))(values)

    return results


def _run(
    whole: Any,
    small: Any,
    inside: Set[int],
    take: Take,
    values: Sequence[Any],
    share: Sequence[Any],
) -> list[Any]:
    """The results of a body."""
    flat, twin = flatten(whole), flatten(small)
    calls: list[Call] = []
    for a, b in zip(flat.calls, twin.calls, strict=True):
        if id(a.eqn) in inside:
            calls.append(b.running(_part(a, b, take, share)))
        elif draws(a.eqn, inside):
            calls.append(b.running(_nested(drawing(a.eqn, b.eqn, inside, take), share)))
        else:
            calls.append(b)
    return execute(dataclasses.replace(twin, calls=tuple(calls)), list(values))


def _part(whole: Call, small: Call, take: Take, share: Sequence[Any]) -> Run:
    """Makes values for the whole batch and takes a share's part of them."""
    shapes = [compat.aval_shape(v.aval) for v in small.eqn.outvars]

    def run(values: Sequence[Any]) -> list[Any]:
        pairs = zip(whole.run(values), shapes, strict=True)
        return [x if x.shape == shape else _taken(x, shape, take, share) for x, shape in pairs]

    return run


def _taken(x: Any, shape: Sequence[int], take: Take, share: Sequence[Any]) -> Any:
    """A share of an array whose dimension of examples need not be the first."""
    d = next(k for k, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if a != b)
    return jnp.moveaxis(take(jnp.moveaxis(x, d, 0), share), 0, d)


def _nested(results: Results, share: Sequence[Any]) -> Run:
    return lambda values: results(values, share)
